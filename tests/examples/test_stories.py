"""The examples besides the demo, each on a model of a few thousand weights, in this process."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs an example as a script and returns what it printed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        torch.manual_seed(0)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def losses_of(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", printed)]


def test_every_example_is_one_story() -> None:
    files = list(EXAMPLES.rglob("*.py"))
    assert len(files) >= 10
    for file in files:
        lines = file.read_text().splitlines()
        assert len(lines) < 120, f"{file.name} has {len(lines)} lines"
        assert lines[0].startswith('"""')


def test_fabric(run: Any, tiny_model: Path, text: Path) -> None:
    printed = run("fabric_finetune.py", "--model", tiny_model, "--text", text, "--steps", 8, "--length", 16, "--lr", 1e-2,
                  "--accumulate", 2, "--batch-size", 4, "--output", "out")
    losses = losses_of(printed)
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert "nf4" in printed
    assert set(torch.load("out/adapters.ckpt", weights_only=True)) == {"adapters", "optimizer", "step"}


def test_sft_with_trl(run: Any, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    rows = [{"prompt": "the quick brown", "completion": " fox jumps over a lazy dog"}] * 64
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--data", "rows.jsonl", "--steps", 10, "--lr", 1e-2, "--output", "out"]
    printed = run("sft_trl.py", "--model", tiny_model, *options)
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) in 10 steps", printed).groups())
    assert after < before
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()


def test_full_fine_tuning_in_8_bits(run: Any, tiny_model: Path, text: Path) -> None:
    printed = run("full_finetune_adamw8bit.py", "--model", tiny_model, "--text", text, "--steps", 8, "--length", 16,
                  "--lr", 1e-2, "--output", "out")
    assert losses_of(printed)[-1] < losses_of(printed)[0]
    dense, ours = map(int, re.findall(r"planned peak with .*: (\d+) MB", printed))
    assert ours <= dense
    assert float(re.search(r"([\d.]+) bytes a weight", printed)[1]) < 3.5  # matrices below 4096 elements stay in float32


def test_a_stream_goes_on_where_it_stopped(run: Any, tiny_model: Path, text: Path, tmp_path: Path) -> None:
    words = text.read_text().split()
    for shard in range(2):
        rows = [{"text": " ".join(words[i : i + 7])} for i in range(shard, 600, 7)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--data", str(tmp_path / "*.jsonl"), "--model", tiny_model, "--length", 16, "--batch-size", 2, "--lr", 1e-2]
    whole = run("stream_data.py", *arguments, "--steps", 8, "--output", "whole")
    first = run("stream_data.py", *arguments, "--steps", 3, "--output", "parts")
    rest = run("stream_data.py", *arguments, "--steps", 5, "--output", "parts", "--resume")
    pattern = r"step \d+: loss [\d.]+, first token \d+"
    assert re.findall(pattern, first) + re.findall(pattern, rest) == re.findall(pattern, whole)
    assert losses_of(whole)[-1] < losses_of(whole)[0]


def test_serving_a_quantized_folder(run: Any, tiny_model: Path) -> None:
    printed = run("serve_quantized.py", "served", "--make", "--model", tiny_model, "--tokens", 5, "--prompt", "the quick")
    assert re.search(r"eager: [\d.]+ tokens/s", printed)
    assert "nf4" in printed
    again = run("serve_quantized.py", "served", "--tokens", 5, "--prompt", "the quick")
    assert printed.splitlines()[-1] == again.splitlines()[-1]


@pytest.mark.slow
def test_serving_compiled(run: Any, tiny_model: Path) -> None:
    printed = run("serve_quantized.py", "served", "--make", "--model", tiny_model, "--tokens", 5, "--compile")
    assert "same tokens as eager: True" in printed


def test_lightning_cli(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["main.py"])
    folder = EXAMPLES / "lightning_cli"
    sizes = ["--trainer.max_steps=3", "--trainer.accelerator=cpu", "--data.length=16", "--data.characters=2000"]
    arguments = ["fit", "--config", str(folder / "config.yaml"), "--model.path", str(tiny_model), *sizes]
    spec = importlib.util.spec_from_file_location("lightning_cli_example", folder / "main.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where jsonargparse looks annotations up
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit):
        module.main([*arguments, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    for given in (arguments, ["fit", "--config", str(tmp_path / "printed.yaml")]):
        module.main(given)
