"""Folders go both ways between load_quantized, save_quantized and transformers (with peft_bridge)."""

from __future__ import annotations

from pathlib import Path

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
