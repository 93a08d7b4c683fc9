"""One of the ranks that test_fsdp2.py starts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import gloo_group
from sharded_models import Model, packed_layers, train
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from halfbyte.distributed import audit, fully_shard

MOVED: dict[str, list[tuple[torch.dtype, int]]] = defaultdict(list)


def count_collectives() -> None:
    """Notes dtype and bytes of the whole tensor of every all-gather and reduce-scatter, under torch's names for them."""
    for kind, names, whole_is in (
        ("gather", ("all_gather_single", "all_gather_into_tensor"), 0),
        ("scatter", ("reduce_scatter_single", "reduce_scatter_tensor"), 1),
    ):
        keywords = ("output_tensor", "output") if whole_is == 0 else ("input", "input_tensor")
        for name in names:
            original = getattr(dist, name, None)
            if original is None:
                continue

            def counted(
                *args: Any,
                original: Any = original,
                kind: str = kind,
                at: int = whole_is,
                where: Any = keywords,
                **kw: Any,
            ) -> Any:
                given = [kw[k] for k in where if k in kw]
                whole = given[0] if given else args[at]
                MOVED[kind].append((whole.dtype, whole.numel() * whole.element_size()))
                return original(*args, **kw)

            setattr(dist, name, counted)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def mean(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def same_as_one_process(tied: bool, checkpointing: bool, offload: bool, clip: bool) -> float:
    reference, model = Model(tied), Model(tied)
    rows = [layer.packed.clone() for layer in packed_layers(reference)]
    kwargs: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    fully_shard(model, checkpointing=checkpointing, **kwargs)
    optimizers = optimizer_of(reference), optimizer_of(model)

    def clipping(module: nn.Module) -> Any:
        return (lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.05)) if clip else None

    expected = train(reference, optimizers[0], 3, range(dist.get_world_size()), clipping(reference))
    losses = mean(train(model, optimizers[1], 3, range(dist.get_rank(), dist.get_rank() + 1), clipping(model)))
    difference = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    assert difference < 2e-6, (tied, checkpointing, offload, clip, losses, expected)
    for layer, before in zip(packed_layers(model), rows, strict=True):
        weight = layer.weight
        assert isinstance(weight, DTensor) and weight.dtype == torch.uint8 and weight.grad is None
        assert full(weight).dtype == torch.uint8 and torch.equal(full(weight), before)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.detach()).float(), theirs.detach().float(), rtol=0, atol=5e-5, msg=name)
    return difference


def bytes_moved() -> None:
    """An even model, so that no padding is counted: blocks of frozen rows, trainables in the root only."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 4096, bias=False)
            self.second = nn.Linear(4096, 64, bias=False)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + self.second(torch.tanh(self.first(input)))

    import halfbyte

    net: Any = nn.Module()
    net.layers = nn.ModuleList(Frozen() for _ in range(3))
    halfbyte.quantize_model(net)
    net.scale = nn.Parameter(torch.ones(64))
    packed = sum(layer.packed.numel() for layer in packed_layers(net))
    dense = 3 * 2 * 64 * 4096 * 4

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = net.layers, net.scale

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                input = layer(input * self.scale)
            return input

    model = fully_shard(Net(), checkpointing=False)
    wrap = audit(model)
    assert wrap.kind == "fsdp2" and wrap.units == ("(root)", "layers.0", "layers.1", "layers.2") and wrap.outside == ()
    assert sum(wrap.bytes_per_unit.values()) == packed + 256
    assert wrap.local_bytes == (packed + 256) // 2
    assert wrap.expected_peak == (packed + 256) // 2 + 128 + 256 + 2 * packed // 3 + 256
    MOVED.clear()
    input = torch.randn(4, 64)
    output = model(input)
    gathered = sum(size for _, size in MOVED["gather"])
    assert packed <= gathered <= 1.02 * packed + 256, (gathered, packed)
    group = model.layers[0]._get_fsdp_state()._fsdp_param_group
    assert all(p._unsharded_param.untyped_storage().size() == 0 for p in group.fsdp_params)
    output.sum().backward()
    gathered = sum(size for _, size in MOVED["gather"])
    # Forward gathers each block once, backward once more except what is still there.
    assert gathered <= 2 * 1.02 * packed + 256
    scattered = sum(size for _, size in MOVED["scatter"])
    assert scattered == 256, MOVED  # the scale's gradient, nothing of the rows
    if dist.get_rank() == 0:
        print(f"MOVED packed {packed} dense {dense} gathered per step {gathered} scattered {scattered}")


def bf16_mixed_precision() -> None:
    model = Model()
    rows = [layer.packed.clone() for layer in packed_layers(model)]
    seen = []
    packed_layers(model)[0].register_forward_pre_hook(lambda m, args: seen.append((args[0].dtype, m.packed.clone())))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), checkpointing=False)
    losses = mean(train(model, optimizer_of(model), 2, range(dist.get_rank(), dist.get_rank() + 1)))
    reference = Model()
    expected = train(reference, optimizer_of(reference), 2, range(dist.get_world_size()))
    assert all(abs(a - b) < 0.03 for a, b in zip(losses, expected, strict=True)), (losses, expected)
    assert seen[0][0] == torch.bfloat16 and torch.equal(seen[0][1], rows[0])


def hybrid() -> None:
    """Replicated over two pairs, sharded inside each."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference, model = Model(), fully_shard(Model(), mesh=mesh)
    expected = train(reference, optimizer_of(reference), 2, range(4))
    losses = mean(train(model, optimizer_of(model), 2, range(dist.get_rank(), dist.get_rank() + 1)))
    assert all(abs(a / b - 1) < 2e-6 for a, b in zip(losses, expected, strict=True)), (losses, expected)
    weight = packed_layers(model)[0].weight
    assert weight.to_local().shape[0] in (64, 65) and full(weight).shape[0] == 129


def refusals() -> None:
    model = fully_shard(Model())
    for build, text in (
        (lambda: fully_shard(model), "sharded already: its root is"),
        (lambda: fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), "found no repeated blocks"),
        (lambda: fully_shard(mixed()), "trainable parameters of one unit must have one dtype, in layers.1 "),
    ):
        with pytest.raises(ValueError, match=text):
            build()


def mixed() -> nn.Module:
    model = Model()
    model.layers[1].up.lora_A.data = model.layers[1].up.lora_A.data.to(torch.bfloat16)
    return model


if __name__ == "__main__":
    with gloo_group():
        if dist.get_world_size() == 4:
            hybrid()
        else:
            count_collectives()
            bytes_moved()
            worst = 0.0
            for case in ((False, True, False, True), (True, False, False, False), (True, True, True, True)):
                worst = max(worst, same_as_one_process(*case))
            bf16_mixed_precision()
            refusals()
            print(f"WORST {worst:.1e}")
