"""The callbacks: what each one changes, measured; runs that resume equal runs that did not stop; arguments from YAML."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning_models import Module, trainer
from torch import Tensor, nn

from halfbyte.errors import QuantizationError
from halfbyte.memory import offload_activations
from halfbyte.nn import QuantLinear
from halfbyte.optim import AdamW8bit
from lightning_plugin import (
    ActivationOffloading,
    GradualUnfreezing,
    HalfbytePrecision,
    MemoryMonitor,
    ProgressiveQuantization,
)


class Scheduled(Module):
    """As Module, with a learning rate schedule, whose lists must grow with the groups."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW8bit([p for p in self.parameters() if p.requires_grad], lr=2e-2)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]


def fit(
    callbacks: list[Any], steps: int = 6, plugin: Any = None, module: Any = None, ckpt: Any = None, **kwargs: Any
) -> Any:
    torch.manual_seed(0)
    module = module or Module("configure")
    running = trainer(plugin, max_steps=steps, callbacks=callbacks, **kwargs)
    running.fit(module, ckpt_path=ckpt)
    module.fitted = running
    return module


def test_unfreezing_trains_what_was_packed() -> None:
    frozen = fit([], plugin=HalfbytePrecision("nf4"))
    callback = GradualUnfreezing({2: ["first"]}, lr=1e-2)
    module = fit([callback, MemoryMonitor()], plugin=HalfbytePrecision("nf4"))
    assert callback.changed == ["net.first"]
    assert type(module.net.first) is nn.Linear
    assert type(module.net.second) is QuantLinear
    optimizer = module.fitted.optimizers[0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 1]  # its bias was trained before
    assert optimizer.param_groups[-1]["lr"] == 1e-2
    assert any(p is module.net.first.weight for p in optimizer.param_groups[-1]["params"])
    decoded = frozen.net.first.dequantize(torch.float32)
    assert not torch.equal(module.net.first.weight, decoded)  # it has moved
    assert module.losses[:2] == frozen.losses[:2]
    assert module.losses[-1] < frozen.losses[-1]


def test_memory_is_logged_by_kind_and_follows_the_layers(tmp_path: Any) -> None:
    monitor, lines = MemoryMonitor(), []

    class Lines(CSVLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            lines.append((step, metrics))

    fit([GradualUnfreezing({2: ["second"]}), monitor], 4, HalfbytePrecision("nf4"), logger=Lines(tmp_path))
    memory = [(step, m) for step, m in lines if "memory/packed" in m]
    assert [step for step, _ in memory] == [1, 2, 3, 4]
    before, after = memory[1][1], memory[2][1]
    assert before["memory/packed"] - after["memory/packed"] == 64 * 64  # 96 features in nf4: 48 + 8 + padding
    assert after["memory/trainable"] - before["memory/trainable"] == 64 * 96 * 4
    assert after["memory/gradients"] - before["memory/gradients"] == 64 * 96 * 4
    assert after["memory/optimizer"] - before["memory/optimizer"] >= 2 * 64 * 96 * 4
    assert after["memory/process"] > 1e6
    assert monitor.last == {name: int(value) for name, value in memory[-1][1].items()}


def test_progressive_quantization_releases_gradients_and_state() -> None:
    callback, monitor = ProgressiveQuantization({2: ["first"], 4: ["second"]}, "nf4"), MemoryMonitor()
    sizes: list[dict[str, int]] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            sizes.append(dict(monitor.last))

    module = fit([callback, monitor, Keep()])
    assert callback.changed == ["net.first", "net.second"]
    assert all(type(layer) is QuantLinear for layer in (module.net.first, module.net.second))
    weights = 4 * (96 * 32 + 64 * 96)
    assert sizes[0]["memory/gradients"] - sizes[-1]["memory/gradients"] == weights
    assert sizes[0]["memory/optimizer"] - sizes[-1]["memory/optimizer"] >= 2 * weights
    assert sizes[-1]["memory/packed"] == 96 * 32 + 64 * 64
    assert torch.isfinite(torch.tensor(module.losses)).all()


@pytest.mark.parametrize("kind", ["unfreezing", "progressive"])
def test_a_resumed_run_equals_one_that_did_not_stop(kind: str, tmp_path: Any) -> None:
    def callbacks() -> list[Any]:
        if kind == "unfreezing":
            return [GradualUnfreezing({2: ["first"], 4: ["second"]})]
        return [ProgressiveQuantization({2: ["first"], 4: ["second"]})]

    def plugin() -> Any:
        return HalfbytePrecision("nf4") if kind == "unfreezing" else None

    whole = fit(callbacks(), plugin=plugin(), module=Scheduled("configure"))
    part = fit(callbacks(), 3, plugin(), Scheduled("configure"))
    part.fitted.save_checkpoint(tmp_path / "three.ckpt")
    rest = fit(callbacks(), 6, plugin(), Scheduled("configure"), tmp_path / "three.ckpt")
    assert part.losses + rest.losses == whole.losses
    for (name, a), (_, b) in zip(whole.named_parameters(), rest.named_parameters(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
    groups = [[len(g["params"]) for g in m.fitted.optimizers[0].param_groups] for m in (whole, rest)]
    assert groups[0] == groups[1]


def test_schedules_that_name_nothing_are_refused() -> None:
    message = r"schedule\[1\] = \['third'\] names no layer that it could change; left are"
    with pytest.raises(QuantizationError, match=message):
        fit([GradualUnfreezing({1: ["third"]})], plugin=HalfbytePrecision("nf4"))
    with pytest.raises(ValueError, match="schedule must name layers for at least one step"):
        GradualUnfreezing({})
    with pytest.raises(TypeError, match="must map steps to lists of names, got 'first' for step 3"):
        ProgressiveQuantization({3: "first"})
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        MemoryMonitor(0)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = nn.functional.gelu(layer(input))
        return input.sum()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloading_empties_the_device() -> None:
    model = Wide().to("cuda")
    live = {}
    for offload in (False, True):
        input = torch.zeros(4096, 256, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        with offload_activations(model) if offload else nullcontext():
            loss = model(input)
        live[offload] = torch.cuda.memory_allocated() - before
        loss.backward()
    assert live[False] >= 15 * 4096 * 256 * 4
    assert live[True] < 2 * 4096 * 256 * 4


def test_offloading_moves_activations_and_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with copies standing for host memory: the same gradients, and what has been moved."""
    torch.manual_seed(0)
    model, input = Wide(), torch.randn(64, 256, requires_grad=True)
    model(input).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    moved: list[int] = []

    def copied(tensor: Tensor, pin_memory: bool) -> Tensor:
        moved.append(tensor.numel() * 4)
        return tensor.clone()

    monkeypatch.setattr("halfbyte.memory.offload._on_host", lambda _: False)
    monkeypatch.setattr("halfbyte.memory.offload._to_host", copied)
    with offload_activations(model, min_bytes=64 * 256 * 4):
        loss = model(input)
    loss.backward()
    assert moved == [64 * 256 * 4] * 16  # the input of each layer and of each gelu; the weights (256 KiB) stay
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_offloading_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="the model is on the CPU, so its activations are in host memory already"):
        fit([ActivationOffloading()])


YAML = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  max_steps: 2
  plugins:
    - class_path: lightning_plugin.HalfbytePrecision
  strategy: {strategy}
  callbacks:
    - class_path: lightning_plugin.GradualUnfreezing
      init_args:
        schedule:
          100: [layers.1]
          200: [layers.0]
        lr: 1.0e-05
        dtype: float32
    - class_path: lightning_plugin.ProgressiveQuantization
      init_args:
        schedule: {{10: [first]}}
        format: int8
    - class_path: lightning_plugin.MemoryMonitor
      init_args:
        every_n_steps: 5
    - class_path: lightning_plugin.ActivationOffloading
      init_args:
        min_bytes: 4096
model:
  where: configure
"""


@pytest.mark.parametrize("strategy", ["auto", "{class_path: lightning_plugin.HalfbyteFSDP2Strategy}"])
def test_from_yaml_and_back(strategy: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def make(*arguments: str) -> LightningCLI:
        return LightningCLI(Module, args=list(arguments), run=False, save_config_callback=None)

    def seen(cli: LightningCLI) -> list[Any]:
        kinds = (GradualUnfreezing, ProgressiveQuantization, MemoryMonitor, ActivationOffloading)
        found = {type(c): c for c in cli.trainer.callbacks}
        unfreezing, progressive, monitor, offloading = (found[kind] for kind in kinds)
        return [
            type(cli.trainer.strategy).__name__,
            (unfreezing.schedule, unfreezing.lr, unfreezing.dtype),
            (progressive.schedule, progressive.format),
            (monitor.every_n_steps, offloading.min_bytes),
        ]

    (tmp_path / "config.yaml").write_text(YAML.format(strategy=strategy))
    first = seen(make("--config", str(tmp_path / "config.yaml")))
    assert first[1] == ({100: ("layers.1",), 200: ("layers.0",)}, 1e-5, torch.float32)
    with pytest.raises(SystemExit):
        make("--config", str(tmp_path / "config.yaml"), "--print_config")
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert seen(make("--config", str(tmp_path / "printed.yaml"))) == first
