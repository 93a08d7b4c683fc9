"""`halfbyte quantize SRC OUT --calibrate TEXT`: the folder's own tokenizer, a text file, an ordinary quantized folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import halfbyte
from halfbyte.cli import main


def test_quantize_with_calibration_text(tiny_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"w{i}": i for i in range(300)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tiny_llama().save_pretrained(tmp_path / "dense")
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * i % 300}" for i in range(1100)))
    arguments = ["quantize", str(tmp_path / "dense"), str(tmp_path / "out"), "--calibrate", str(text), "--tokens"]
    assert main([*arguments, "2048"]) == 1
    assert "data is too short: it gives 2 blocks of 512 tokens" in capsys.readouterr().err
    assert main([*arguments, "1024", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"]["tokens"] == 1024 and len(data["layers"]) == 21
    assert all(layer["error"] < layer["plain_error"] for layer in data["layers"])
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    model = tiny_llama()
    halfbyte.load_quantized(model, tmp_path / "out", progress=False)
    assert len(halfbyte.verify(model).quantized) == 21
