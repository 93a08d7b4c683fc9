"""GPT-2's Conv1D layers, which store (K, N): packed as (N, K) rows under their own names, and Conv1D again when dense."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import halfbyte
from halfbyte.nn import QuantLinear
from peft_bridge import HalfbyteConfig, HalfbyteLoraLinear, load_model


def config():
    sizes = {"n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config())
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def convs(model):
    return {name: module for name, module in model.named_modules() if "dense_class" in module.__dict__}


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_load_save_reload_and_back_to_dense(dense, tokens, tmp_path, format):
    reference = AutoModelForCausalLM.from_pretrained(dense)
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig(format))
    assert len(convs(model)) == len(halfbyte.report(model).quantized) == 8
    for name, module in convs(model).items():
        assert type(module) is QuantLinear
        source = reference.get_submodule(name)
        assert torch.equal(module.weight, halfbyte.quantize(source.weight.detach().t().contiguous(), format)), name
        assert torch.equal(module.bias, source.bias)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "packed")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    assert again.state_dict().keys() == reference.state_dict().keys()
    assert torch.equal(again(tokens).logits, expected)
    back = again.dequantize()
    assert not convs(back)
    assert back.transformer.h[0].mlp.c_fc.weight.shape == (96, 384)
    torch.testing.assert_close(back(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    back.save_pretrained(tmp_path / "dense")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")(tokens).logits, back(tokens).logits)


def test_verify_compares_with_the_transposed_weights(dense):
    reference = AutoModelForCausalLM.from_pretrained(dense)
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig("nf4"))
    errors = {row.name: row.error for row in halfbyte.verify(model, reference).rows if row.format}
    assert len(errors) == 8
    for name, error in errors.items():
        weight = reference.get_submodule(name).weight.t()
        decoded = model.get_submodule(name).dequantize(torch.float32)
        assert error == pytest.approx(float((decoded - weight).norm() / weight.norm()), rel=1e-5), name


@pytest.mark.parametrize("skip", [None, ("h.1",)])
def test_every_way_of_quantizing_packs_the_same_layers(dense, tokens, skip):
    loaded = AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig("nf4", skip=skip))
    converted = AutoModelForCausalLM.from_pretrained(dense)
    halfbyte.quantize_model(converted, skip=skip)
    with halfbyte.init_quantized("nf4", skip=skip):
        born = GPT2LMHeadModel(config())
    assert convs(loaded).keys() == convs(converted).keys() == convs(born).keys()
    assert len(convs(born)) == (8 if skip is None else 4)
    if skip is None:
        assert torch.equal(loaded(tokens).logits, converted(tokens).logits)
    else:
        assert type(born.transformer.h[1].mlp.c_fc) is Conv1D
        assert {row.reason for row in halfbyte.report(born).rows if "h.1" in row.name} == {"skip='h.1'"}
        assert {row.reason for row in halfbyte.report(loaded).rows if "h.1" in row.name} == {"skip='h.1'"}
    # The model's own initializer ran on the rows: GPT-2 draws with a standard deviation of 0.02.
    assert 0.015 < float(born.transformer.h[0].attn.c_attn.dequantize().std()) < 0.025
    born.load_state_dict(loaded.state_dict())
    assert torch.equal(born.eval()(tokens).logits, loaded(tokens).logits)
    for parameter in converted.parameters():
        parameter.requires_grad_(False)
    halfbyte.verify(converted)


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
@pytest.mark.parametrize("dora", [True, False])
def test_adapters(dense, tokens, tmp_path, fan_in_fan_out, dora):
    settings = {"r": 4, "target_modules": ["c_attn", "c_fc"], "use_dora": dora, "fan_in_fan_out": fan_in_fan_out}

    def load():
        return AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig("nf4"))

    model = get_peft_model(load(), LoraConfig(**settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    assert sum(isinstance(module, HalfbyteLoraLinear) for module in model.modules()) == 4
    reference = get_peft_model(load().dequantize(), LoraConfig(**{**settings, "fan_in_fan_out": True})).eval()
    reference.load_state_dict({k: v for k, v in model.state_dict().items() if "lora" in k}, strict=False)
    expected = model(tokens).logits
    torch.testing.assert_close(expected, reference(tokens).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(PeftModel.from_pretrained(load(), tmp_path).eval()(tokens).logits, expected)
    merged = model.merge_and_unload()
    target = merged.transformer.h[0].attn.c_attn
    assert type(target) is Conv1D and target.weight.shape == (96, 288)
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_bitsandbytes_folder_of_gpt2(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    wide = GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(wide).save_pretrained(tmp_path / "dense")
    for name, settings in {"4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "8": {"load_in_8bit": True}}.items():
        theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "dense", quantization_config=BitsAndBytesConfig(**settings))
        theirs.save_pretrained(tmp_path / name)
        model = load_model(tmp_path / name, dtype="float32")
        assert len(convs(model)) == 4
        layer = theirs.transformer.h[0].mlp.c_fc
        assert isinstance(layer, nn.Linear)
        if name == "4":
            expected = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        else:
            scb = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
            expected = (layer.weight.data.float() * scb[:, None]) / 127
        torch.testing.assert_close(model.transformer.h[0].mlp.c_fc.dequantize(), expected.float(), rtol=1e-6, atol=1e-7)
