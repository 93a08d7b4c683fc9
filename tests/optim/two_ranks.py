"""One of two ranks on gloo: DIRECTORY is its argument; started by test_sharded.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import gloo_group
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from halfbyte.optim import AdamW8bit, Lion8bit, Optimizer8bit

OPTIMIZERS: dict[str, Callable[..., Optimizer8bit]] = {
    "adamw": lambda params, **kw: AdamW8bit(params, lr=1e-2, **kw),
    "lion-bf16": lambda params, **kw: Lion8bit(params, lr=1e-3, stochastic_rounding=True, **kw),
}


def model(name: str) -> nn.Sequential:
    """129 and 96 rows: uneven over two ranks; the second rank has no row of the last bias."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 129), nn.GELU(), nn.Linear(129, 96), nn.Linear(96, 1))
    return net.to(torch.bfloat16) if name.endswith("bf16") else net


def full_grad(p: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + p.numel() % 1000)
    return torch.randn(p.shape, generator=generator).to(p.dtype)


def train(net: nn.Module, optimizer: Optimizer8bit, steps: range) -> None:
    """Steps on gradients that do not depend on the number of ranks."""
    for step in steps:
        for p in net.parameters():
            grad = full_grad(p, step)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_equal(sharded: nn.Module, a: Optimizer8bit, single: nn.Module, b: Optimizer8bit) -> None:
    """Bits of everything with 8-bit state; torch's fused step of the rest depends on where its vectors end."""
    for (name, p), q in zip(sharded.named_parameters(), single.parameters(), strict=True):
        mine, theirs = a.state[p], b.state[q]
        assert mine.keys() == theirs.keys(), name
        exact = "exp_avg_codes" in theirs
        for key, got, expected in [("value", p.detach(), q.detach()), *((k, mine[k], theirs[k]) for k in theirs)]:
            whole = full(got)
            assert whole.dtype == expected.dtype, (name, key)
            assert torch.equal(whole, expected) if exact else torch.allclose(whole, expected, rtol=1e-5), (name, key)


def check_fsdp2(name: str, directory: str, mesh: Any) -> None:
    build = OPTIMIZERS[name]
    single, net = model(name), model(name)
    reference = build(single.parameters())
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = build(net.parameters())
    train(single, reference, range(3))
    train(net, optimizer, range(3))
    state = optimizer.state[net[0].weight]
    assert isinstance(state["exp_avg_codes"], DTensor)
    assert state["exp_avg_scales"].placements == (Shard(0),)
    check_equal(net, optimizer, single, reference)

    weights, saved = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": saved}, checkpoint_id=f"{directory}/{name}")
    other = model(name)
    nn.init.zeros_(other[0].weight)
    for layer in other:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(other, mesh=mesh)
    resumed = build(other.parameters())
    weights, saved = get_state_dict(other, resumed)
    loaded = {"model": weights, "optimizer": saved}
    dcp.load(loaded, checkpoint_id=f"{directory}/{name}")
    set_state_dict(other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    check_equal(other, resumed, single, reference)
    train(other, resumed, range(3, 5))
    train(single, reference, range(3, 5))
    check_equal(other, resumed, single, reference)
    exported = optimizer.torch_state_dict()
    again = build(net.parameters())
    again.load_torch_state_dict(exported)
    for p in net.parameters():
        for key, value in optimizer.state[p].items():
            assert torch.equal(full(again.state[p][key]), full(value)), key


def backward(net: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    net(torch.randn(4, 96, generator=generator)).square().mean().backward()


def check_fused_backward(rank: int, mesh: Any) -> None:
    nets = []
    for fused in (False, True):
        net = model("adamw")
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = AdamW8bit(net.parameters(), lr=1e-2, fused_backward=fused)
        for step in range(2):
            backward(net, rank, step)
            assert all((p.grad is None) == fused for p in net.parameters())
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(full(p), full(q))


def check_ddp(rank: int) -> None:
    plain, fused = model("adamw"), model("adamw")
    a = AdamW8bit(plain.parameters(), lr=1e-2)
    b = AdamW8bit(fused.parameters(), lr=1e-2, fused_backward=True)
    plain_ddp, fused_ddp = (nn.parallel.DistributedDataParallel(net) for net in (plain, fused))
    with pytest.raises(NotImplementedError, match=r"call optimizer\.attach_ddp"):
        backward(fused_ddp, rank, 0)
    fused.load_state_dict(plain.state_dict())
    b.state.clear()
    for p in fused.parameters():
        p.grad = None
    fused_ddp = nn.parallel.DistributedDataParallel(fused)
    b.attach_ddp(fused_ddp)
    for step in range(4):
        for net, optimizer in ((plain_ddp, a), (fused_ddp, b)):
            if step == 2:  # accumulated without averaging, part of the next step
                with net.no_sync():
                    backward(net, rank, 50)
            backward(net, rank, step)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(p, q)
        assert q.grad is None


def main(directory: str) -> None:
    with gloo_group() as rank:
        mesh = init_device_mesh("cpu", (2,))
        for name in OPTIMIZERS:
            check_fsdp2(name, directory, mesh)
        check_fused_backward(rank, mesh)
        check_ddp(rank)


if __name__ == "__main__":
    main(sys.argv[1])
