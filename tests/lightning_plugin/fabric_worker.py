"""One rank of the Fabric tests: `fabric_worker.py FOLDER`; every strategy, saved in both forms and resumed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_worker import CLIP, Tower, TowerBlock
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning_models import LR, RESUME_AT, STEPS, batch
from torch import nn
from torch.distributed.tensor import Shard

from halfbyte import QuantizationError
from halfbyte.distributed import audit, fully_shard
from halfbyte.nn import QuantLinear
from halfbyte.optim import AdamW8bit
from halfbyte.optim.sharding import is_eligible
from lightning_plugin import FabricHalfbyteFSDP2Strategy, FabricHalfbyteFSDPStrategy, FabricHalfbytePrecision


def in_8_bits(params: list[nn.Parameter], lr: float) -> AdamW8bit:
    """8-bit moments for every matrix: the rule asks for larger ones."""
    matrices, vectors = ([p for p in params if (p.dim() > 1) is wanted] for wanted in (True, False))
    return AdamW8bit([{"params": matrices, "quantize_state": True}, {"params": vectors}], lr=lr)


def parallelize(net: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(net, mesh=mesh["data_parallel"])


def plain(full: bool) -> Any:
    """Fabric's own strategy, given `fully_shard`."""
    return ModelParallelStrategy(parallelize, 2, 1, save_distributed_checkpoint=not full)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda full: "ddp",
    "plain": plain,
    "fsdp2": lambda full: FabricHalfbyteFSDP2Strategy(save_distributed_checkpoint=not full),
    "fsdp1": lambda full: FabricHalfbyteFSDPStrategy(state_dict_type="full" if full else "sharded"),
}


def fabric_of(strategy: Any, format: str = "nf4", **kwargs: Any) -> Fabric:
    plugins = {} if "precision" in kwargs else {"plugins": FabricHalfbytePrecision(format)}
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **plugins, **kwargs)
    fabric.launch()
    return fabric


def start(
    fabric: Fabric, seed: int = 0, optimizer: Any = torch.optim.AdamW, jointly: bool = True, empty: bool | None = None
) -> tuple[Any, Any]:
    def optimizer_of(net: Any) -> Any:
        return optimizer([p for p in net.parameters() if p.requires_grad], lr=LR)

    with fabric.init_module(empty_init=empty):
        net = Tower(seed)
    if jointly:
        return fabric.setup(net, optimizer_of(net))
    model = fabric.setup_module(net)
    return model, fabric.setup_optimizers(optimizer_of(model))


def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        input, target = batch(step, fabric.global_rank, 2)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(input), target)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_and_resumed(name: str, full: bool, path: Path, optimizer: Any = torch.optim.AdamW) -> list[float]:
    jointly = name != "plain"  # which would go on with the parameters from before
    fabric = fabric_of(STRATEGIES[name](full))
    model, stepper = start(fabric, optimizer=optimizer, jointly=jointly)
    losses = train(fabric, model, stepper, range(RESUME_AT))
    fabric.save(path, {"model": model, "optimizer": stepper, "at": RESUME_AT})
    going_on = train(fabric, model, stepper, range(RESUME_AT, STEPS))
    fabric = fabric_of(STRATEGIES[name](full))
    empty = True if name in ("fsdp1", "fsdp2") and not full and optimizer is torch.optim.AdamW else None  # on meta
    model, stepper = start(fabric, 77, optimizer, jointly and not empty, empty)
    state = {"model": model, "optimizer": stepper, "at": 0}
    assert fabric.load(path, state) == {} and state["at"] == RESUME_AT
    resumed = train(fabric, model, stepper, range(RESUME_AT, STEPS))
    assert resumed == going_on, (name, full, resumed, going_on)
    return losses + resumed


def refusals(folder: Path) -> None:
    for name in ("fsdp1", "fsdp2"):
        for full in (True, False):
            fabric = fabric_of(STRATEGIES[name](full), "fp4")
            model, optimizer = start(fabric)
            with pytest.raises(QuantizationError, match=r"holds nf4 rows for first, the module is fp4"):
                fabric.load(folder / f"{name}-{full}", {"model": model, "optimizer": optimizer})
    with fabric.init_module():
        net = Tower()
    optimizer = AdamW8bit([p for p in net.parameters() if p.requires_grad], fused_backward=True)
    with pytest.raises(ValueError, match=r"AdamW8bit given to fabric.setup has state or hooks.*setup_module"):
        fabric.setup(net, optimizer)
    forced = torch.distributed.tensor.distribute_tensor(torch.ones(8), fabric.strategy.device_mesh["data_parallel"])
    with pytest.raises(ValueError, match=r"quantize_state=True for a sharded parameter of one dimension, shape \(8,\)"):
        is_eligible(forced.redistribute(placements=[Shard(0)]), True)
    with pytest.raises(ValueError, match=r"device_mesh must be \(replicas, shards per replica\) with a product of 2"):
        fabric_of(FabricHalfbyteFSDP2Strategy(device_mesh=(2, 2)))
    fabric = fabric_of(FabricHalfbyteFSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}))
    with pytest.raises(ValueError, match=r"auto_wrap_policy: .*Transformer.* matches no module.*TowerBlock"):
        start(fabric)


def main(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name in STRATEGIES:
        for full in (True, False):
            if full or name != "ddp":
                seen[f"{name} full={full}"] = saved_and_resumed(name, full, folder / f"{name}-{full}")
    for name in ("fsdp1", "fsdp2"):
        for full in (True, False):
            seen[f"8bit {name} full={full}"] = saved_and_resumed(name, full, folder / f"8bit-{name}-{full}", in_8_bits)
    refusals(folder)
    fabric = fabric_of("fsdp2_halfbyte")
    model, _ = start(fabric)
    weights = [m.weight for m in model.modules() if isinstance(m, QuantLinear)]
    assert len(weights) == 7 and all(w.dtype == torch.uint8 and w.to_local().shape[0] < w.shape[0] for w in weights)
    policy = {"activation_checkpointing_policy": {TowerBlock}}
    fabric = fabric_of(FabricHalfbyteFSDPStrategy(**policy), precision="bf16-true")  # dense
    model, optimizer = start(fabric)
    assert audit(model).kind == "fsdp1" and len(audit(model).units) == 4
    seen["dense"] = train(fabric, model, optimizer, range(STEPS))
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    result = main(folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
