"""Falcon's linear layers, a subclass of nn.Linear that computes the same: packed in every way, and dense again."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

import halfbyte
from halfbyte.nn import QuantLinear
from peft_bridge import HalfbyteConfig


def config():
    return FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("falcon")
    torch.manual_seed(0)
    FalconForCausalLM(config()).save_pretrained(folder)
    return folder


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def packed(model):
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def test_load_save_reload_and_back_to_dense(dense, tokens, tmp_path):
    reference = load(dense)
    model = load(dense, quantization_config=HalfbyteConfig("nf4"))
    names = {name for name, module in reference.named_modules() if type(module) is FalconLinear}
    assert packed(model) == names
    assert len(names) == 8
    errors = {row.name: row.error for row in halfbyte.verify(model, reference).rows if row.format}
    assert errors.keys() == names
    for name, error in errors.items():
        assert 0.05 < error < 0.15, name  # a transposed or scrambled weight has an error above 1
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(load(tmp_path / "packed")(tokens).logits, expected)
    back = model.dequantize()
    assert {name for name, module in back.named_modules() if type(module) is FalconLinear} == names
    torch.testing.assert_close(back(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("skip", [None, ("h.1",)])
def test_every_way_of_quantizing_packs_the_same_layers(dense, tokens, skip):
    loaded = load(dense, quantization_config=HalfbyteConfig("nf4", skip=skip))
    converted = load(dense)
    halfbyte.quantize_model(converted, skip=skip)
    with halfbyte.init_quantized("nf4", skip=skip):
        born = FalconForCausalLM(config())
    assert packed(loaded) == packed(converted) == packed(born)
    assert len(packed(born)) == (8 if skip is None else 4)
    if skip is None:
        assert torch.equal(loaded(tokens).logits, converted(tokens).logits)


def test_a_dense_layer_registered_in_the_context_stays_dense():
    with halfbyte.init_quantized("nf4"):
        outer = nn.Sequential(nn.Linear(64, 64))
    kept = nn.Linear(64, 64)
    with halfbyte.init_quantized("nf4"):
        outer.append(nn.Linear(64, 64))
        outer.append(kept)
    assert [type(module) for module in outer] == [QuantLinear, QuantLinear, nn.Linear]


def test_lora_trains_on_it(dense, tokens):
    base = load(dense, quantization_config=HalfbyteConfig("nf4"))
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    model(tokens).logits.square().mean().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 16
    assert all(grad is not None and bool(torch.isfinite(grad).all()) for grad in trained)
