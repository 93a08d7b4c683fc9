"""Every host known to read `layer.weight` itself: it works, or the layer is left dense and reported.

transformers: the flash-attention dtype probe, T5's `wo`, Falcon's own linear. torch: `nn.MultiheadAttention.out_proj`,
`nn.TransformerEncoderLayer`'s fused path. PEFT's merge and DoRA: tests/peft_bridge/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import halfbyte
from halfbyte.nn import QuantLinear


def born(build: Callable[[], nn.Module]) -> nn.Module:
    with halfbyte.init_quantized():
        return build()


def converted(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    halfbyte.quantize_model(model)
    return model


both = pytest.mark.parametrize("make", [born, converted])


@both
def test_the_flash_attention_probe_never_answers_uint8(make) -> None:
    from transformers.integrations.flash_attention import get_target_dtype

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16")
    model = make(lambda: LlamaForCausalLM(config))
    attention = model.model.layers[0].self_attn
    assert type(attention.q_proj) is QuantLinear
    assert get_target_dtype(torch.randn(1, 4, 3, 16), attention) == torch.bfloat16
    assert "_is_quantized" not in model.config.to_dict()


@both
def test_t5_keeps_wo_dense(make) -> None:
    config = T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = make(lambda: T5ForConditionalGeneration(config))
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    assert (type(feed_forward.wi), type(feed_forward.wo)) == (QuantLinear, nn.Linear)
    reasons = {row.name: row.reason for row in halfbyte.report(model).rows}
    assert "float32 (wo)" in reasons["encoder.block.0.layer.1.DenseReluDense.wo"]
    loss = model(input_ids=torch.arange(5)[None], labels=torch.arange(5)[None]).loss
    assert bool(torch.isfinite(loss))


def test_falcon_multiplies_by_its_weight_itself_and_stays_dense() -> None:
    config = FalconConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = FalconForCausalLM(config)
    with pytest.raises(halfbyte.QuantizationError, match="FalconLinear is a subclass with a forward of its own"):
        halfbyte.quantize_model(model)
    assert model(input_ids=torch.arange(5)[None]).logits.shape == (1, 5, 100)
    with pytest.raises(halfbyte.QuantizationError, match="nothing was quantized"):
        born(lambda: FalconForCausalLM(config))


@both
def test_torch_attention_and_encoder_layers(make) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict(
            {
                "attention": nn.MultiheadAttention(64, 4, batch_first=True),
                "encoder": nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
                "linear": nn.Linear(64, 64),
            }
        )

    model = make(build).eval()
    packed = [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    assert packed == ["linear"]
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert model["attention"](x, x, x)[0].shape == x.shape
        assert model["encoder"](x).shape == x.shape
