"""load_from_checkpoint: the module comes back as the checkpoint has it, whatever the format and wherever it is built."""

from __future__ import annotations

import pytest
import torch
from lightning_models import Module, Net, trainer
from torch import nn

import halfbyte
from halfbyte.nn import QuantLinear
from halfbyte.nn.settings import active_settings
from lightning_plugin import HalfbytePrecision, load_from_checkpoint


def saved(tmp_path, module, plugin, **kwargs):
    run = trainer(plugin, max_steps=2)
    run.fit(module)
    run.save_checkpoint(tmp_path / "m.ckpt", **kwargs)
    return tmp_path / "m.ckpt"


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("save_weights_only", [False, True])
@pytest.mark.parametrize("where", ["init", "configure"])
@pytest.mark.parametrize("format", ["nf4-dq:128", "int8"])
def test_comes_back_equal(tmp_path, where: str, format: str, save_weights_only: bool) -> None:
    module = Module(where)
    path = saved(tmp_path, module, HalfbytePrecision(format, skip=["second"]), weights_only=save_weights_only)
    before = Module.load_state_dict
    loaded = load_from_checkpoint(Module, path)
    assert_equal(module, loaded)
    assert str(loaded.net.first.format) == format
    assert type(loaded.net.second) is nn.Linear
    assert type(loaded.net.classifier) is QuantLinear  # skip=["second"] replaced the default
    assert Module.load_state_dict is before
    assert "load_state_dict" not in vars(Module)
    assert active_settings() is None


def test_saved_hyperparameters_and_overrides_arrive(tmp_path) -> None:
    path = saved(tmp_path, Module("configure", seed=3), HalfbytePrecision())
    assert load_from_checkpoint(Module, path).hparams["seed"] == 3
    loaded = load_from_checkpoint(Module, str(path), seed=4, map_location="cpu", strict=True, weights_only=True)
    assert loaded.hparams["seed"] == 4


def test_compute_and_trainable_dtype_come_back(tmp_path) -> None:
    module = Module("configure")
    path = saved(tmp_path, module, HalfbytePrecision("nf4", compute_dtype="bfloat16", trainable_dtype="bfloat16"))
    loaded = load_from_checkpoint(Module, path)
    assert loaded.net.first.compute_dtype == torch.bfloat16
    assert_equal(module, loaded)


def test_mixed_formats_and_embeddings(tmp_path) -> None:
    class Mixed(Module):
        def __init__(self, quantize: bool = False) -> None:
            super().__init__("init")
            self.table = nn.Embedding(16, 32)
            if quantize:
                halfbyte.quantize_model(self.net.first, "int8")
                self.net.table = nn.Embedding(8, 64)
                halfbyte.quantize_model(self.net, "nf4", embedding_format="fp8")
            else:
                self.net.table = nn.Embedding(8, 64)

    module = Mixed(quantize=True)
    path = saved(tmp_path, module, HalfbytePrecision("nf4"))
    loaded = load_from_checkpoint(Mixed, path)
    assert_equal(module, loaded)
    assert (str(loaded.net.first.format), str(loaded.net.second.format)) == ("int8", "nf4")
    assert str(loaded.net.table.format) == "fp8"


def test_models_passed_in_dense_take_the_checkpoints_layout(tmp_path) -> None:
    class Wrapper(Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__("configure")
            self.hparams.clear()
            self.net = net

    module = Wrapper(Net())
    path = saved(tmp_path, module, HalfbytePrecision("nf4"))
    assert_equal(module, load_from_checkpoint(Wrapper, path, net=Net(seed=9)))


def test_errors(tmp_path) -> None:
    path = saved(tmp_path, Module("init"), None)
    with pytest.raises(halfbyte.QuantizationError, match=r"no packed weight; load it with Module\.load_from_checkpoint"):
        load_from_checkpoint(Module, path)
    with pytest.raises(TypeError, match="must be a class derived from lightning.pytorch"):
        load_from_checkpoint(Net, path)

    class Other(Module):
        def configure_model(self) -> None:
            super().configure_model()
            self.net.second = nn.Conv1d(96, 64, 1)

    path = saved(tmp_path, Module("configure"), HalfbytePrecision())
    with pytest.raises(halfbyte.QuantizationError, match="net.second is packed in the checkpoint, the module has a Conv1d"):
        load_from_checkpoint(Other, path)
    assert "load_state_dict" not in vars(Other)
