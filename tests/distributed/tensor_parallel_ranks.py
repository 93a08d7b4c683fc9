"""One of the ranks that test_tensor_parallel.py starts: torch's plans on packed layers, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import gloo_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import halfbyte
from halfbyte.nn import QuantEmbedding, QuantLinear

COLWISE = {"up": ColwiseParallel(output_layouts=Replicate()), "one": ColwiseParallel(output_layouts=Replicate())}

ROWS = {"table": RowwiseParallel(input_layouts=Replicate())}


class Net(nn.Module):
    """129 rows that ranks can't share evenly, a trainable bias, and a layer of which only rank 0 has a row."""

    def __init__(self, format: str = "nf4") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = QuantEmbedding.from_embedding(nn.Embedding(51, 64))
        self.up = QuantLinear.from_linear(nn.Linear(64, 129), format)
        self.one = QuantLinear.from_linear(nn.Linear(129, 1), format)
        self.free = nn.Linear(129, 3)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.table(tokens) * scale))
        return self.free(hidden) * self.one(hidden)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(format: str, autocast: bool) -> None:
    mesh, reference = init_device_mesh("cpu", (2,)), Net(format)
    rows = {name: m.packed.clone() for name, m in reference.named_children() if hasattr(m, "packed")}
    model = parallelize_module(copy.deepcopy(reference), mesh, {**ROWS, **COLWISE})
    tokens, results = torch.tensor([[0, 7, 50], [25, 26, 3]]), []
    for net in (reference, model):
        scale = torch.full((64,), 1.5, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = net(tokens, scale)
        output.float().square().mean().backward()
        results.append((output, scale.grad, net.up.bias.grad, net.one.bias.grad, net.free.weight.grad))
    bound = 5e-3 if autocast else 1e-6  # the input's gradient is a sum over ranks
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(full(got), expected, rtol=bound, atol=bound)
    assert torch.equal(results[0][0], full(results[1][0])) or autocast or format != "int8"
    shares = {"up": (65, 64), "one": (1, 0), "table": (26, 25)}
    for name, (first, second) in shares.items():
        weight = getattr(model, name).weight
        assert weight.dtype == torch.uint8 and weight.placements == (Shard(0),) and not weight.requires_grad
        assert weight.to_local().shape[0] == (first, second)[dist.get_rank()]
        assert torch.equal(weight.full_tensor(), rows[name])


def outputs_may_stay_sharded() -> None:
    layer = QuantLinear.from_linear(nn.Linear(64, 129, bias=False))
    input = torch.ones(2, 64)
    for tensor in (layer.weight.data, input):
        dist.broadcast(tensor, 0)
    expected = layer(input)
    parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel())
    with torch.no_grad():
        assert torch.equal(layer(input), expected.tensor_split((65,), 1)[dist.get_rank()])
    dense = torch.arange(129 * 64.0).view(129, 64).sin()
    layer.quantize_(dense)
    assert torch.equal(layer.weight.full_tensor(), halfbyte.quantize(dense, "nf4"))


def with_fsdp2() -> None:
    """Shared out by rows among two ranks, and each share between two more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    reference = Net()
    # FSDP2 can't reduce the gradient of a share without a row, that of `one`.
    plan = {**ROWS, "up": COLWISE["up"]}
    model = parallelize_module(copy.deepcopy(reference), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    tokens = torch.randint(0, 51, (2, 3), generator=generator)
    scale = torch.ones(64)
    torch.testing.assert_close(model(tokens, scale), reference(tokens, scale), rtol=1e-6, atol=1e-6)
    model(tokens, scale).sum().backward()
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        (reference(torch.randint(0, 51, (2, 3), generator=generator), scale).sum() / 2).backward()
    for name, expected in reference.named_parameters():
        if expected.requires_grad:
            torch.testing.assert_close(full(model.get_parameter(name).grad), expected.grad, rtol=1e-5, atol=1e-6, msg=name)


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(NotImplementedError, match=r"QuantLinear\(in_features=64, out_features=129.*through packed codes"):
        parallelize_module(Net(), mesh, {"up": RowwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"QuantEmbedding\(51, 64.*Use RowwiseParallel, which shares an embedding"):
        parallelize_module(Net(), mesh, {"table": ColwiseParallel()})
    model = Net()
    with pytest.raises(NotImplementedError, match=r"Use ColwiseParallel, which shares a linear layer's rows"):
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    layer = parallelize_module(Net(), mesh, COLWISE).up
    layer._forward_pre_hooks.clear()  # as in a model that shares out weights by itself
    with pytest.raises(TypeError, match=r"its input must be a DTensor, got a Tensor; .*parallelize_module makes it one"):
        layer(torch.ones(1, 64))


if __name__ == "__main__":
    with gloo_group():
        if dist.get_world_size() == 4:
            with_fsdp2()
        else:
            compare("nf4", autocast=False)
            compare("int8", autocast=False)
            compare("nf4-dq", autocast=True)
            outputs_may_stay_sharded()
            refusals()
