"""One of four ranks: `hybrid_worker.py FOLDER`; two replicas of two shards, through both of the Trainer's strategies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_worker import fit, saved_and_resumed
from lightning.fabric import Fabric
from torch import nn

from halfbyte.nn import QuantLinear
from lightning_plugin import (
    FabricHalfbyteFSDP2Strategy,
    FabricHalfbyteFSDPStrategy,
    FabricHalfbytePrecision,
    HalfbyteFSDP2Strategy,
    HalfbyteFSDPStrategy,
)

HYBRID: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}


def packed_share(module: nn.Module) -> float:
    """The part of the packed bytes that this rank holds."""
    held = total = 0
    for layer in module.modules():
        if isinstance(layer, QuantLinear):
            weight: Any = layer.weight
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            held += local.numel() * local.element_size()
            total += layer.out_features * layer.format.row_bytes(layer.in_features)
    return held / total


def main(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    makers: dict[str, Any] = {
        "fsdp1": lambda sharded=True: HalfbyteFSDPStrategy(state_dict_type="sharded" if sharded else "full", **HYBRID),
        "fsdp2": lambda sharded=True: HalfbyteFSDP2Strategy(device_mesh=(2, 2), save_distributed_checkpoint=sharded),
    }
    for kind, make in makers.items():
        _, module = fit(make(), devices=4)
        seen[kind] = module.losses
        assert 0.45 < packed_share(module) < 0.55, packed_share(module)
        for sharded in (True, False):
            path = folder / f"{kind}-{sharded}"
            if (kind, sharded) == ("fsdp1", True):
                with pytest.raises(NotImplementedError, match=r"restores wrong optimizer state from a folder.*HYBRID_SHARD"):
                    saved_and_resumed(make, path, devices=4)
                continue
            resumed = saved_and_resumed(lambda make=make, sharded=sharded: make(sharded), path, devices=4)
            assert resumed == module.losses, (kind, sharded, resumed, module.losses)
    for strategy in (FabricHalfbyteFSDPStrategy(**HYBRID), FabricHalfbyteFSDP2Strategy(device_mesh=(2, 2))):
        fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=FabricHalfbytePrecision("nf4"))
        fabric.launch()
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        assert 0.45 < packed_share(fabric.setup_module(model)) < 0.55
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    result = main(folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
