"""One of the ranks that test_reshard.py starts, every stage with another world size: `reshard_ranks.py KIND STAGE FOLDER`.

Each stage loads what the one before saved and compares every tensor with a single process that took the same steps on
the same gradients; then it takes its own steps and saves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import gloo_group
from sharded_models import Model, packed_layers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from halfbyte.distributed import fully_shard
from halfbyte.optim import AdamW8bit
from halfbyte.optim.sharding import GlobalPiece

STEPS = 2
STAGES = {"first": 0, "second": 1, "third": 2}


def optimizer_of(model: nn.Module) -> AdamW8bit:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if "lora" in name or name.endswith(("gate.weight", "head.weight"))]
    others = [p for _, p in trained if all(p is not m for m in matrices)]
    return AdamW8bit([{"params": matrices, "quantize_state": True}, {"params": others}], lr=1e-2)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on gradients that don't depend on the number of ranks; an FSDP1 view gets its piece of the whole gradient."""
    for at in steps:
        for wrapped, p in model.named_parameters():
            if not p.requires_grad:
                continue
            name = wrapped.replace("_fsdp_wrapped_module.", "").replace("_forward_module.", "")
            piece: GlobalPiece | None = getattr(p, "_halfbyte_global_piece", None)
            whole = gradient(name, piece.shape if piece is not None else p.shape, at)
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(whole, p.device_mesh, p.placements)
            elif piece is not None:
                p.grad = whole.flatten()[piece.offset : piece.offset + p.numel()] if p.numel() else None
            else:
                p.grad = whole
        optimizer.step()


def reference(steps: int) -> tuple[Model, AdamW8bit]:
    model = Model()
    optimizer = optimizer_of(model)
    step(model, optimizer, range(steps))
    return model, optimizer


def compare(model: nn.Module, optimizer: AdamW8bit, steps: int) -> None:
    single, expected = reference(steps)
    exact = 0
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        ours, theirs = full(p.detach()), q.detach()
        eight_bit = "exp_avg_codes" in expected.state[q]
        exact += eight_bit
        pairs = [("value", ours, theirs), *((key, full(optimizer.state[p][key]), v) for key, v in expected.state[q].items())]
        for key, got, wanted in pairs:
            assert got.dtype == wanted.dtype and got.shape == wanted.shape, (name, key)
            if eight_bit or not q.requires_grad:
                assert torch.equal(got, wanted), (name, key)
            else:  # torch's fused step of float32 state depends on where its vectors end
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7, msg=f"{name} {key}")
    assert exact == 3 * 5 + 1, exact


def fsdp2(stage: int, folder: Path) -> None:
    model = Model() if stage == 0 else emptied(Model())
    fully_shard(model, checkpointing=False)
    shares = [layer.weight.to_local().shape[0] for layer in packed_layers(model)[:2]]  # 129 rows, 64 rows
    assert shares[0] in (129, 65, 64, 43) and shares[1] in (64, 32, 22, 20), shares
    gate = model.layers[0].gate.weight.to_local()  # one row
    assert gate.shape[0] == (1 if dist.get_rank() == 0 else 0)
    optimizer = optimizer_of(model)
    if stage:
        weights, state = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder / f"fsdp2-{stage - 1}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        compare(model, optimizer, stage * STEPS)
    step(model, optimizer, range(stage * STEPS, (stage + 1) * STEPS))
    compare(model, optimizer, (stage + 1) * STEPS)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"fsdp2-{stage}")


def emptied(model: Model) -> Model:
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def fsdp1(stage: int, folder: Path, form: str) -> None:
    """FSDP1 cuts inside rows: values are exact, moments within one code of those that were saved."""
    from lightning.fabric import Fabric  # half of the time that the other kind takes

    from lightning_plugin import FabricHalfbyteFSDPStrategy, FabricHalfbytePrecision

    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=FabricHalfbyteFSDPStrategy(state_dict_type=form),
        plugins=FabricHalfbytePrecision("nf4", skip=("gate", "head")),
    )
    fabric.launch()
    net = Model() if stage == 0 else emptied(Model())
    model, optimizer = fabric.setup(net, optimizer_of(net))
    if stage:
        fabric.load(folder / f"fsdp1-{form}-{stage - 1}", {"model": model, "optimizer": optimizer})
        within_a_code(whole(fabric, model, optimizer), torch.load(folder / f"whole-{form}-{stage - 1}"))
    step(model, optimizer.optimizer, range(stage * STEPS, (stage + 1) * STEPS))
    fabric.save(folder / f"fsdp1-{form}-{stage}", {"model": model, "optimizer": optimizer})
    values, moments = whole(fabric, model, optimizer)
    for name, expected in reference((stage + 1) * STEPS)[0].named_parameters():
        if not expected.requires_grad:
            assert values[name].dtype == expected.dtype and torch.equal(values[name], expected), name
        else:
            difference = (values[name] - expected.detach()).abs()
            assert difference.mean() < 1e-3 and difference.max() < 2e-2, (name, difference.mean(), difference.max())
    if dist.get_rank() == 0:
        torch.save((values, moments), folder / f"whole-{form}-{stage}")
    dist.barrier()


def whole(fabric: Any, model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The full state on every rank."""
    from lightning_plugin import FabricHalfbyteFSDPStrategy

    strategy, root = FabricHalfbyteFSDPStrategy(state_dict_type="full"), model._forward_module
    strategy.parallel_devices, strategy.cluster_environment = (
        fabric.strategy.parallel_devices,
        fabric.strategy.cluster_environment,
    )
    return dict(strategy.module_state(root, None)), strategy.moments(root, optimizer.optimizer)["state"]


def within_a_code(found: tuple[dict[str, Any], dict[str, Any]], saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert found[0].keys() == saved[0].keys() and found[1].keys() == saved[1].keys()
    for name, value in saved[0].items():
        assert found[0][name].dtype == value.dtype and torch.equal(found[0][name], value), name
    for name, state in saved[1].items():
        for key, value in state.items():
            # Codes of the uppermost decade are 0.014 of a block's maximum apart.
            assert (found[1][name][key] - value).abs().max() <= 0.008 * value.abs().max(), (name, key)


if __name__ == "__main__":
    kind, stage, folder = sys.argv[1], STAGES[sys.argv[2]], Path(sys.argv[3])
    with gloo_group():
        if kind == "fsdp2":
            fsdp2(stage, folder)
        else:
            for form in ("full", "sharded"):
                fsdp1(stage, folder, form)
