"""The oracle's dequantize against the specification's reader and exact arithmetic."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from exact import DTYPES, LARGEST_FLOAT, SMALLEST_FORMATS, rounded, same_floats, specification_reader
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfbyte.formats import FORMATS, Format
from halfbyte.reference import dequantize, quantize


@pytest.mark.parametrize("name", SMALLEST_FORMATS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_dequantize_agrees_with_the_reader_of_the_specification(name, data):
    """Any codes, also those no writer writes, with any non-negative scale, NaN included."""
    format = Format.parse(name)
    K = data.draw(st.integers(1, 70))
    row = bytearray(format.row_bytes(K))
    row[: format.code_bytes(K)] = data.draw(st.binary(min_size=format.code_bytes(K), max_size=format.code_bytes(K)))
    scale = st.one_of(st.floats(0, 2.0**127, width=32), st.floats(0, 2.0**-120, width=32), st.sampled_from([math.nan]))
    if format.scales == "dq":
        begin, size = format.scales_offset(K), format.num_blocks(K)
        row[begin : begin + size] = data.draw(st.binary(min_size=size, max_size=size))
        step, low = data.draw(st.floats(0, 2.0**110, width=32)), data.draw(scale)
        struct.pack_into("<2f", row, format.row_scales_offset(K), step, low)
    else:
        for block in range(format.num_blocks(K)):
            struct.pack_into("<f", row, format.scales_offset(K) + 4 * block, data.draw(scale))
    packed = torch.tensor([list(row)], dtype=torch.uint8)
    expected = specification_reader()(bytes(row), format.name, format.block_size, K)
    assert same_floats(dequantize(packed, format, K, torch.float32)[0].tolist(), expected)


def dq_row(u: int, step: float, low: float) -> torch.Tensor:
    """A row of one element, code 15 (the value 1.0), whose decoded scale is fma(u, step, low)."""
    return torch.tensor([list(struct.pack("<BBxxff4x", 0xF7, u, step, low))], dtype=torch.uint8)


def test_dq_scale_is_rounded_once():
    """1 + 205 * step lies 2**-54 above a tie: fp64 loses that and would then round to even, down to 1."""
    step = 10475530 * 2.0**-55
    exact = 1 + 205 * Fraction(step)
    assert exact == 1 + Fraction(1, 2**24) + Fraction(1, 2**54)
    assert torch.tensor(205 * step + 1.0, dtype=torch.float64).float().item() == 1.0  # the mistake
    value = dequantize(dq_row(205, step, 1.0), "nf4-dq", 1, torch.float32)
    assert value.item() == float(rounded(exact)) == 1 + 2.0**-23


@settings(max_examples=300, deadline=None)
@given(
    u=st.integers(0, 255),
    step=st.one_of(st.floats(0, 2.0**100, width=32), st.floats(0, 2.0**-24, width=32)),
    low=st.one_of(st.floats(0, 2.0**120, width=32), st.integers(0, 2**23 - 1).map(lambda m: 1 + m * 2.0**-23)),
)
def test_dq_scale_is_a_fused_multiply_add(u, step, low):
    exact = rounded(u * Fraction(step) + Fraction(low))
    assume(exact <= LARGEST_FLOAT)
    assert dequantize(dq_row(u, step, low), "nf4-dq", 1, torch.float32).item() == float(exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_rounds_the_fp32_value_once(name, dtype):
    input = torch.randn(4, 333, generator=torch.Generator().manual_seed(1)) * torch.logspace(-8, 4, 4).unsqueeze(1)
    packed = quantize(input, name)
    values = dequantize(packed, name, 333, torch.float32).flatten().tolist()
    precision, quantum = {torch.float32: (24, -149), torch.bfloat16: (8, -133), torch.float16: (11, -24)}[dtype]
    expected = [float(rounded(Fraction(value), precision, quantum)) for value in values]
    limit = torch.finfo(dtype).max
    assert dequantize(packed, name, 333, dtype).double().flatten().tolist() == [
        value if abs(value) <= limit else math.copysign(math.inf, value) for value in expected
    ]


def test_int8_of_the_largest_float_overflows_as_ieee_says():
    packed = quantize(torch.tensor([[3.4028234663852886e38, 1e38]]), "int8")
    values = dequantize(packed, "int8", 2, torch.float32)
    assert values[0, 0] == math.inf
    assert values[0, 1].isfinite()
