"""Every host known to read `layer.weight` itself: it works, or the layer is left dense and reported.

transformers: the flash-attention dtype probe, T5's `wo`, Gemma3n's AltUp, WavLM's attention; others' own code; torch:
`nn.MultiheadAttention.out_proj`, `nn.TransformerEncoderLayer`'s fused path. PEFT's merge and DoRA:
tests/peft_bridge/test_lora.py. Falcon's own linear, which reads its own weight: tests/peft_bridge/test_falcon.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LongT5Config,
    LongT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WavLMConfig,
    WavLMForCTC,
)

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
    expected = "T5DenseActDense reads its weight" if make is born else "T5ForConditionalGeneration keeps it in float32 (wo)"
    assert reasons["encoder.block.0.layer.1.DenseReluDense.wo"].startswith(expected)
    loss = model(input_ids=torch.arange(5)[None], labels=torch.arange(5)[None]).loss
    assert bool(torch.isfinite(loss))


class Merging(nn.Module):
    """As many adapters do: reads the weight on request, multiplies through the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def merge(self, delta: torch.Tensor) -> None:
        self.linear.weight.data += delta


class Asking(Merging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.device) if self.linear.weight.dtype != torch.float64 else x)


class Reading(Merging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([8 * rows / 8 for rows in self.linear.weight.split(8)]).T  # as code inside a comprehension too


class Hidden(Merging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def product(rows: torch.Tensor) -> torch.Tensor:
            return rows @ self.linear.weight.T

        return product(x)


@both
def test_a_layer_whose_owner_reads_the_weight_in_forward_stays_dense(make) -> None:
    kinds = {"merging": Merging, "asking": Asking, "reading": Reading, "hidden": Hidden}
    model = make(lambda: nn.ModuleDict({name: kind() for name, kind in kinds.items()}))
    assert type(model["merging"].linear) is type(model["asking"].linear) is QuantLinear
    for name in ("reading", "hidden"):
        assert type(model[name].linear) is nn.Linear
        assert model[name](torch.randn(2, 64)).shape == (2, 64)
    reasons = {row.name: row.reason for row in halfbyte.report(model).rows}
    assert reasons["reading.linear"] == "Reading reads its weight directly"


@both
def test_gemma3n_clamps_its_coefficients_in_place(make) -> None:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextConfig

    config = Gemma3nTextConfig(hidden_size=64, altup_num_inputs=4, altup_coef_clip=120.0, num_hidden_layers=1)
    model = make(lambda: nn.ModuleDict({"altup": Gemma3nTextAltUp(config), "linear": nn.Linear(64, 64)})).train()
    altup = model["altup"]
    assert type(model["linear"]) is QuantLinear
    assert type(altup.prediction_coefs) is type(altup.correction_coefs) is nn.Linear
    assert bool(torch.isfinite(altup.predict(torch.randn(4, 1, 3, 64))).all())


@both
def test_wavlm_hands_its_weights_to_torch(make) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
    config = WavLMConfig(**sizes, conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16)
    model = make(lambda: WavLMForCTC(config)).eval()
    layer = model.wavlm.encoder.layers[0]
    assert type(layer.feed_forward.intermediate_dense) is QuantLinear
    assert type(layer.attention.q_proj) is nn.Linear
    assert bool(torch.isfinite(model(torch.randn(1, 400)).logits).all())


@both
def test_longt5_casts_activations_to_the_dtype_of_wo(make) -> None:
    sizes = {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    model = make(lambda: LongT5ForConditionalGeneration(LongT5Config(**sizes, decoder_start_token_id=0)))
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    assert (type(feed_forward.wi), type(feed_forward.wo)) == (QuantLinear, nn.Linear)
    assert bool(torch.isfinite(model(input_ids=torch.arange(5)[None], labels=torch.arange(5)[None]).loss))


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
