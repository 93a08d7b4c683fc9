"""load_model: one call from a folder to a packed model with adapters."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

import halfbyte
from peft_bridge import HalfbyteConfig, HalfbyteLoraLinear, load_model


def test_a_dense_folder_becomes_nf4_or_what_is_asked(checkpoint, tokens):
    model = load_model(checkpoint())
    expected = LlamaForCausalLM.from_pretrained(checkpoint(), quantization_config=HalfbyteConfig("nf4"))
    assert type(model) is LlamaForCausalLM
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert str(load_model(checkpoint(), "int8").model.layers[0].mlp.up_proj.format) == "int8"
    model = load_model(checkpoint(), quantization_config=HalfbyteConfig("fp8", skip=("mlp",)), dtype="float32")
    assert len(halfbyte.report(model).quantized) == 9
    assert model.dtype == torch.float32


def test_a_packed_folder_keeps_its_format_and_its_class(checkpoint, tmp_path):
    LlamaForSequenceClassification.from_pretrained(checkpoint(), quantization_config=HalfbyteConfig("fp4")).save_pretrained(
        tmp_path
    )
    model = load_model(tmp_path)
    assert type(model) is LlamaForSequenceClassification
    assert str(model.model.layers[0].mlp.up_proj.format) == "fp4"
    assert str(load_model(tmp_path, "fp4").model.layers[0].mlp.up_proj.format) == "fp4"
    with pytest.raises(ValueError, match="format='fp4', got 'nf4'"):
        load_model(tmp_path, "nf4")


@pytest.mark.parametrize("lora", [{"r": 2}, LoraConfig(r=2, target_modules=["q_proj"])])
def test_with_adapters(checkpoint, lora):
    model = load_model(checkpoint(), lora=lora)
    assert isinstance(model, PeftModel)
    adapted = [m for m in model.modules() if isinstance(m, HalfbyteLoraLinear)]
    assert len(adapted) == (14 if isinstance(lora, dict) else 2)
    assert adapted[0].r["default"] == 2


def test_what_contradicts_itself_is_refused(checkpoint):
    with pytest.raises(TypeError, match="not both"):
        load_model(checkpoint(), "nf4", quantization_config=HalfbyteConfig("nf4"))
    with pytest.raises(ValueError, match="format"):
        load_model(checkpoint(), "nf5")
