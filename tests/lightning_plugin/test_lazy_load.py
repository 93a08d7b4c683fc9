"""Checkpoints through Lightning's lazy loading (`fabric.load_raw`, LitGPT): objects that stand for tensors."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.load import _lazy_load, _NotYetLoadedTensor
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import halfbyte
from halfbyte.nn import QuantEmbedding, QuantLinear


class Net(nn.Module):
    def __init__(self, embedding: type[nn.Embedding] = nn.Embedding, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.embed = embedding(16, 64)
        self.project = linear(64, 32)
        self.norm = nn.LayerNorm(32)


def lazily(module: nn.Module, path: Path) -> dict[str, _NotYetLoadedTensor]:
    torch.save(module.state_dict(), path)
    state = _lazy_load(path)
    assert all(type(value) is _NotYetLoadedTensor for value in state.values())
    return state


@pytest.mark.parametrize("packed", [False, True])
def test_layers_take_what_lazy_loading_stands_for(tmp_path: Path, packed: bool) -> None:
    net = Net(QuantEmbedding, QuantLinear)
    dense = Net()
    with torch.no_grad():
        dense.norm.weight.uniform_()
    saved: nn.Module = dense
    if packed:
        saved = Net(QuantEmbedding, QuantLinear)
        saved.load_state_dict(dense.state_dict())
    net.load_state_dict(lazily(saved, tmp_path / "net.pth"))
    for name, format in (("embed", "int8"), ("project", "nf4")):
        expected = halfbyte.quantize(dense.get_submodule(name).weight.detach(), format)
        assert torch.equal(net.get_submodule(name).weight, expected), name
    assert torch.equal(net.norm.weight, dense.norm.weight)
    assert torch.equal(net.project.bias, dense.project.bias)


def test_a_wrong_shape_is_refused_before_it_is_read(tmp_path: Path) -> None:
    layer = QuantLinear(128, 32, format="nf4")
    state = lazily(nn.Linear(64, 32), tmp_path / "layer.pth")
    state["weight"]._load_tensor = lambda: pytest.fail("was read")
    with pytest.raises(RuntimeError, match=r"weight: a dense weight must have shape \(32, 128\), got \(32, 64\)"):
        layer.load_state_dict(state)



@pytest.mark.parametrize("packed", [False, True])
def test_packed_experts_take_it_too(tmp_path: Path, packed: bool) -> None:
    def build() -> MixtralForCausalLM:
        config = MixtralConfig(hidden_size=64, intermediate_size=96, vocab_size=32, num_hidden_layers=1, pad_token_id=0)
        config.update({"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2})
        return MixtralForCausalLM(config)

    dense = build()
    model, expected = build(), copy.deepcopy(dense)
    halfbyte.quantize_model(model, "int8")
    halfbyte.quantize_model(expected, "int8")
    model.load_state_dict(lazily(expected if packed else dense, tmp_path / "model.pth"))
    state = expected.state_dict()
    assert sum(value.dtype == torch.uint8 for value in state.values()) > 4
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
