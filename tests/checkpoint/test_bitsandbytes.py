"""One layer at a time, against what bitsandbytes itself quantizes, stores and decodes."""

import json

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.checkpoint.bitsandbytes import KEYS, export_state_dict, read_layer, write_layer

functional = pytest.importorskip("bitsandbytes.functional")
STATE = "up.weight.quant_state.bitsandbytes__"


def stored_4bit(weight, codebook, block_size=64, nested=False, storage=torch.uint8):
    """What bitsandbytes stores for `weight`, and what it decodes it to."""
    codes, state = functional.quantize_4bit(
        weight, blocksize=block_size, quant_type=codebook, compress_statistics=nested, quant_storage=storage
    )
    tensors = {"up.weight": codes, **{f"up.weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
    shape, state.shape = state.shape, torch.Size((1, weight.numel()))  # see tests/peft_bridge/test_bitsandbytes.py
    return tensors, functional.dequantize_4bit(codes, state).view(shape)


@pytest.mark.parametrize("codebook", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_4bit_values_are_theirs(codebook, nested, storage, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(24, 256) * torch.rand(24, 1)).to(dtype)
    weight[0, :64] = 0
    tensors, expected = stored_4bit(weight, codebook, nested=nested, storage=storage)
    stored = read_layer(tensors, "up", (24, 256))
    assert (str(stored.format), stored.dtype, stored.reason) == (codebook, dtype, None)
    assert torch.equal(halfbyte.dequantize(stored.weight, codebook, 256, dtype), expected)
    if not nested:
        written = write_layer(stored.weight, codebook, 256, "up", dtype=dtype, quant_storage=storage)
        assert written.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert (written[key].dtype, written[key].shape) == (tensor.dtype, tensor.shape), key
            assert torch.equal(written[key].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), key


def test_the_code_that_only_they_write():
    tensors, _ = stored_4bit(torch.ones(1, 64), "fp4")
    tensors["up.weight"][:16] = 0x80  # code 8: +0.0 in their table, -0.0 in ours
    stats = {key.removeprefix("up.weight."): tensor for key, tensor in tensors.items() if key != "up.weight"}
    state = functional.QuantState.from_dict(stats, torch.device("cpu"))
    stored = read_layer(tensors, "up", (1, 64))
    found = halfbyte.dequantize(stored.weight, "fp4", 64, torch.float32)
    assert torch.equal(found, functional.dequantize_4bit(tensors["up.weight"], state))
    assert torch.equal(write_layer(stored.weight, "fp4", 64, "up", dtype=torch.float32)["up.weight"], tensors["up.weight"])


@pytest.mark.parametrize("block_size", [32, 128, 4096])
def test_other_block_sizes(block_size):
    weight = torch.randn(3, 4096)
    tensors, expected = stored_4bit(weight, "nf4", block_size)
    stored = read_layer(tensors, "up", (3, 4096))
    assert str(stored.format) == f"nf4:{block_size}"
    assert torch.equal(halfbyte.dequantize(stored.weight, stored.format, 4096, torch.float32), expected)


@pytest.mark.parametrize("columns", [96, 33, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_that_cross_rows_come_back_dense(columns, nested):
    weight = torch.randn(7, columns)
    tensors, expected = stored_4bit(weight, "nf4", nested=nested)
    stored = read_layer(tensors, "up", (7, columns))
    assert stored.format is None and stored.reason == f"its bitsandbytes blocks of 64 cross rows of {columns}"
    assert stored.weight.dtype == torch.float32 and torch.equal(stored.weight, expected)


@pytest.mark.parametrize("columns", [64, 33])
def test_8bit_codes_and_scales_are_carried_over(columns):
    codes = torch.randint(-127, 128, (5, columns), dtype=torch.int8)
    tensors = {"up.weight": codes, "up.SCB": torch.rand(5), "up.weight_format": torch.tensor(0, dtype=torch.uint8)}
    stored = read_layer(tensors, "up", (5, columns))
    assert str(stored.format) == "int8" and stored.dtype is None
    expected = codes.float() * (tensors["up.SCB"] / 127)[:, None]
    assert torch.equal(halfbyte.dequantize(stored.weight, "int8", columns, torch.float32), expected)
    written = write_layer(stored.weight, "int8", columns, "up", dtype=torch.bfloat16)
    assert written.keys() == tensors.keys()
    assert all(written[key].dtype == value.dtype and torch.equal(written[key], value) for key, value in tensors.items())


def test_a_dense_layer_is_none_of_ours():
    assert read_layer({"up.weight": torch.randn(4, 8)}, "up", (4, 8)) is None


def edited(tensors, **fields):
    key = next(key for key in tensors if key.startswith(STATE))
    state = {**json.loads(bytes(tensors[key].tolist())), **fields}
    return {**tensors, key: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


DAMAGES = {
    "codes too short": (lambda t: t | {"up.weight": t["up.weight"][1:]}, r"up\.weight must hold 256 bytes .* got 255"),
    "scales too short": (
        lambda t: t | {"up.weight.absmax": t["up.weight.absmax"][1:]},
        r"up\.weight\.absmax must hold 8 elements of torch.uint8, got shape \(7,\)",
    ),
    "scales of another dtype": (
        lambda t: t | {"up.weight.absmax": t["up.weight.absmax"].half()},
        r"up\.weight\.absmax must hold 8 elements of torch.uint8, got .* torch.float16",
    ),
    "another table": (
        lambda t: t | {"up.weight.quant_map": t["up.weight.quant_map"].flip(0)},
        r"up\.weight\.quant_map is not the table of nf4",
    ),
    "two states": (lambda t: t | {f"{STATE}fp4": t[f"{STATE}nf4"]}, "bitsandbytes__nf4 contradicts up.*__fp4"),
    "4 and 8 bits": (lambda t: t | {"up.SCB": torch.ones(4)}, r"belongs to a 4-bit weight, but up\.SCB to an 8-bit"),
    "no JSON": (lambda t: t | {f"{STATE}nf4": torch.ones(5, dtype=torch.uint8)}, "bitsandbytes__nf4 is not JSON"),
    "no object": (lambda t: t | {f"{STATE}nf4": torch.tensor([0x31], dtype=torch.uint8)}, "must hold a JSON object, got 1"),
    "another shape": (lambda t: edited(t, shape=[128, 4]), r"must have shape = \[4, 128\], .* got \[128, 4\]"),
    "another type": (lambda t: edited(t, quant_type="fp4"), "must have quant_type = 'nf4'; got 'fp4'"),
    "another dtype": (lambda t: edited(t, dtype="int8"), "must have dtype = one of float32, .* got 'int8'"),
    "no block size": (lambda t: edited(t, blocksize=None), "must have blocksize = a positive integer; got None"),
    "no offset": (lambda t: edited(t, nested_offset=None), "must have a number nested_offset .* got None"),
    "no nested block": (lambda t: edited(t, nested_blocksize=0), "must have a number nested_blocksize .* got 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_contradicts_itself_is_named(damage):
    tensors, _ = stored_4bit(torch.randn(4, 128), "nf4", nested=True)
    change, message = DAMAGES[damage]
    with pytest.raises(halfbyte.QuantizationError, match=message) as caught:
        read_layer(change(tensors), "up", (4, 128))
    assert caught.value.names == ("up",)


@pytest.mark.parametrize("nested", [False, True])
def test_every_key_is_needed(nested):
    tensors, _ = stored_4bit(torch.randn(4, 128), "fp4", nested=nested)
    assert set(tensors) < {f"up.{key}" for key in KEYS}
    for key in tensors:
        with pytest.raises(halfbyte.QuantizationError, match=f"{key.replace('fp4', '')}.*missing"):
            read_layer({other: tensor for other, tensor in tensors.items() if other != key}, "up", (4, 128))


def test_8bit_layouts_of_old_files_are_refused():
    tensors = {"up.weight": torch.zeros(2, 4, dtype=torch.int8), "up.SCB": torch.ones(2)}
    with pytest.raises(halfbyte.QuantizationError, match=r"up\.weight_format is missing"):
        read_layer(tensors, "up", (2, 4))
    with pytest.raises(halfbyte.QuantizationError, match=r"up\.weight_format must be 0 \(row-major\), got 2"):
        read_layer(tensors | {"up.weight_format": torch.tensor(2, dtype=torch.uint8)}, "up", (2, 4))
    with pytest.raises(halfbyte.QuantizationError, match=r"up\.weight must be int8 of shape \(4, 2\)"):
        read_layer(tensors, "up", (4, 2))


def test_export_of_a_model():
    model = nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 8)).bfloat16()
    halfbyte.quantize_model(model, "nf4")
    state = export_state_dict(model)
    assert torch.equal(state["1.weight"], model[1].weight) and torch.equal(state["0.bias"], model[0].bias)
    stored = read_layer(state, "2", (8, 64))
    assert torch.equal(stored.weight, model[2].weight) and stored.dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="0 is a QuantEmbedding"):
        export_state_dict(nn.Sequential(halfbyte.nn.QuantEmbedding(4, 64)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": "nf4-dq"}, NotImplementedError, "up is nf4-dq, bitsandbytes checkpoints hold nf4, fp4 and int8"),
        ({"in_features": 65}, NotImplementedError, "up has 65 columns, no multiple of 64"),
        ({"in_features": 128}, ValueError, "packed must be uint8 of 80 bytes per row for nf4, got .* shape \\(1, 48\\)"),
        ({"dtype": torch.int8}, ValueError, "dtype must be one of float32, bfloat16, float16, got torch.int8"),
    ],
)
def test_what_cannot_be_written(arguments, error, message):
    packed = halfbyte.quantize(torch.ones(1, 64), "nf4")
    given = {"format": "nf4", "in_features": 64, "dtype": torch.float32, **arguments}
    with pytest.raises(error, match=message):
        write_layer(packed, name="up", **given)
