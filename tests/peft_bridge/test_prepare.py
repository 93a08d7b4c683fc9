"""prepare_model: nothing is cast, nothing grows, gradients flow."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from peft_bridge import HalfbyteConfig, prepare_model


def load(path, auto=AutoModelForCausalLM, **kwargs):
    return auto.from_pretrained(path, quantization_config=HalfbyteConfig("nf4"), **kwargs)


@pytest.mark.parametrize("vocabulary", [128, 4096])
def test_nothing_is_cast_and_everything_is_frozen(checkpoint, vocabulary):
    model = load(checkpoint(vocab_size=vocabulary))
    before = {name: (p.dtype, p.nbytes) for name, p in model.named_parameters()}
    assert prepare_model(model) is model
    assert {name: (p.dtype, p.nbytes) for name, p in model.named_parameters()} == before
    assert not any(p.requires_grad for p in model.parameters())
    assert model.model.gradient_checkpointing
    assert model.training


@pytest.mark.parametrize("vocabulary", [128, 250_000])
@pytest.mark.parametrize("tied", [True, False])
def test_memory_is_never_larger_than_in_16_bit(checkpoint, vocabulary, tied):
    """Also where the embedding is nearly all of the model, which PEFT's own preparation would double."""
    path = checkpoint(vocab_size=vocabulary, tie_word_embeddings=tied)
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    limit = sum(p.nbytes for p in dense.parameters())
    del dense
    packed = prepare_model(load(path))
    assert sum(p.nbytes for p in packed.parameters()) < limit
    adapted = get_peft_model(packed, LoraConfig(r=2, target_modules="all-linear"))
    assert sum(p.nbytes for p in adapted.parameters() if not p.requires_grad) < limit
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {torch.uint8, torch.bfloat16}


@pytest.mark.parametrize("order", ["prepare first", "adapters first"])
def test_checkpointing_runs_and_adapters_get_gradients(checkpoint, tokens, order, monkeypatch):
    model = load(checkpoint())
    if order == "prepare first":
        model = get_peft_model(prepare_model(model), LoraConfig(r=2, target_modules="all-linear"))
    else:
        model = prepare_model(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")))
    calls = []
    layer = model.base_model.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert len(calls) == 2  # once more in backward
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 28
    assert all(p.grad is not None for p in trainable.values())


def test_fresh_heads_stay_trainable(checkpoint):
    model = prepare_model(load(checkpoint(), AutoModelForSequenceClassification))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["score.weight"]


def test_without_checkpointing_and_what_is_refused(checkpoint):
    model = prepare_model(load(checkpoint()), gradient_checkpointing=False)
    assert not model.model.gradient_checkpointing
    assert not model.training
    with pytest.raises(TypeError, match="must have packed layers, Linear has none"):
        prepare_model(nn.Linear(4, 4))
    import halfbyte

    plain = nn.Sequential(nn.Linear(64, 64))
    halfbyte.quantize_model(plain)
    with pytest.raises(TypeError, match="Sequential has no activation_checkpointing_enable"):
        prepare_model(plain)
    prepare_model(plain, gradient_checkpointing=False)
