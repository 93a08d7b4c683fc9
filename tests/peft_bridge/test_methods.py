"""What else PEFT does on packed models: copies of dense modules, trainable tokens, biases; and what is refused by name."""

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    OSFConfig,
    PeftModel,
    PromptTuningConfig,
    ShiraConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

from halfbyte.nn import QuantLinear
from peft_bridge import HalfbyteConfig, HalfbyteLoraLinear


def load(path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=HalfbyteConfig("nf4", **kwargs)
    )


def train(model, tokens, steps=3):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens", "norm"]},
        {"trainable_token_indices": [44, 47]},
        {"trainable_token_indices": {"embed_tokens": [44, 47]}, "modules_to_save": ["norm"]},
        {"bias": "all"},
        {"bias": "lora_only"},
    ],
    ids=str,
)
def test_what_trains_beside_lora_trains_saves_reloads_and_merges(checkpoint, tokens, tmp_path, tied, settings):
    path = checkpoint(tie_word_embeddings=tied)
    model = get_peft_model(load(path), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **settings))
    layers = [module for module in model.modules() if isinstance(module, HalfbyteLoraLinear)]
    assert len(layers) == 14
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, tokens)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert any("lora_B" in name for name in changed)
    beside = {name for name in changed if "lora_" not in name}
    assert beside
    if "modules_to_save" in settings:
        assert any("modules_to_save" in name for name in beside)
    if "bias" in settings:
        assert all(name.endswith(".bias") for name in beside)
        assert len(beside) == 8  # q, k, v and o of two layers
    assert {p.dtype for p in model.parameters() if not p.is_floating_point()} == {torch.uint8}
    assert not any(p.requires_grad for p in model.parameters() if p.dtype == torch.uint8)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(path), tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, QuantLinear) for module in merged.modules())


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("IA3", IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
        ("LOHA", LoHaConfig(target_modules=["q_proj"])),
        ("OSF", OSFConfig(target_modules=["q_proj"])),
        ("ADALORA", AdaLoraConfig(target_modules=["q_proj"], total_step=10)),
        ("LORA", LoraConfig(target_modules=["embed_tokens"])),
    ],
)
def test_other_methods_say_so_by_name_before_they_change_anything(checkpoint, tokens, method, config):
    model = load(checkpoint(tie_word_embeddings=False), embedding_format="int8")
    expected = model(tokens).logits
    with pytest.raises(NotImplementedError, match=rf"PEFT's {method} is not supported on packed rows: .* is a Quant"):
        get_peft_model(model, config)
    assert torch.equal(model(tokens).logits, expected)


def test_other_methods_work_on_dense_layers_and_prompts_on_any_model(checkpoint, tokens):
    model = get_peft_model(load(checkpoint(), skip=("q_proj",)), LoHaConfig(target_modules=["q_proj"], r=2))
    assert not torch.equal(train(model, tokens)(tokens).logits, load(checkpoint(), skip=("q_proj",))(tokens).logits)
    prompt = get_peft_model(load(checkpoint()), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert prompt(input_ids=tokens).logits.shape == (2, 12, 128)


@pytest.mark.parametrize(
    "config",
    [
        OFTConfig(target_modules=["q_proj", "up_proj"], oft_block_size=8, init_weights=False),
        BOFTConfig(target_modules=["q_proj", "up_proj"], boft_block_size=4, init_weights=False),
        VeraConfig(target_modules=["q_proj", "up_proj"], r=8, init_weights=False),
        MissConfig(target_modules=["q_proj", "up_proj"], r=8, init_weights=False),
        ShiraConfig(target_modules=["q_proj", "up_proj"], r=2, random_seed=0, init_weights=False),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_methods_with_a_backend_equal_themselves_on_the_dequantized_model(checkpoint, tokens, config):
    outputs, gradients = [], []
    for base in (load(checkpoint()), load(checkpoint()).dequantize(torch.float32)):
        torch.manual_seed(0)
        model = get_peft_model(base, copy.deepcopy(config))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        outputs.append(model.eval()(tokens).logits)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=2e-3, atol=1e-5, msg=name)


def test_packed_modules_can_be_neither_copied_nor_trained(checkpoint):
    with pytest.raises(NotImplementedError, match="modules_to_save='up_proj': model.layers.0.mlp.up_proj is packed .nf4."):
        get_peft_model(load(checkpoint()), LoraConfig(target_modules=["q_proj"], modules_to_save=["up_proj"]))
    with pytest.raises(NotImplementedError, match="modules_to_save='mlp': model.layers.0.mlp.gate_proj is packed"):
        get_peft_model(load(checkpoint()), LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"]))
    with pytest.raises(NotImplementedError, match="target_parameters='q_proj.weight': .* is packed"):
        get_peft_model(load(checkpoint()), LoraConfig(target_modules=["v_proj"], target_parameters=["q_proj.weight"]))
    table = load(checkpoint(tie_word_embeddings=False), embedding_format="int8")
    with pytest.raises(NotImplementedError, match="trainable_token_indices: model.embed_tokens is packed .int8."):
        get_peft_model(table, LoraConfig(target_modules=["v_proj"], trainable_token_indices=[1]))
