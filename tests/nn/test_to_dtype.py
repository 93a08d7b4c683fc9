"""`.to(dtype)` and the like after quantizing: a packed layer then returns what a dense one would."""

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.nn import QuantLinear
from halfbyte.nn.embedding import QuantEmbedding

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CALLS = {
    "to(dtype)": lambda m: m.to(BF16),
    "to(device, dtype)": lambda m: m.to("cpu", BF16),
    "bfloat16()": lambda m: m.bfloat16(),
    "half()": lambda m: m.half(),
    "to(tensor)": lambda m: m.to(torch.zeros(1, dtype=FP16)),
    "to(device)": lambda m: m.to("cpu"),
    "to(meta)": lambda m: m.to("meta"),
    "twice": lambda m: m.half().float(),
    "share_memory()": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("compute_dtype", [None, FP32, BF16])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_returned_dtype_follows_as_a_dense_layers_does(call, compute_dtype):
    """The dense layer is what `.to` gives; its input has the dtype that its weight has."""
    dense = CALLS[call](nn.Linear(64, 32))
    layer = CALLS[call](QuantLinear(64, 32, compute_dtype=compute_dtype))
    assert layer.weight.dtype == torch.uint8
    assert layer.bias.dtype == layer.dense_dtype == dense.weight.dtype
    if not layer.weight.is_meta:
        x = torch.randn(2, 64, dtype=dense.weight.dtype)
        assert layer(x).dtype == dense(x).dtype


def test_rows_stay_and_tables_and_whole_models_follow():
    model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    halfbyte.quantize_model(model, embedding_format="nf4", skip=())
    rows = [model[0].weight.clone(), model[1].weight.clone()]
    model.to(BF16)
    assert isinstance(model[0], QuantEmbedding)
    assert [module.dense_dtype for module in model[:2]] == [BF16, BF16]
    assert model[0](torch.arange(3)).dtype == model(torch.arange(3)).dtype == BF16
    assert all(torch.equal(module.weight, before) for module, before in zip(model[:2], rows, strict=True))
    assert model[1].dequantize().dtype == BF16


def test_a_dtype_that_rows_cannot_decode_to_changes_nothing():
    layer = QuantLinear(64, 32, compute_dtype=FP32).double()
    assert layer.dense_dtype == FP32
    assert layer(torch.randn(2, 64, dtype=torch.float64)).dtype == FP32
