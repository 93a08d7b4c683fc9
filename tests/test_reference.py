"""The oracle itself, against the specification's examples and reader, exact fractions, torch and bitsandbytes.

``exact_pack`` below is a second writing of the rules, element by element in Python's ``Fraction``: it shares no code
with ``halfbyte.reference`` and no arithmetic with torch.
"""

import doctest
import math
import re
import struct
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfbyte import reference
from halfbyte.formats import FORMATS, FP4_VALUES, NF4_VALUES, Format
from halfbyte.reference import (
    dequantize,
    embedding,
    linear,
    linear_backward_input,
    quantize,
    quantize_with_scales,
    unpack,
)

SPECIFICATION = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_FLOAT = Fraction(2**24 - 1) * 2**104
NAN = struct.pack("<I", 0x7FC00000)
SMALLEST_FORMATS = ("nf4:32", "fp4:32", "nf4-dq:32", "fp4-dq:32", "int8", "fp8")  # short rows then have several blocks


def test_docstring_examples():
    result = doctest.testmod(reference)
    assert result.attempted > 0
    assert result.failed == 0


# --- the specification's own examples and reader ---


def specification_reader():
    (code,) = re.findall(r"^```python\n(.*?)^```", SPECIFICATION, re.MULTILINE | re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    return namespace["read_row"]


def numbers(text: str) -> list[float]:
    values: list[float] = []
    for word in text.split():
        value, _, count = word.partition("*")
        values += [float(value)] * int(count or 1)
    return values


def examples() -> list[dict[str, str]]:
    found = re.findall(r"^```example\n(.*?)^```", SPECIFICATION, re.MULTILINE | re.DOTALL)
    return [dict(line.split(": ", 1) for line in text.splitlines()) for text in found]


def same_floats(left: list[float], right: list[float]) -> bool:
    """Equal bits, any NaN equal to any NaN."""
    return len(left) == len(right) and all(
        (math.isnan(a) and math.isnan(b)) or struct.pack("<d", a) == struct.pack("<d", b)
        for a, b in zip(left, right, strict=True)
    )


def row_bytes(packed: torch.Tensor) -> bytes:
    (row,) = packed.tolist()
    return bytes(row)


def test_specification_has_an_example_of_every_format():
    assert {Format.parse(example["format"]).name for example in examples()} == set(FORMATS)


@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example['format']} {example['input'].strip()}")
def test_examples_of_the_specification(example):
    format = Format.parse(example["format"])
    row, expected = numbers(example["input"]), numbers(example["values"])
    packed = quantize(torch.tensor([row]), format)
    assert row_bytes(packed).hex(" ") == bytes.fromhex(example["packed"]).hex(" ")
    values = dequantize(packed, format, len(row), torch.float32)[0].tolist()
    assert same_floats([float(f"{value:.6g}") for value in values], expected)
    read = specification_reader()(row_bytes(packed), format.name, format.block_size, len(row))
    assert same_floats(read, values)


# --- the rules in exact arithmetic ---


def rounded(value: Fraction, precision: int = 24, quantum: int = -149) -> Fraction:
    """Nearest number with so many significant bits and no bit below 2**quantum, ties to even; the range has no end."""
    if value == 0:
        return value
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1  # now 2**exponent <= |value| < 2**(exponent + 1)
    unit = Fraction(2) ** max(exponent - precision + 1, quantum)
    return round(value / unit) * unit  # round() of a Fraction takes ties to even


def float32_bytes(value: Fraction) -> bytes:
    assert rounded(value) == value
    assert value >= 0
    return struct.pack("<f", float(value))


def exact_normalize(x: float, absmax: Fraction, largest: int) -> Fraction:
    factor = rounded(rounded(1 / absmax) * largest)
    if rounded(1 / absmax) > LARGEST_FLOAT or factor > LARGEST_FLOAT:
        return rounded(rounded(Fraction(x) / absmax) * largest)
    return rounded(Fraction(x) * factor)


def midpoints(values: list[float]) -> list[Fraction]:
    return [(Fraction(low) + Fraction(high)) / 2 for low, high in pairwise(values)]


def exact_code(x: float, absmax: Fraction, codebook: str) -> int:
    if absmax == 0:
        return 7 if codebook == "nf4" else 0
    v = exact_normalize(x, absmax, {"int8": 127, "fp8": 448}.get(codebook, 1))
    if codebook == "nf4":
        return sum(rounded(midpoint) < v for midpoint in midpoints(list(NF4_VALUES)))
    if codebook == "fp4":  # nearest, in exact arithmetic; of two nearest ones the smaller
        magnitude = min(range(8), key=lambda code: (abs(Fraction(FP4_VALUES[code]) - abs(v)), FP4_VALUES[code]))
        return magnitude + 8 if x < 0 and magnitude else magnitude
    if codebook == "int8":
        return max(-127, min(127, round(v))) % 256
    sign = 128 if math.copysign(1, x) < 0 else 0
    magnitude = min(Fraction(448), rounded(abs(v), 4, -9))
    if magnitude < Fraction(1, 64):  # subnormals of e4m3
        return sign + int(magnitude * 512)
    exponent = math.floor(math.log2(magnitude))
    return sign + (exponent + 7) * 8 + int(magnitude / Fraction(2) ** exponent * 8) - 8


def exact_pack(row: list[float], format: Format, scales: list[float] | None = None) -> bytes:
    K, block_size, zero = len(row), format.block_size or len(row), 7 if format.codebook == "nf4" else 0
    blocks = [row[start : start + block_size] for start in range(0, K, block_size)]
    given = scales or [0.0] * len(blocks)
    valid = [
        all(map(math.isfinite, block)) and math.isfinite(scale) and scale >= 0
        for block, scale in zip(blocks, given, strict=True)
    ]
    if format.scales == "dq" and not all(valid):
        valid = [False] * len(blocks)
    absmax = [
        Fraction(0) if not good else Fraction(scale) if scales else max(abs(Fraction(x)) for x in block)
        for block, scale, good in zip(blocks, given, valid, strict=True)
    ]
    codes = [
        exact_code(x, s, format.codebook) if good else zero
        for b, s, good in zip(blocks, absmax, valid, strict=True)
        for x in b
    ]
    if format.bits == 4:
        codes += [zero] * (K % 2)
        packed = bytes(high * 16 + low for high, low in zip(codes[::2], codes[1::2], strict=True))
    else:
        packed = bytes(codes)
    if format.scales == "dq":
        low = min(absmax)
        step = rounded(rounded(max(absmax) - low) / 255)
        packed += bytes(min(255, round(rounded(rounded(s - low) / step))) if step else 0 for s in absmax)
        packed += bytes(-len(packed) % 4)
        packed += float32_bytes(step) + float32_bytes(low) if all(valid) else NAN + NAN
    else:
        packed += bytes(-len(packed) % 4)
        packed += b"".join(float32_bytes(s) if good else NAN for s, good in zip(absmax, valid, strict=True))
    return packed + bytes(-len(packed) % 16)


FLOATS = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-(2.0**-120), 2.0**-120, width=32),  # around where reciprocals overflow, and subnormals
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0**-149, 2.0**-128, -(2.0**127), 3.4028234663852886e38]),
)
HOSTILE = st.one_of(FLOATS, st.sampled_from([math.nan, math.inf, -math.inf]))
ROWS = st.one_of(
    st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=70),
    st.lists(FLOATS, min_size=1, max_size=70),
    st.lists(st.floats(-(2.0**-120), 2.0**-120, width=32), min_size=1, max_size=70),
    st.lists(HOSTILE, min_size=1, max_size=70),
)


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


# --- decoding ---


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


# --- properties ---


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", ["nf4:32", "fp4:32"])
@settings(max_examples=100, deadline=None)
@given(row=ROWS, dtype=st.sampled_from(DTYPES))
def test_plain_4_bit_formats_are_idempotent(name, row, dtype):
    input = torch.tensor([row], dtype=dtype)
    packed = quantize(input, name)
    _, scales = unpack(packed, name, len(row))
    # a product with a subnormal scale loses bits and may then be another code
    assume(bool(((scales >= 2.0**-126) | (scales == 0) | scales.isnan()).all()))
    assert torch.equal(quantize(dequantize(packed, name, len(row), torch.float32), name), packed)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), K=st.integers(1, 300), exponent=st.integers(-90, 90))
def test_a_power_of_two_moves_scales_and_leaves_codes(name, seed, K, exponent):
    input = gaussian(2, K, seed=seed).clamp(-8, 8)
    assume(float(input.abs().amin(dim=1).min()) > 2.0**-30)  # with it, no step of -dq gets near the subnormals
    codes, scales = unpack(quantize(input, name), name, K)
    moved_codes, moved_scales = unpack(quantize(input * 2.0**exponent, name), name, K)
    assert torch.equal(codes, moved_codes)
    assert torch.equal(scales * 2.0**exponent, moved_scales)


@pytest.mark.parametrize("name", SMALLEST_FORMATS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), N=st.integers(0, 9), K=st.integers(1, 100), cut=st.integers(0, 9))
def test_shard_then_quantize_is_quantize_then_shard(name, seed, N, K, cut):
    input = gaussian(N, K, seed=seed)
    if N:
        input[N // 2, K // 2] = math.nan  # must stay in its row
    whole = quantize(input, name)
    assert whole.shape == (N, Format.parse(name).row_bytes(K))
    assert torch.equal(torch.cat((quantize(input[:cut], name), quantize(input[cut:], name))), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_and_strides_do_not_matter(name):
    input = gaussian(3, 4, 65)
    packed = quantize(input, name)
    assert packed.shape == (3, 4, Format.parse(name).row_bytes(65))
    assert torch.equal(packed.flatten(0, 1), quantize(input.flatten(0, 1), name))
    assert torch.equal(quantize(input.transpose(0, 1), name), packed.transpose(0, 1))
    values = dequantize(packed, name, 65, torch.float32)
    assert torch.equal(dequantize(packed.transpose(0, 1), name, 65, torch.float32), values.transpose(0, 1))
    _, scales = unpack(packed, name, 65)
    if not name.endswith("-dq"):
        assert torch.equal(quantize_with_scales(input, scales, name), packed)


@pytest.mark.parametrize("K", [1, 63, 65, 100, 576, 4304])
@pytest.mark.parametrize("name", FORMATS)
def test_error_is_within_half_a_gap(name, K):
    format = Format.parse(name)
    input = gaussian(5, K, seed=K)
    packed = quantize(input, name)
    error = (dequantize(packed, name, K, torch.float32).double() - input.double()).abs()
    block_size = format.block_size or K
    absmax = torch.stack([part.abs().amax(dim=1) for part in input.double().split(block_size, dim=1)], dim=1)
    absmax = absmax.repeat_interleave(block_size, dim=1)[:, :K]
    # half of the widest gap: nf4 -1..-0.696, fp4 2/3..1, int8 1/127, fp8 2**-4 of the element or half a subnormal
    half = {"nf4": 0.152, "fp4": 1 / 6, "int8": 0.5 / 127, "fp8": 0.0}[format.codebook]
    bound = absmax * half + (torch.maximum(input.double().abs() / 16, absmax / 448 * 2.0**-10) if name == "fp8" else 0)
    if format.scales == "dq":  # a scale is off by half a step, at most (largest - smallest) / 510
        bound = bound + (absmax.amax(dim=1, keepdim=True) - absmax.amin(dim=1, keepdim=True)) / 510
    assert bool((error <= bound * (1 + 1e-5)).all())
    assert bool((error.amax() > bound.amax() / 100) | (K == 1))  # and the bound says something


def test_given_scales_saturate_and_zero_scales_erase():
    input = torch.tensor([[1000.0, -1000.0, 0.5]])
    for name in ("nf4", "fp4", "int8", "fp8"):
        values = dequantize(quantize_with_scales(input, torch.ones(1, 1), name), name, 3, torch.float32)
        assert values[0, :2].tolist() == [1.0, -1.0], name
        for zero in (0.0, -0.0):
            packed = quantize_with_scales(input, torch.tensor([[zero]]), name)
            assert torch.equal(packed, quantize(torch.zeros(1, 3), name)), name
    # codes are normalized by the given scale, not by the decoded one
    scales = torch.tensor([[1.0, 0.9971, 0.5]])
    input = gaussian(1, 96, seed=3)
    codes, decoded = unpack(quantize_with_scales(input, scales, "nf4-dq:32"), "nf4-dq:32", 96)
    plain, _ = unpack(quantize_with_scales(input, scales, "nf4:32"), "nf4:32", 96)
    assert torch.equal(codes, plain)
    assert decoded[0, 1] != scales[0, 1]
    assert (decoded - scales).abs().max() <= 0.5 / 510 * (1 + 1e-5)


# --- bitsandbytes ---


@pytest.fixture(scope="module")
def bitsandbytes():
    return pytest.importorskip("bitsandbytes.functional")


def bitsandbytes_codes(packed: torch.Tensor) -> torch.Tensor:
    flat = packed.flatten()
    return torch.stack((flat >> 4, flat & 15), dim=1).flatten()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("codebook", ["nf4", "fp4"])
def test_4_bit_is_that_of_bitsandbytes(bitsandbytes, codebook, block_size, dtype):
    """nf4 byte for byte; fp4 in values (it writes -0.0, we don't), except at its fp32-rounded midpoints."""
    N, K = 6, 8192
    input = gaussian(N, K, seed=block_size, dtype=dtype)
    input[1, :block_size] = 0  # an all-zero block
    theirs, state = bitsandbytes.quantize_4bit(input, blocksize=block_size, quant_type=codebook)
    format = Format(codebook, block_size)
    codes, scales = unpack(quantize(input, format), format, K)
    assert torch.equal(scales.flatten(), state.absmax)
    if codebook == "nf4":
        assert torch.equal(quantize(input, format)[:, : K // 2].flatten(), theirs.flatten())
    else:
        values = torch.tensor(FP4_VALUES)
        differ = values[bitsandbytes_codes(theirs).int()] != values[codes.flatten().int()]
        v = (input.float().view(-1, block_size) * (1 / scales.view(-1, 1))).flatten().abs()
        middle = torch.tensor([float(midpoint) for midpoint in midpoints(sorted(FP4_VALUES[:8]))])  # rounds to fp32
        assert not bool((differ & ~torch.isin(v, middle)).any())
        assert int(differ.sum()) < N * K / 1000
    for to in DTYPES if block_size < 2048 else ():  # beyond that it takes a torch.compile of seconds
        state.dtype = to
        assert torch.equal(
            bitsandbytes.dequantize_4bit(quantize(input, format)[:, : K // 2].reshape(-1, 1), state),
            dequantize(quantize(input, format), format, K, to),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_that_of_bitsandbytes(bitsandbytes, dtype):
    input = gaussian(32, 1000, seed=5, dtype=dtype)
    input[:, ::7] = 0
    theirs, absmax, _ = bitsandbytes.int8_vectorwise_quant(input)
    codes, scales = unpack(quantize(input, "int8"), "int8", 1000)
    assert torch.equal(codes.view(torch.int8), theirs)
    assert torch.equal(scales.flatten(), absmax)


# --- linear, linear_backward_input, embedding ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALLEST_FORMATS)
def test_linear_and_its_gradient_in_exact_arithmetic(name, dtype):
    N, K = 5, 65
    packed = quantize(gaussian(N, K), name)
    input, bias = gaussian(2, 3, K, seed=1, dtype=dtype), gaussian(N, seed=2, dtype=dtype)
    grad = gaussian(2, 3, N, seed=3, dtype=dtype)
    for weight_dtype in (None, torch.float32):
        weight = dequantize(packed, name, K, weight_dtype or dtype).double().tolist()
        output = linear(input, packed, bias, name, K, weight_dtype=weight_dtype)
        grad_input = linear_backward_input(grad, packed, name, K, weight_dtype=weight_dtype)
        assert output.dtype == grad_input.dtype == torch.float64
        assert output.shape == (2, 3, N)
        assert grad_input.shape == (2, 3, K)
        for m, row in enumerate(input.double().view(-1, K).tolist()):
            for n in range(N):
                terms = [Fraction(a) * Fraction(b) for a, b in zip(row, weight[n], strict=True)] + [
                    Fraction(bias[n].item())
                ]
                bound = (K + 1) * Fraction(1, 2**53) * sum(map(abs, terms))
                assert abs(Fraction(output.view(-1, N)[m, n].item()) - sum(terms)) <= bound
        for m, row in enumerate(grad.double().view(-1, N).tolist()):
            for k in range(K):
                terms = [Fraction(a) * Fraction(b[k]) for a, b in zip(row, weight, strict=True)]
                bound = N * Fraction(1, 2**53) * sum(map(abs, terms))
                assert abs(Fraction(grad_input.view(-1, K)[m, k].item()) - sum(terms)) <= bound
    without = linear(input, packed, None, name, K)
    assert torch.equal(without + bias.double(), linear(input, packed, bias, name, K))


def test_linear_backward_input_is_the_gradient_of_linear():
    packed = quantize(gaussian(7, 100), "nf4")
    input = gaussian(3, 100, seed=1).requires_grad_()
    grad = gaussian(3, 7, seed=2)
    linear(input, packed, None, "nf4", 100).backward(grad.double())
    torch.testing.assert_close(input.grad, linear_backward_input(grad, packed, "nf4", 100).float())


@pytest.mark.parametrize("name", FORMATS)
def test_empty_sizes(name):
    row = Format.parse(name).row_bytes(65)
    empty = quantize(torch.empty(0, 65), name)
    assert empty.shape == (0, row)
    assert dequantize(empty, name, 65).shape == (0, 65)
    assert linear(torch.ones(2, 65), empty, None, name, 65).shape == (2, 0)
    assert torch.equal(linear_backward_input(torch.empty(2, 0), empty, name, 65), torch.zeros(2, 65).double())
    packed = quantize(torch.ones(3, 65), name)
    assert linear(torch.empty(0, 65), packed, None, name, 65).shape == (0, 3)
    assert linear_backward_input(torch.empty(0, 3), packed, name, 65).shape == (0, 65)
    assert embedding(torch.empty(0, dtype=torch.int64), packed, name, 65).shape == (0, 65)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_embedding_gathers_rows(name, index_dtype):
    packed = quantize(gaussian(9, 65), name)
    dense = dequantize(packed, name, 65, torch.float16)
    indices = torch.tensor([[0, 8, 3], [3, 3, 1]], dtype=index_dtype)
    rows = embedding(indices, packed, name, 65, torch.float16)
    assert rows.dtype == torch.float16
    assert torch.equal(rows, dense[indices.long()])
    assert torch.equal(embedding(indices[1, 2], packed, name, 65, torch.float16), dense[1])


# --- errors ---

PACKED = quantize(torch.ones(2, 65), "nf4")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(torch.ones(2, 3).int(), "nf4"), TypeError, "reference.quantize: input must be fp32.*int32"),
        (lambda: quantize(torch.ones(3), "nf4"), ValueError, "reference.quantize: input must have at least 2.*got 1"),
        (lambda: quantize(torch.ones(2, 0), "nf4"), ValueError, "in_features must be at least 1; got 0"),
        (lambda: quantize(torch.ones(2, 3), "nf5"), ValueError, "got 'nf5'"),
        (
            lambda: quantize_with_scales(torch.ones(2, 65), torch.ones(2, 1), "nf4"),
            ValueError,
            r"reference.quantize_with_scales: scales must have shape \(2, 2\); got \(2, 1\)",
        ),
        (
            lambda: quantize_with_scales(torch.ones(2, 65), torch.ones(2, 2).double(), "nf4"),
            TypeError,
            "reference.quantize_with_scales: scales must be fp32; got torch.float64",
        ),
        (
            lambda: dequantize(PACKED, "nf4", 129),
            ValueError,
            "packed must have 80 bytes per row for nf4 with in_features=129; got 48",
        ),
        (lambda: dequantize(PACKED.int(), "nf4", 65), TypeError, "packed must be uint8; got torch.int32"),
        (lambda: dequantize(PACKED, "nf4", 65, torch.float64), TypeError, "dequantize: dtype must be fp32.*float64"),
        (
            lambda: linear(torch.ones(2, 64), PACKED, None, "nf4", 65),
            ValueError,
            "reference.linear: input must have in_features=65 columns; got 64",
        ),
        (lambda: linear(torch.ones(2, 65), PACKED[0], None, "nf4", 65), ValueError, "packed must have 2 dim.*got 1"),
        (
            lambda: linear_backward_input(torch.ones(2, 3), PACKED, "nf4", 65),
            ValueError,
            "grad_output must have 2 columns, one per row of packed; got 3",
        ),
        (lambda: embedding(torch.tensor([0, 2]), PACKED, "nf4", 65), IndexError, r"indices must be in \[0, 2\); got 2"),
        (lambda: embedding(torch.tensor([-1]), PACKED, "nf4", 65), IndexError, r"indices must be in \[0, 2\); got -1"),
        (
            lambda: embedding(torch.ones(1), PACKED, "nf4", 65),
            TypeError,
            "indices must be int32 or int64; got .*float32",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
