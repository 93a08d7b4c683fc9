"""PiSSA, OLoRA and LoftQ on packed layers: from the original weights, closer to them than plain quantization."""

import json
import shutil

import pytest
import torch
from peft import LoftQConfig, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import halfbyte
from peft_bridge import HalfbyteConfig, HalfbyteLoraLinear, load_model

pytest.importorskip("scipy")  # PEFT asks for it where init_lora_weights="loftq"
INITIALIZERS = ["pissa", "pissa_niter_4", "olora", "loftq"]


def lora(initializer, **kwargs):
    bits = kwargs.pop("bits", 4)
    loftq = {"loftq_config": LoftQConfig(loftq_bits=bits, loftq_iter=2)} if initializer == "loftq" else {}
    settings = {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**settings, **loftq, **kwargs}, init_lora_weights=initializer)


def layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, HalfbyteLoraLinear)}


def effective(layer, adapter="default"):
    update = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()
    return layer.base_layer.dequantize(torch.float32) + layer.scaling[adapter] * update


def original(dense, name):
    return dense.get_submodule(name.removeprefix("base_model.model.")).weight.detach().float()


@pytest.mark.parametrize("format", ["nf4", "int8"])
@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_effective_weights_are_closer_to_the_original_in_every_layer(checkpoint, tokens, initializer, format):
    path, bits = checkpoint(), halfbyte.Format.parse(format).bits
    dense = AutoModelForCausalLM.from_pretrained(path)
    plain = load_model(path, format)
    model = load_model(path, format, lora=lora(initializer, bits=bits))
    assert len(layers(model)) == 14
    with torch.no_grad():
        for name, layer in layers(model).items():
            weight = original(dense, name)
            rounded = plain.get_submodule(name.removeprefix("base_model.model.")).dequantize(torch.float32)
            before, after = (rounded - weight).norm(), (effective(layer) - weight).norm()
            assert after < 0.999 * before, (name, float(after / before))
            assert layer.base_layer.weight.dtype == torch.uint8
    error = (model(tokens).logits - dense(tokens).logits).norm() / dense(tokens).logits.norm()
    assert error < (0.3 if bits == 4 else 0.03)


@pytest.mark.parametrize("initializer", INITIALIZERS)
@pytest.mark.parametrize("scale", [1, 2])
def test_rows_are_what_the_adapters_leave(checkpoint, initializer, scale):
    dense = AutoModelForCausalLM.from_pretrained(checkpoint())
    model = load_model(checkpoint(), "nf4", lora=lora(initializer, lora_alpha=8 * scale, use_rslora=scale == 2))
    with torch.no_grad():
        for name, layer in layers(model).items():
            update = layer.scaling["default"] * (layer.lora_B.default.weight @ layer.lora_A.default.weight)
            assert update.norm() > 0
            rows = halfbyte.quantize(original(dense, name) - update.float(), "nf4")
            different = (halfbyte.dequantize(rows, "nf4", layer.in_features) != layer.base_layer.dequantize()).sum()
            assert different <= 2, name  # a code at its threshold


def perturbed(model):
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("initializer", INITIALIZERS)
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_a_saved_adapter_reloads_on_a_freshly_quantized_base(checkpoint, tokens, tmp_path, initializer, low_cpu_mem_usage):
    model = perturbed(load_model(checkpoint(), "nf4", dtype="float32", lora=lora(initializer)))
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    torch.manual_seed(7)  # another state of the generator than at the first decomposition
    base = load_model(checkpoint(), "nf4", dtype="float32")
    again = PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    torch.testing.assert_close(again(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_modified_base_can_be_saved_instead_of_the_original(checkpoint, tokens, tmp_path):
    shutil.copytree(checkpoint(), tmp_path / "dense")
    model = perturbed(load_model(tmp_path / "dense", "nf4", dtype="float32", lora=lora("pissa")))
    expected = model(tokens).logits
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "adapter")
    model.unload().save_pretrained(tmp_path / "residual")
    shutil.rmtree(tmp_path / "dense")
    again = PeftModel.from_pretrained(load_model(tmp_path / "residual", dtype="float32"), tmp_path / "adapter")
    assert torch.equal(again(tokens).logits, expected)
    # With the initializer still in its config it would decompose the residual, which is packed.
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": "pissa"}))
    with pytest.raises(halfbyte.QuantizationError, match="quantized itself.*init_lora_weights.: true"):
        PeftModel.from_pretrained(load_model(tmp_path / "residual"), tmp_path / "adapter")


def test_pefts_conversion_gives_an_adapter_for_the_dense_original(checkpoint, tokens, tmp_path):
    model = load_model(checkpoint(), "int8", dtype="float32", lora=lora("pissa"))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    expected = perturbed(model)(tokens).logits
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    dense = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.float32)
    plain = dense(tokens).logits
    again = PeftModel.from_pretrained(dense, tmp_path / "converted")
    assert again.peft_config["default"].r == 16
    difference = (again(tokens).logits - expected).norm()
    assert difference < 0.05 * (expected - plain).norm() + 0.02 * expected.norm()


def test_renamed_transposed_and_headless_checkpoints(tmp_path):
    config = GPT2Config(n_embd=96, n_layer=1, n_head=4, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    source = GPT2LMHeadModel(config)
    source.transformer.save_pretrained(tmp_path)  # names without "transformer."
    model = GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=HalfbyteConfig("nf4"))
    model = get_peft_model(model, lora("pissa", target_modules=["c_fc"]))
    (layer,) = layers(model).values()
    with torch.no_grad():
        weight = source.transformer.h[0].mlp.c_fc.weight.t()
        error = (effective(layer) - weight).norm()
        assert error < (halfbyte.dequantize(halfbyte.quantize(weight.contiguous(), "nf4"), "nf4", 96) - weight).norm()


def test_what_cannot_be_read_again_names_load_model(checkpoint, tmp_path):
    shutil.copytree(checkpoint(), tmp_path / "dense")
    model = load_model(tmp_path / "dense", "nf4")
    shutil.rmtree(tmp_path / "dense")
    with pytest.raises(halfbyte.QuantizationError, match=r"is gone\. .*load_model\(path, format, lora=LoraConfig"):
        get_peft_model(model, lora("pissa"))
    converted = AutoModelForCausalLM.from_pretrained(checkpoint())
    halfbyte.quantize_model(converted)
    with pytest.raises(halfbyte.QuantizationError, match=r"not loaded by from_pretrained.*load_model"):
        get_peft_model(converted, lora("olora"))
    load_model(checkpoint(), "nf4").save_pretrained(tmp_path / "packed")
    with pytest.raises(halfbyte.QuantizationError, match=r"holds it as torch.uint8: the checkpoint is quantized itself"):
        load_model(tmp_path / "packed", lora=lora("loftq"))


def test_a_second_decomposition_of_one_base_is_refused(checkpoint, tokens):
    model = load_model(checkpoint(), "nf4", lora=lora("pissa", target_modules=["q_proj"]))
    with pytest.raises(NotImplementedError, match="already holds the residual of adapter 'default'"):
        model.add_adapter("second", lora("olora", target_modules=["q_proj"]))
    model = load_model(checkpoint(), "nf4", lora=lora("pissa", target_modules=["q_proj"]))
    model.add_adapter("second", lora(True, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="loftq_bits must be 8 for a base in int8, got 4"):
        load_model(checkpoint(), "int8", lora=lora("loftq"))
