"""halfbyte.calibrate: the same bytes from folder and memory, resumed or not; every bad input said or reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte
from halfbyte.calibration.folder import Folder
from halfbyte.errors import QuantizationError
from halfbyte.formats import FORMATS

SIZES = {"tokens": 640, "seq_len": 64}


pytestmark = pytest.mark.usefixtures("one_thread")


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("model*"))}


def packed(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if value.dtype == torch.uint8}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_folder_and_memory_give_the_same_rows_and_transformers_loads_them(
    tiny_llama: Any, ids: Tensor, tmp_path: Path
) -> None:
    pytest.importorskip("peft_bridge")
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    model.save_pretrained(tmp_path / "dense")
    report = halfbyte.calibrate(tmp_path / "dense", ids, "nf4:32", out=tmp_path / "out", **SIZES)
    in_memory = halfbyte.calibrate(model, ids, "nf4:32", **SIZES)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    halfbyte.verify(loaded)
    assert len(packed(model)) == 21 and same(packed(loaded), packed(model))
    assert torch.equal(loaded(ids[:1]).logits, model(ids[:1]).logits)
    assert report.layers == in_memory.layers and len(in_memory.quantized) == 21 and not report.fallbacks
    assert all(layer.error < layer.plain_error for layer in report.layers)
    saved = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert len(saved["layers"]) == 21 and saved["settings"]["format"] == "nf4:32"
    assert not (tmp_path / "out" / ".calibration").exists()
    assert "output error: 0." in str(report)
    other = tiny_llama()
    halfbyte.load_quantized(other, tmp_path / "out", progress=False)  # verifies the checksums in the headers
    assert same(packed(other), packed(model))


@pytest.mark.filterwarnings("ignore:calibrate. .* can't be read block by block")  # the checkpoint has experts apart
@pytest.mark.parametrize(
    ("name", "weights"), [("gpt2", 8), ("gpt_neox", 8), ("opt", 14), ("gemma2", 14), ("mixtral", 24), ("gpt_oss", 24)]
)
def test_other_architectures(tiny_model: Any, ids: Tensor, tmp_path: Path, name: str, weights: int) -> None:
    pytest.importorskip("peft_bridge")
    from transformers import AutoModelForCausalLM

    model = tiny_model(name)
    model.save_pretrained(tmp_path / "dense")
    report = halfbyte.calibrate(tmp_path / "dense", ids, out=tmp_path / "out", **SIZES)
    assert report.layers == halfbyte.calibrate(model, ids, **SIZES).layers
    assert len(report.layers) == weights
    assert {layer.note for layer in report.fallbacks} <= {"outside the decoder blocks"}
    assert all(layer.error < layer.plain_error for layer in report.layers if not layer.note)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    halfbyte.verify(loaded)
    assert torch.equal(loaded(ids[:1]).logits, model(ids[:1]).logits)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(toy: Any, name: str) -> None:
    ids = torch.randint(0, 32, (10, 64))
    report = halfbyte.calibrate(toy, ids, name, **SIZES)
    assert len(report.quantized) == 18
    assert all(layer.error <= layer.plain_error for layer in report.layers)
    halfbyte.verify(toy)


def test_scales_alone_help_less_than_feedback(tiny_llama: Any, ids: Tensor) -> None:
    errors = {}
    for method in ("scales", "feedback"):
        report = halfbyte.calibrate(tiny_llama(), ids, "fp4", method=method, **SIZES)
        errors[method] = sum(layer.error / layer.plain_error for layer in report.layers) / len(report.layers)
    assert errors["feedback"] < errors["scales"] < 1.0


def test_same_seed_same_bytes(tiny_llama: Any, ids: Tensor) -> None:
    rows = []
    for seed in (0, 0, 1):
        model = tiny_llama()
        halfbyte.calibrate(model, ids, tokens=256, seq_len=64, seed=seed)
        rows.append(packed(model))
    assert same(rows[0], rows[1]) and not same(rows[0], rows[2])


def test_the_bar_shows_every_weight_with_its_errors(
    tiny_llama: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tqdm = pytest.importorskip("tqdm")
    shown: list[str] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(tqdm.auto.tqdm, "set_postfix_str", lambda bar, text, refresh=True: shown.append(text))
    report = halfbyte.calibrate(tiny_llama(), ids, **SIZES)
    measured = [layer for layer in report.layers if layer.error is not None]
    assert len(measured) == 21 and len(shown) == 21
    for text, layer in zip(shown, measured, strict=True):
        assert text == f"{layer.name.removeprefix('model.layers.')} {layer.plain_error:.4f} -> {layer.error:.4f}"
    assert "21/21" in capsys.readouterr().err


@pytest.mark.parametrize("streamed", [True, False])
def test_a_killed_run_goes_on_where_it_was(
    tiny_llama: Any, ids: Tensor, tmp_path: Path, monkeypatch: Any, streamed: bool
) -> None:
    tiny_llama().save_pretrained(tmp_path / "dense")

    def run(out: str) -> Any:
        return halfbyte.calibrate(tmp_path / "dense" if streamed else tiny_llama(), ids, out=tmp_path / out, **SIZES)

    whole = run("whole")
    finish = Folder.finish_block

    def killed(self: Folder, index: int, layers: Any) -> None:
        if index == 1:  # the shard is there, its note is not
            raise KeyboardInterrupt
        finish(self, index, layers)

    monkeypatch.setattr(Folder, "finish_block", killed)
    with pytest.raises(KeyboardInterrupt):
        run("resumed")
    monkeypatch.setattr(Folder, "finish_block", finish)
    assert not (tmp_path / "resumed" / "model.safetensors.index.json").exists()
    with pytest.raises(FileExistsError, match="unfinished run of another model, text, format or setting"):
        halfbyte.calibrate(tiny_llama(), ids, "fp4", out=tmp_path / "resumed", **SIZES)
    resumed = run("resumed")
    assert folder_bytes(tmp_path / "resumed") == folder_bytes(tmp_path / "whole")
    assert resumed.layers == whole.layers
    with pytest.raises(FileExistsError, match="holds a model already"):
        run("resumed")


def test_text_comes_from_strings_files_and_folders(toy: Any, tmp_path: Path) -> None:
    class Letters:
        def __call__(self, text: str, **_: Any) -> Any:
            return type("Encoded", (), {"input_ids": torch.tensor([[ord(c) % 32 for c in text]])})

    text = "the quick brown fox jumps over the lazy dog\n" * 40
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(text)
    rows = []
    for data in (text, [text], tmp_path / "texts", str(tmp_path / "texts" / "a.txt")):
        torch.manual_seed(0)
        model = type(toy)().eval()
        halfbyte.calibrate(model, data, tokenizer=Letters(), **SIZES)
        rows.append(packed(model))
    assert all(same(rows[0], other) for other in rows[1:])


def test_experts_without_tokens_get_plain_rows_and_are_listed(toy: Any) -> None:
    dense = toy.blocks[0].experts[3][0].weight.detach().clone()
    ids = torch.randint(0, 8, (10, 64)) * 4  # expert 0 only
    report = halfbyte.calibrate(toy, ids, **SIZES)
    listed = {layer.name for layer in report.fallbacks}
    assert listed == {f"blocks.{b}.experts.{e}.{i}" for b in range(2) for e in (1, 2, 3) for i in (0, 1)}
    assert report.fallbacks[0].note == "only 0 calibration tokens reached it (at least 64 are needed)"
    assert torch.equal(toy.blocks[0].experts[3][0].weight, halfbyte.quantize(dense))
    assert {layer.tokens for layer in report.layers} == {0, 640}


def test_dead_channels_and_nan_activations_are_reported(toy: Any) -> None:
    with torch.no_grad():
        toy.embed.weight[:, 5] = 0.0
        toy.embed.weight[7, 3] = float("nan")
    ids = torch.randint(0, 32, (10, 64), generator=torch.Generator().manual_seed(0))
    report = halfbyte.calibrate(toy, ids, **SIZES)
    layers = {layer.name: layer for layer in report.layers}
    bad = int((ids == 7).sum())
    assert layers["blocks.0.experts.0.0"].dead_channels == 1
    assert layers["blocks.0.experts.3.0"].dropped_tokens == bad > 0
    assert layers["blocks.0.project"].tokens == 640 - bad
    halfbyte.verify(toy)
    with torch.no_grad():
        toy_again = type(toy)().eval()
        toy_again.embed.weight.fill_(float("nan"))
    with pytest.raises(QuantizationError, match="every activation in blocks.0 is NaN or infinite"):
        halfbyte.calibrate(toy_again, ids, **SIZES)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"data": torch.zeros(3, 64, dtype=torch.int64)},
            ValueError,
            "too short: it gives 3 blocks of 64 tokens, tokens=640",
        ),
        ({"data": torch.full((10, 64), 32)}, ValueError, "holds token id 32, the model's vocabulary has 32"),
        ({"data": torch.full((10, 64), -1)}, ValueError, "holds token id -1"),
        ({"data": torch.zeros(10, 64)}, TypeError, "token ids must be int64 or int32"),
        ({"data": "some text"}, TypeError, "text needs a tokenizer"),
        ({"data": " \n ", "tokenizer": print}, ValueError, "data is empty"),
        ({"data": 3, "tokenizer": print}, TypeError, "data must be text, a list of texts, a path"),
        ({"method": "magic"}, ValueError, "method must be one of feedback, scales, got 'magic'"),
        ({"format": "nf5"}, ValueError, "format must be one of"),
        ({"tokens": 10}, ValueError, "tokens must be at least seq_len"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"skip": ("blocks",)}, QuantizationError, "nothing in the 2 blocks can be quantized"),
        ({"model_or_checkpoint": "nowhere"}, ValueError, "a checkpoint folder needs out="),
        ({"model_or_checkpoint": "nowhere", "out": "x"}, FileNotFoundError, "nowhere is not a model folder"),
        ({"model_or_checkpoint": 3, "out": "x"}, TypeError, "must be a model or the path of a folder, got int"),
        ({"model_or_checkpoint": nn.Linear(2, 2)}, QuantizationError, "has no nn.ModuleList of decoder blocks"),
    ],
)
def test_errors_say_what_is_wrong(toy: Any, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    ids = torch.randint(0, 32, (10, 64))
    with pytest.raises(error, match=text):
        halfbyte.calibrate(**{"model_or_checkpoint": toy, "data": ids, **SIZES, **arguments})


def test_a_quantized_model_is_refused(toy: Any) -> None:
    halfbyte.quantize_model(toy)
    with pytest.raises(ValueError, match="quantized already"):
        halfbyte.calibrate(toy, torch.randint(0, 32, (10, 64)), **SIZES)
