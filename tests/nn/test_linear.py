"""QuantLinear and QuantEmbedding as modules: dtypes, state dicts, conversion, ties, the things hosts do to modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.formats import FORMATS
from halfbyte.nn import QuantEmbedding, QuantLinear


def test_from_linear_equals_the_dense_layer_on_dequantized_weights() -> None:
    linear = nn.Linear(100, 33)
    layer = QuantLinear.from_linear(linear, "nf4-dq")
    assert type(linear) is nn.Linear
    assert linear.weight.dtype == torch.float32
    assert layer.bias is linear.bias
    assert layer.weight.shape == (33, layer.format.row_bytes(100))
    assert not layer.weight.requires_grad
    x = torch.randn(4, 100)
    expected = nn.functional.linear(x, layer.dequantize(torch.float32), linear.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_a_new_layer_draws_what_nn_linear_draws() -> None:
    torch.manual_seed(3)
    dense = nn.Linear(64, 32)
    torch.manual_seed(3)
    layer = QuantLinear(64, 32)
    assert torch.equal(layer.weight, halfbyte.quantize(dense.weight))
    assert torch.equal(layer.bias, dense.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compute_dtype_rules(dtype: torch.dtype) -> None:
    layer = QuantLinear(64, 32, dtype=torch.bfloat16)
    x = torch.randn(2, 64, dtype=dtype)
    assert layer(x).dtype == dtype  # the input's
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16  # autocast's
    layer.compute_dtype = torch.float32
    expected = nn.functional.linear(x.float(), layer.dequantize(), layer.bias.float())
    # The compute dtype passes through; any other comes back as the layer was built.
    returned = dtype if dtype == torch.float32 else torch.bfloat16
    assert layer(x).dtype == returned
    torch.testing.assert_close(layer(x), expected.to(returned))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x), expected.to(torch.bfloat16))  # an explicit one wins over autocast


def test_compute_dtype_by_name_and_bad_values() -> None:
    assert QuantLinear(8, 8, compute_dtype="bfloat16").compute_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="compute_dtype must be one of float32, bfloat16, float16, got 'half'"):
        QuantLinear(8, 8, compute_dtype="half")
    with pytest.raises(TypeError, match="compute_dtype must be float32, bfloat16 or float16 or None"):
        QuantLinear(8, 8, compute_dtype=torch.int8)
    with pytest.raises(TypeError, match="QuantLinear: input must be float32.*got int64"):
        QuantLinear(8, 8)(torch.ones(1, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match="got float64"):
        QuantLinear(8, 8)(torch.ones(1, 8, dtype=torch.float64))


@pytest.mark.parametrize("name", FORMATS)
def test_state_dict_round_trip_through_a_file(name: str) -> None:
    layer = QuantLinear(65, 7, format=name)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    other = QuantLinear(65, 7, format=name)
    assert not torch.equal(other.weight, layer.weight)
    other.load_state_dict(loaded)
    assert torch.equal(other.weight, layer.weight)
    assert other.weight.dtype == torch.uint8
    assert torch.equal(other.bias, layer.bias)


def test_a_dense_state_dict_is_quantized_on_the_way_in() -> None:
    dense = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    model = nn.Sequential(QuantLinear(64, 32), QuantLinear(32, 16, format="int8"))
    model.load_state_dict(dense.state_dict())
    assert torch.equal(model[0].weight, halfbyte.quantize(dense[0].weight, "nf4"))
    assert torch.equal(model[1].weight, halfbyte.quantize(dense[1].weight, "int8"))


@pytest.mark.parametrize("packed", [True, False])
def test_meta_module_with_assign(packed: bool) -> None:
    source = QuantLinear(64, 32) if packed else nn.Linear(64, 32)
    with torch.device("meta"):
        layer = QuantLinear(64, 32)
    assert layer.weight.is_meta
    layer.load_state_dict(source.state_dict(), assign=True)
    expected = source.weight if packed else halfbyte.quantize(source.weight)
    assert torch.equal(layer.weight, expected)
    assert layer.weight.device.type == "cpu"
    assert not layer.weight.requires_grad


def test_rows_of_another_format_or_size_are_refused_by_name() -> None:
    model = nn.Sequential(QuantLinear(64, 32, format="fp4"))
    with pytest.raises(RuntimeError, match=r"0\.weight: the checkpoint holds nf4 rows, the module is fp4"):
        model.load_state_dict(nn.Sequential(QuantLinear(64, 32)).state_dict())
    with pytest.raises(RuntimeError, match=r"0\.weight: packed fp4 rows for in_features=64 must have shape \(32, 48\)"):
        model.load_state_dict({"0.weight": torch.zeros(32, 64, dtype=torch.uint8), "0.bias": torch.zeros(32)})
    with pytest.raises(RuntimeError, match=r"0\.weight: a dense weight must have shape \(32, 64\), got \(32, 65\)"):
        model.load_state_dict({"0.weight": torch.zeros(32, 65), "0.bias": torch.zeros(32)})
    with pytest.raises(RuntimeError, match=r"0\.weight: expected packed uint8 rows or a dense .* got int64"):
        model.load_state_dict({"0.weight": torch.zeros(32, 64, dtype=torch.int64), "0.bias": torch.zeros(32)})
    # the same number of bytes per row, another in_features: only the metadata can tell
    with pytest.raises(RuntimeError, match="got .* for in_features=63"):
        nn.Sequential(QuantLinear(64, 32)).load_state_dict(nn.Sequential(QuantLinear(63, 32)).state_dict())


def test_what_hosts_do_to_modules_leaves_the_rows_alone() -> None:
    layer = QuantLinear(64, 32)
    rows = layer.weight.detach().clone()
    for change in (nn.Module.half, nn.Module.bfloat16, nn.Module.float, lambda m: m.to(torch.bfloat16)):
        change(layer)
        assert torch.equal(layer.weight, rows)
        assert layer.weight.dtype == torch.uint8
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(clone.weight, rows)
        assert clone.format == layer.format
        assert isinstance(clone, QuantLinear)
    with pytest.raises(RuntimeError, match="can't require a gradient"):
        layer.requires_grad_(True)


def test_quantize_replaces_the_rows_in_place() -> None:
    layer = QuantLinear(64, 32)
    pointer = layer.weight.data_ptr()
    weight = torch.randn(32, 64)
    layer.quantize_(weight)
    assert layer.weight.data_ptr() == pointer
    assert torch.equal(layer.W_q, halfbyte.quantize(weight))
    with pytest.raises(ValueError, match=r"dense_weight must have shape \(32, 64\), got \(64, 32\)"):
        layer.quantize_(weight.t())
    with pytest.raises(TypeError, match="dense_weight must be a float32"):
        layer.quantize_(weight.double())


def test_tying_makes_the_layer_dense_again() -> None:
    head, table = QuantLinear(64, 100, bias=False), nn.Embedding(100, 64)
    head.weight = table.weight
    assert type(head) is nn.Linear
    assert head.weight is table.weight
    x = torch.randn(2, 64)
    assert torch.equal(head(x), nn.functional.linear(x, table.weight))


def test_hooks_and_flags_survive_conversion() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    kept = model[0]
    halfbyte.quantize_model(model)
    assert model[0] is kept
    assert not model[0].training
    model(torch.randn(1, 64))
    assert seen == ["QuantLinear"]


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_rows_equal_the_dequantized_table(name: str) -> None:
    table = nn.Embedding(50, 100, padding_idx=3)
    layer = QuantEmbedding.from_embedding(table, name)
    assert layer.padding_idx == 3
    ids = torch.tensor([[0, 3], [49, 7]])
    expected = halfbyte.dequantize(halfbyte.quantize(table.weight, name), name, 100, torch.float32)[ids]
    assert torch.equal(layer(ids), expected)
    assert torch.equal(layer(ids)[0, 1], torch.zeros(100))
    with pytest.raises(IndexError, match="indices must be from 0 to 49, got 50"):
        layer(torch.tensor([50]))


def test_embedding_arguments() -> None:
    with pytest.raises(ValueError, match="padding_idx must be from -5 to 4, got 5"):
        QuantEmbedding(5, 8, padding_idx=5)
    with pytest.raises(NotImplementedError, match="max_norm"):
        QuantEmbedding.from_embedding(nn.Embedding(5, 8, max_norm=1.0))
    with pytest.raises(TypeError, match="table must be a dense nn.Embedding, got Linear"):
        QuantEmbedding.from_embedding(nn.Linear(2, 2))
    torch.manual_seed(0)
    dense = nn.Embedding(20, 64, padding_idx=-1)
    torch.manual_seed(0)
    layer = QuantEmbedding(20, 64, -1, format="nf4", dtype=torch.float32)
    assert torch.equal(layer.weight, halfbyte.quantize(dense.weight))


@pytest.mark.parametrize("moved", [("weight",), ("bias",), ("weight", "bias")])
def test_forward_finds_parameters_that_a_host_keeps_as_plain_attributes(moved: tuple[str, ...]) -> None:
    # as FSDP1 does with those that it shards, each by itself
    layer, x = QuantLinear(64, 8), torch.randn(3, 64)
    expected = layer(x)
    for name in moved:
        layer.__dict__[name] = layer._parameters.pop(name).detach()
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_that_was_never_loaded_raises(grad: bool) -> None:
    with torch.device("meta"):
        layer = QuantLinear(64, 32, bias=False)
    with pytest.raises(ValueError, match="halfbyte::linear: all tensors must have data, got some on meta and some on cpu"):
        layer(torch.ones(2, 64, requires_grad=grad))
