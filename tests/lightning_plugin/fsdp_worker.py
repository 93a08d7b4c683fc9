"""One rank of the FSDP tests: `fsdp_worker.py SCENARIO FOLDER`; writes what it saw to FOLDER/rank<R>.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_models import RESUME_AT, STEPS, Module, trainer
from torch import Tensor, nn

import halfbyte
from halfbyte.distributed import audit, fully_shard
from halfbyte.nn import QuantLinear
from lightning_plugin import (
    HalfbyteFSDP2Strategy,
    HalfbyteFSDPStrategy,
    HalfbytePrecision,
    QuantizationReport,
)

CLIP = 0.05


class TowerBlock(nn.Module):
    """Two packed layers, one with a trainable bias, 67 rows (uneven over two ranks), and a trainable low-rank path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 67)
        self.down = nn.Linear(67, 64, bias=False)
        self.lora_A = nn.Parameter(torch.randn(2, 64) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(64, 2) * 0.1)

    def reset_parameters(self) -> None:
        """Called for models built on meta."""
        nn.init.normal_(self.lora_A, std=0.1)
        nn.init.normal_(self.lora_B, std=0.1)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.norm(input)
        return input + self.down(nn.functional.gelu(self.up(hidden))) + hidden @ self.lora_A.T @ self.lora_B.T


class Tower(nn.Module):
    """A packed layer outside the blocks, three blocks, a norm and a head that stays dense by its name."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(32, 64, bias=False)
        self.layers = nn.ModuleList(TowerBlock() for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.classifier = nn.Linear(64, 5)
        torch.manual_seed(seed + 1)  # a layer that init_quantized turns back to dense is drawn twice
        nn.init.normal_(self.classifier.weight, std=0.1)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first(input.to(self.first.weight.dtype) if self.first.weight.dtype == torch.bfloat16 else input)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.classifier(self.norm(hidden)).float()


class TowerModule(Module):
    """Written for one device."""

    def __init__(self, where: str = "configure", seed: int = 0) -> None:
        super().__init__("configure", seed)
        if where == "init":
            self.net = Tower(seed)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Tower(self.hparams["seed"])


class ShardedByHand(TowerModule):
    """Shards itself, for Lightning's own ModelParallelStrategy."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"], checkpointing=False)


def fit(strategy: Any, module: TowerModule | None = None, max_steps: int = STEPS, **kwargs: Any) -> tuple[Any, TowerModule]:
    module = module or TowerModule()
    path = kwargs.pop("ckpt_path", None)
    plugin = kwargs.pop("plugin", HalfbytePrecision("nf4"))
    kwargs = {"devices": 2, "use_distributed_sampler": False, "gradient_clip_val": CLIP, **kwargs}
    run = trainer(plugin, max_steps, strategy=strategy, **kwargs)
    run.fit(module, ckpt_path=path, weights_only=False)
    return run, module


def saved_and_resumed(make: Any, path: Path, **kwargs: Any) -> list[float]:
    run, module = fit(make(), max_steps=RESUME_AT, **kwargs)
    run.save_checkpoint(path)
    _, resumed = fit(make(), TowerModule(seed=77), ckpt_path=path, **kwargs)
    return module.losses + resumed.losses


def several_runs(make: Any) -> dict[str, Any]:
    """fit, validate with the same Trainer, then a second Trainer on the same module."""
    run, module = fit(make(), max_steps=RESUME_AT)
    run.validate(module, verbose=False)
    run, _ = fit(make(), module, max_steps=STEPS)
    return {"losses": module.losses, "evaluated": module.evaluated}


def report_of_one_process() -> halfbyte.Report:
    module = TowerModule()
    with halfbyte.init_quantized("nf4"):
        module.configure_model()
    return halfbyte.report(module)


def fsdp2(folder: Path) -> dict[str, Any]:
    def one_file() -> HalfbyteFSDP2Strategy:
        return HalfbyteFSDP2Strategy(save_distributed_checkpoint=False)

    callback = QuantizationReport()
    _, module = fit("fsdp2_halfbyte", callbacks=[callback])
    weights = [m.weight for m in module.modules() if isinstance(m, QuantLinear)]
    assert len(weights) == 7 and all(w.dtype == torch.uint8 and w.to_local().shape[0] < w.shape[0] for w in weights)
    report = audit(module)
    assert callback.wrap == report
    assert report.kind == "fsdp2" and len(report.units) == 4 and report.outside == ()
    assert callback.report == report_of_one_process()
    seen: dict[str, Any] = {"losses": module.losses}
    seen["early"] = fit(HalfbyteFSDP2Strategy(), TowerModule("init"))[1].losses
    seen["by_hand"] = fit(ModelParallelStrategy(2, 1), ShardedByHand(), callbacks=[callback])[1].losses
    seen["full"] = saved_and_resumed(one_file, folder / "full.ckpt")
    seen["folder"] = saved_and_resumed(HalfbyteFSDP2Strategy, folder / "folder.ckpt")
    seen["runs"] = several_runs(HalfbyteFSDP2Strategy)
    return seen


def fsdp1(folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    callback = QuantizationReport()
    run, module = fit("fsdp_halfbyte", callbacks=[callback])
    assert callback.report == report_of_one_process()
    with pytest.raises(ValueError, match=r"verify: net.first is sharded, no rank has all of its rows"):
        halfbyte.verify(module)
    root = run.strategy.model
    report = audit(root)
    assert report.kind == "fsdp1" and report.outside == () and len(report.units) == 1 + 3 + 7, report
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if isinstance(unit.module, QuantLinear):
            assert unit._handle.flat_param._full_param_padded.untyped_storage().size() == 0
            assert unit.module.bias is not None or unit._handle.flat_param.grad is None
    seen: dict[str, Any] = {"losses": module.losses}
    seen["early"] = fit(HalfbyteFSDPStrategy(auto_wrap_policy={TowerBlock}), TowerModule("init"))[1].losses
    seen["checkpointed"] = fit(HalfbyteFSDPStrategy(activation_checkpointing_policy={TowerBlock}))[1].losses
    seen["full"] = saved_and_resumed(HalfbyteFSDPStrategy, folder / "full.ckpt")
    seen["folder"] = saved_and_resumed(lambda: HalfbyteFSDPStrategy(state_dict_type="sharded"), folder / "folder.ckpt")
    seen["runs"] = several_runs(HalfbyteFSDPStrategy)
    dense = {"plugin": None, "precision": "bf16-true"}
    seen["dense"] = fit(HalfbyteFSDPStrategy(activation_checkpointing_policy={TowerBlock}), **dense)[1].losses
    for argument in ("auto_wrap_policy", "activation_checkpointing_policy"):
        with pytest.raises(ValueError, match=rf"{argument}: .*Transformer.* matches no module.*TowerBlock"):
            fit(HalfbyteFSDPStrategy(**{argument: {nn.TransformerEncoderLayer}}), **dense)
    return seen


def one_rank(folder: Path) -> dict[str, Any]:
    """What two ranks have saved (folder/fsdp1, folder/fsdp2), resumed by one rank of each strategy."""
    makers: dict[str, Any] = {
        "fsdp1": lambda: HalfbyteFSDPStrategy(state_dict_type="sharded"),
        "fsdp2": HalfbyteFSDP2Strategy,
    }
    return {
        f"{saver}/{name} by {resumer}": fit(make(), TowerModule(seed=77), devices=1, ckpt_path=folder / saver / name)[
            1
        ].losses
        for resumer, make in makers.items()
        for saver in makers
        for name in ("full.ckpt", "folder.ckpt")
        if name == "full.ckpt" or saver == resumer  # Lightning's folders differ in their keys
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, folder, rank = globals()[sys.argv[1]], Path(sys.argv[2]), int(os.environ["LOCAL_RANK"])
    result = scenario(folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
