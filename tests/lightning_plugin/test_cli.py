"""LightningCLI: the plugins from YAML, and the configuration it prints is one it accepts."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning_models import Module

from lightning_plugin import FabricHalfbytePrecision, HalfbytePrecision

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  max_steps: 2
  enable_progress_bar: false
  enable_checkpointing: false
  plugins:
    - class_path: lightning_plugin.HalfbytePrecision
      init_args:
        format: nf4-dq:128
        compute_dtype: bfloat16
        trainable_dtype: float32
        skip: [classifier, head]
  callbacks:
    - class_path: lightning_plugin.QuantizationReport
model:
  where: configure
"""


def make(arguments: list[str]) -> LightningCLI:
    return LightningCLI(Module, args=arguments, run=False, save_config_callback=None)


def test_plugin_from_yaml_and_print_config_round_trip(tmp_path, capsys) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    cli = make(["--config", str(tmp_path / "config.yaml")])
    plugin = cli.trainer.precision_plugin
    assert type(plugin) is HalfbytePrecision
    assert plugin.state_dict() == {
        "format": "nf4-dq:128",
        "compute_dtype": "bfloat16",
        "trainable_dtype": "float32",
        "skip": ["classifier", "head"],
    }
    with pytest.raises(SystemExit) as stopped:
        make(["--config", str(tmp_path / "config.yaml"), "--print_config"])
    assert stopped.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "nf4-dq:128" in printed
    (tmp_path / "printed.yaml").write_text(printed)
    again = make(["--config", str(tmp_path / "printed.yaml")]).trainer.precision_plugin
    assert again.state_dict() == plugin.state_dict()


def test_defaults_from_a_class_path_alone() -> None:
    cli = make(
        ["--trainer.accelerator=cpu", "--trainer.plugins=lightning_plugin.HalfbytePrecision", "--trainer.logger=false"]
    )
    plugin = cli.trainer.precision_plugin
    assert (plugin.format, plugin.skip, plugin.compute_dtype) == ("nf4", None, None)


def test_dtypes_are_names_in_files_and_dtypes_in_code() -> None:
    for plugin in (HalfbytePrecision, FabricHalfbytePrecision):
        assert plugin(compute_dtype=torch.bfloat16).state_dict() == plugin(compute_dtype="bfloat16").state_dict()
