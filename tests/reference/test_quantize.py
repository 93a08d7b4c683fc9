"""The oracle's quantize against exact arithmetic, and fp8 against torch's casts."""

from fractions import Fraction

import pytest
import torch
from exact import (
    DTYPES,
    FLOATS,
    HOSTILE,
    ROWS,
    SMALLEST_FORMATS,
    exact_code,
    exact_normalize,
    exact_pack,
    gaussian,
    midpoints,
    rounded,
    row_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats import FP4_VALUES, NF4_VALUES, Format
from halfbyte.reference import quantize, quantize_with_scales, unpack


@pytest.mark.parametrize("name", SMALLEST_FORMATS)
@settings(max_examples=120, deadline=None)
@given(row=ROWS, dtype=st.sampled_from(DTYPES))
def test_quantize_follows_the_rules_exactly(name, row, dtype):
    input = torch.tensor([row], dtype=dtype)  # rounds the row to the dtype, also to infinity
    expected = exact_pack(input.float()[0].tolist(), Format.parse(name))
    assert row_bytes(quantize(input, name)) == expected


@pytest.mark.parametrize("name", SMALLEST_FORMATS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_quantize_with_scales_follows_the_rules_exactly(name, data):
    format = Format.parse(name)
    row = data.draw(ROWS)
    count = format.num_blocks(len(row))
    positive = st.one_of(st.floats(0, 8, width=32), FLOATS.map(abs))
    scale = data.draw(st.sampled_from([positive, positive, HOSTILE]))
    scales = data.draw(st.lists(scale, min_size=count, max_size=count))
    packed = quantize_with_scales(torch.tensor([row]), torch.tensor([scales]), name)
    assert row_bytes(packed) == exact_pack(row, format, scales)


@pytest.mark.parametrize("codebook", ["nf4", "fp4"])
def test_thresholds_hit_exactly(codebook):
    """Every fp32 midpoint and both its neighbours, of both signs: absmax 1 normalizes by exactly 1."""
    values = sorted(set({"nf4": NF4_VALUES, "fp4": FP4_VALUES}[codebook]))
    row = [1.0]
    for midpoint in midpoints(values):
        middle = torch.tensor(float(midpoint))
        row += [v.item() for end in (-9, 9) for v in (middle, torch.nextafter(middle, torch.tensor(float(end))))]
    codes, _ = unpack(quantize(torch.tensor([row]), f"{codebook}:128"), f"{codebook}:128", len(row))
    assert codes[0].tolist() == [exact_code(x, Fraction(1), codebook) for x in row]


def test_fp8_every_value_and_every_midpoint():
    """All finite e4m3 numbers, the midpoints between them and their fp32 neighbours."""
    finite = [i for i in range(256) if i & 127 != 127]
    values = sorted(torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist())
    row = torch.tensor(values + [float(m) for m in midpoints(values)])
    up, down = (torch.nextafter(row, torch.full_like(row, end)).clamp(-448, 448) for end in (-999, 999))
    row = torch.cat((row, up, down))
    codes, scales = unpack(quantize(row.unsqueeze(0), "fp8"), "fp8", len(row))
    assert scales.tolist() == [[448.0]]
    assert codes[0].tolist() == [exact_code(x, Fraction(448), "fp8") for x in row.tolist()]
    # (1 / 448) * 448 rounds to exactly 1, so nothing above tested the normalization instead of the rounding
    assert rounded(rounded(Fraction(1, 448)) * 448) == 1
    assert torch.equal(codes[0], row.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("fp8", 448)])
def test_the_factor_of_row_formats_is_rounded_twice(name, largest):
    """Elements at ties of the code, where (1 / absmax) * largest and largest / absmax decide differently."""
    ties = [k + 0.5 for k in range(127)] if name == "int8" else [1.0625 * 2.0**k for k in range(-5, 9)]
    decisive = 0
    for absmax in (gaussian(24, seed=11).abs() + 0.5).tolist():
        centers = torch.tensor([tie * absmax / largest for tie in ties])
        near = [torch.nextafter(centers, torch.full_like(centers, end)) for end in (-9, 9)]
        row = [absmax, *torch.cat([centers, *near]).tolist()]
        assert row_bytes(quantize(torch.tensor([row]), name)) == exact_pack(row, Format.parse(name))
        once = rounded(largest / Fraction(absmax))
        code = round if name == "int8" else lambda v: rounded(v, 4, -9)
        decisive += sum(
            code(rounded(Fraction(x) * once)) != code(exact_normalize(x, Fraction(absmax), largest)) for x in row
        )
    assert decisive > 20  # so many codes would be others


def test_fp8_codes_are_torch_casts():
    input = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    codes, scales = unpack(quantize(input, "fp8"), "fp8", 300)
    cast = (input * ((1 / scales) * 448)).to(torch.float8_e4m3fn)
    assert torch.equal(codes, cast.view(torch.uint8))
