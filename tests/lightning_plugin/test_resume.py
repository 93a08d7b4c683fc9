"""Checkpoints: resume is value-equal wherever the model is built, and nothing is converted or mixed up silently."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_models import RESUME_AT, STEPS, Module, losses_by_hand, packed_net, trainer
from torch import nn

import halfbyte
from halfbyte.nn import QuantLinear
from lightning_plugin import HalfbytePrecision

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")


def checkpoint_of(tmp_path, where: str, plugin: HalfbytePrecision, name: str = "three.ckpt", steps: int = RESUME_AT):
    module, run = Module(where), trainer(plugin, max_steps=steps)
    run.fit(module)
    run.save_checkpoint(tmp_path / name)
    return module, tmp_path / name


def same_tensors(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("where", ["init", "configure"])
def test_resumed_losses_equal_the_uninterrupted_run(tmp_path, where: str, weights_only: bool | None) -> None:
    first, path = checkpoint_of(tmp_path, where, HalfbytePrecision("nf4"))
    restored = {}

    class Look(L.Callback):
        def on_train_start(self, run, module):
            restored["equal"] = same_tensors(first, module)

    resumed = Module(where, seed=77)  # other values everywhere
    trainer(HalfbytePrecision("nf4"), callbacks=[Look()]).fit(resumed, ckpt_path=path, weights_only=weights_only)
    assert restored["equal"]
    assert first.losses + resumed.losses == losses_by_hand(packed_net(), STEPS)[0]


@pytest.mark.parametrize(("saved", "resumed"), [("init", "configure"), ("configure", "init")])
def test_where_the_model_is_built_may_change_between_runs(tmp_path, saved: str, resumed: str) -> None:
    first, path = checkpoint_of(tmp_path, saved, HalfbytePrecision("nf4"))
    second = Module(resumed, seed=77)
    trainer(HalfbytePrecision("nf4")).fit(second, ckpt_path=path)
    assert first.losses + second.losses == losses_by_hand(packed_net(), STEPS)[0]


def test_trainable_dtype_survives_the_resume_of_a_model_built_in_init(tmp_path) -> None:
    plugin = HalfbytePrecision("nf4", trainable_dtype="bfloat16", compute_dtype="bfloat16")
    first, path = checkpoint_of(tmp_path, "init", plugin)
    uninterrupted = Module("init")
    trainer(HalfbytePrecision("nf4", trainable_dtype="bfloat16", compute_dtype="bfloat16")).fit(uninterrupted)
    second = Module("init", seed=77)
    trainer(HalfbytePrecision("nf4", trainable_dtype="bfloat16", compute_dtype="bfloat16")).fit(second, ckpt_path=path)
    assert first.losses + second.losses == uninterrupted.losses
    assert second.net.classifier.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("where", ["init", "configure"])
def test_resume_under_another_format_raises_by_name(tmp_path, where: str) -> None:
    _, path = checkpoint_of(tmp_path, where, HalfbytePrecision("nf4"))
    with pytest.raises(RuntimeError, match=r"(?s)net\.first\.weight: the checkpoint holds nf4 rows, the module is int8"):
        trainer(HalfbytePrecision("int8")).fit(Module(where), ckpt_path=path)


def test_the_plugin_itself_refuses_another_format() -> None:
    state = HalfbytePrecision("nf4-dq", skip=["a"], compute_dtype="bfloat16").state_dict()
    assert state == {"format": "nf4-dq", "skip": ["a"], "compute_dtype": "bfloat16", "trainable_dtype": None}
    HalfbytePrecision("nf4-dq").load_state_dict(state)
    with pytest.raises(halfbyte.QuantizationError, match="made with format 'nf4-dq', this run asks for 'nf4'"):
        HalfbytePrecision("nf4").load_state_dict(state)


@pytest.mark.parametrize("where", ["init", "configure"])
def test_resume_with_another_skip_raises_with_the_names(tmp_path, where: str) -> None:
    _, path = checkpoint_of(tmp_path, where, HalfbytePrecision("nf4", skip=["classifier", "second"]))
    with pytest.raises(
        halfbyte.QuantizationError, match=r"dense in the checkpoint but packed in the model: net\.second"
    ) as e:
        trainer(HalfbytePrecision("nf4")).fit(Module(where), ckpt_path=path)
    assert e.value.names == ("net.second",)
    _, path = checkpoint_of(tmp_path, where, HalfbytePrecision("nf4"))
    with pytest.raises(halfbyte.QuantizationError, match=r"packed in the checkpoint but dense in the model: net\.second"):
        trainer(HalfbytePrecision("nf4", skip=["classifier", "second"])).fit(Module(where), ckpt_path=path)


@pytest.mark.parametrize("where", ["init", "configure"])
def test_a_dense_checkpoint_is_quantized_while_it_is_loaded(tmp_path, where: str) -> None:
    dense = Module("init", seed=5)
    run = trainer(None, max_steps=0)
    run.fit(dense)
    run.save_checkpoint(tmp_path / "dense.ckpt", weights_only=True)
    module = Module(where)
    trainer(HalfbytePrecision("nf4")).validate(module, ckpt_path=tmp_path / "dense.ckpt", verbose=False)
    assert torch.equal(module.net.first.weight, halfbyte.quantize(dense.net.first.weight, "nf4"))
    assert torch.equal(module.net.classifier.weight, dense.net.classifier.weight)


def test_model_checkpoint_best_and_last(tmp_path) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, filename="best")
    module = Module("configure")
    run = trainer(HalfbytePrecision("nf4"), callbacks=[keep], enable_checkpointing=True, val_check_interval=2)
    run.fit(module)
    assert {"best.ckpt", "last.ckpt"} <= {path.name for path in tmp_path.iterdir()}
    other = Module("init", seed=77)
    trainer(HalfbytePrecision("nf4")).validate(other, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert other.evaluated == module.evaluated[-2:]
    run.test(ckpt_path="best", verbose=False)
    assert type(module.net.first) is QuantLinear


def test_checkpoints_hold_packed_rows_and_the_format(tmp_path) -> None:
    _, path = checkpoint_of(tmp_path, "configure", HalfbytePrecision("fp4:32"))
    saved = torch.load(path, weights_only=True)
    assert saved["HalfbytePrecision"]["format"] == "fp4:32"
    assert saved["state_dict"]["net.first.weight"].dtype == torch.uint8
    assert saved["state_dict"]._metadata["net.first"]["format"] == "fp4:32"


def test_8bit_optimizer_state_survives_the_resume(tmp_path) -> None:
    class Eight(Module):
        def configure_model(self) -> None:
            super().configure_model()
            self.net.classifier = nn.Linear(64, 128)  # 8192 values: large enough for 8-bit moments

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return halfbyte.optim.AdamW8bit([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def run(steps: int, ckpt_path=None, seed: int = 0):
        torch.manual_seed(seed)
        module, run = Eight("configure", seed), trainer(HalfbytePrecision("nf4"), max_steps=steps)
        run.fit(module, ckpt_path=ckpt_path)
        return module, run

    whole, _ = run(STEPS)
    first, stopped = run(RESUME_AT)
    stopped.save_checkpoint(tmp_path / "eight.ckpt")
    second, resumed = run(STEPS, tmp_path / "eight.ckpt", seed=77)
    states = resumed.optimizers[0].state.values()
    assert torch.uint8 in {value.dtype for state in states for value in state.values() if torch.is_tensor(value)}
    assert first.losses + second.losses == whole.losses
