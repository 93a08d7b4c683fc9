"""One rank of the two-process tests: `ddp_worker.py FOLDER`; writes what it saw to FOLDER/rank<R>.json."""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning_models import LR, RESUME_AT, STEPS, Module, Net, batch, trainer
from torch import nn

from halfbyte.nn import QuantLinear
from lightning_plugin import (
    FabricHalfbytePrecision,
    GradualUnfreezing,
    HalfbytePrecision,
    ProgressiveQuantization,
    QuantizationReport,
)


def packed_bytes(module: nn.Module) -> list[int]:
    return [zlib.crc32(layer.weight.numpy()) for layer in module.modules() if isinstance(layer, QuantLinear)]


def fit(where: str, folder: Path, seed: int = 0, max_steps: int = STEPS, ckpt_path: Path | None = None, **kwargs):
    module = Module(where, seed)
    run = trainer(HalfbytePrecision("nf4"), max_steps, strategy="ddp", devices=2, use_distributed_sampler=False, **kwargs)
    run.fit(module, ckpt_path=ckpt_path)
    return run, module


def trainer_scenario(folder: Path, rank: int) -> dict:
    seen: dict = {}
    for where in ("configure", "init"):
        # Every rank starts from other values: DDP must send rank 0's packed rows to the others.
        run, module = fit(where, folder, seed=0 if rank == 0 else 5, callbacks=[QuantizationReport()])
        seen[where] = {"losses": module.losses, "rows": packed_bytes(module)}
        run, module = fit(where, folder, max_steps=RESUME_AT)
        run.save_checkpoint(folder / f"{where}.ckpt")
        _, resumed = fit(where, folder, seed=77, ckpt_path=folder / f"{where}.ckpt")
        seen[where]["resumed"] = module.losses + resumed.losses
        run.validate(resumed, verbose=False)
        run.test(resumed, verbose=False)
        seen[where]["evaluated"] = resumed.evaluated
        seen[where]["predicted"] = [float(output.sum()) for output in run.predict(resumed)]
    _, clipped = fit("configure", folder, gradient_clip_val=0.05)
    seen["clipped"] = clipped.losses
    for name, plugin, callback in (
        ("unfrozen", HalfbytePrecision("nf4"), GradualUnfreezing({2: ["first"]})),
        ("packed later", None, ProgressiveQuantization({2: ["first"]})),
    ):
        changed = Module("configure")
        run = trainer(plugin, STEPS, strategy="ddp", devices=2, use_distributed_sampler=False, callbacks=[callback])
        run.fit(changed)
        weight = changed.net.first.weight
        seen[name] = {"losses": changed.losses, "weight": zlib.crc32(weight.detach().numpy()), "dtype": str(weight.dtype)}
    return seen


def fabric_scenario(folder: Path, rank: int) -> dict:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=FabricHalfbytePrecision("nf4"))
    fabric.launch()

    def start(seed: int):
        with fabric.init_module():
            net = Net(seed)
        return fabric.setup(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=LR))

    def train(model, optimizer, steps) -> list[float]:
        losses = []
        for step in steps:
            input, target = batch(step, rank, 2)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(input), target)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = start(0 if rank == 0 else 5)
    losses = train(model, optimizer, range(RESUME_AT))
    fabric.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    other, other_optimizer = start(77)
    fabric.load(folder / "fabric.ckpt", {"model": other, "optimizer": other_optimizer})
    return {"losses": losses + train(other, other_optimizer, range(RESUME_AT, STEPS)), "rows": packed_bytes(other)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    result = {**trainer_scenario(folder, rank), "fabric": fabric_scenario(folder, rank)}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
