"""Folders go both ways between load_quantized, save_quantized and transformers (with peft_bridge)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

import halfbyte  # noqa: E402
import peft_bridge  # noqa: E402
from halfbyte.checkpoint import quantize_checkpoint  # noqa: E402
from halfbyte.nn import QuantLinear  # noqa: E402
from halfbyte.nn.experts import QuantExperts  # noqa: E402


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64,
    )


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def dense(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(config(request.param)).save_pretrained(tmp_path / "dense", max_shard_size="60KB")
    return tmp_path / "dense"


def same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(a(tokens).logits, b(tokens).logits)


def test_folders_go_both_ways(dense: Path, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(dense, quantization_config=peft_bridge.HalfbyteConfig("nf4"))
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig.from_pretrained(dense))
    skeleton.eval()
    halfbyte.load_quantized(skeleton, dense, progress=False)  # rotary frequencies included
    same(skeleton, expected)
    halfbyte.save_quantized(skeleton, tmp_path / "ours")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), expected)
    expected.save_pretrained(tmp_path / "theirs")
    other = LlamaForCausalLM(LlamaConfig.from_pretrained(dense)).eval()
    halfbyte.load_quantized(other, tmp_path / "theirs", progress=False)
    same(other, expected)
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig.from_pretrained(dense))
    quantize_checkpoint(dense, tmp_path / "streamed", model=names, progress=False)
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "streamed"), expected)


def test_mixed_formats_are_refused_by_from_pretrained_and_read_by_us(tmp_path: Path) -> None:
    model = LlamaForCausalLM(config(False)).eval()
    halfbyte.quantize_model(model)
    layer = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = QuantLinear(64, 96, bias=False, format="fp4")
    assert layer.weight.shape == model.model.layers[0].mlp.up_proj.weight.shape  # sizes can't tell
    halfbyte.save_quantized(model, tmp_path)
    with pytest.raises(ValueError, match="got 'mixed'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    other = LlamaForCausalLM(config(False)).eval()
    halfbyte.load_quantized(other, tmp_path, progress=False)
    same(other, model)


def test_fused_experts_are_saved_and_loaded_as_rows(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    small = MixtralConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, max_position_embeddings=64,
    )
    model = MixtralForCausalLM(small).eval()
    halfbyte.quantize_model(model)
    assert type(model.model.layers[0].mlp.experts) is QuantExperts
    halfbyte.save_quantized(model, tmp_path)
    with torch.device("meta"):
        skeleton = MixtralForCausalLM(small).eval()
    other = MixtralForCausalLM(small).eval()
    packed = MixtralForCausalLM(small).eval()
    halfbyte.quantize_model(packed)
    for built in (skeleton, other, packed):
        halfbyte.load_quantized(built, tmp_path, progress=False)
        assert type(built.model.layers[0].mlp.experts) is QuantExperts
        same(built, model)


class Killed(BaseException):
    pass


def dies_before(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the `step`-th rename or removal on, every one fails: what the folder holds stays as it is."""
    calls = [0]

    def deadly(original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[0] += 1
            if calls[0] > step:
                raise Killed
            return original(*arguments, **keywords)

        return call

    monkeypatch.setattr(os, "replace", deadly(os.replace))
    monkeypatch.setattr(Path, "unlink", deadly(Path.unlink))


@pytest.mark.parametrize("single", [False, True], ids=["index", "one file"])
def test_from_pretrained_sees_the_old_folder_or_the_new_one_wherever_a_save_was_killed(tmp_path: Path, single: bool) -> None:
    models = {}
    for format in ("int8", "nf4"):
        torch.manual_seed(0)
        models[format] = LlamaForCausalLM(config(tied=False)).eval()
        halfbyte.quantize_model(models[format], format)
    halfbyte.save_quantized(models["int8"], tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    seen = []
    for step in range(12):
        folder = tmp_path / str(step)
        if single:
            theirs.save_pretrained(folder)
            assert (folder / "model.safetensors").exists()
        else:
            halfbyte.save_quantized(models["int8"], folder)
        with pytest.MonkeyPatch.context() as patch:
            dies_before(step, patch)
            try:
                halfbyte.save_quantized(models["nf4"], folder)
                finished = True
            except Killed:
                finished = False
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        format = str(loaded.model.layers[0].mlp.up_proj.format)
        same(loaded, models[format])
        seen.append(format)
        if finished:
            break
        halfbyte.save_quantized(models["int8"], folder)  # works on what is left, and leaves nothing of it
        same(AutoModelForCausalLM.from_pretrained(folder), models["int8"])
        assert len(list(folder.glob("model*"))) == 2 and "transformers_weights" not in (folder / "config.json").read_text()
    assert finished and seen == sorted(seen) and seen.count("int8") >= 3 and seen.count("nf4") >= 4
