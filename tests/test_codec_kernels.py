"""quantize, dequantize and embedding on the CPU: byte for byte the reference, under every instruction set.

`test_everything_here_under_another_isa` runs the rest of this file once per instruction set the machine has.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte import reference
from halfbyte._library import cpu_isa
from halfbyte.formats import FORMATS, FP4_THRESHOLDS, NF4_THRESHOLDS, Format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 31, 63, 64, 65, 100, 576, 960, 4304, 4097)
SMALL_BLOCKS = ("nf4:32", "fp4:32", "nf4-dq:32", "fp4-dq:32")
LARGE_BLOCKS = ("nf4:4096", "fp4:256", "nf4-dq:128", "fp4-dq:512")
ALL_FORMATS = (*FORMATS, *SMALL_BLOCKS, *LARGE_BLOCKS)

ops = torch.ops.halfbyte


# The reference is thousands of small operations: eight times slower on two threads of a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")


def quantize(x: Tensor, format: str, scales: Tensor | None = None) -> Tensor:
    f = Format.parse(format)
    if scales is None:
        return ops.quantize(x, f.id, f.block_size)
    return ops.quantize_with_scales(x, scales, f.id, f.block_size)


def dequantize(packed: Tensor, format: str, K: int, dtype: torch.dtype) -> Tensor:
    f = Format.parse(format)
    return ops.dequantize(packed, f.id, f.block_size, K, dtype)


def hard_rows(K: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(R, K) with every kind of block the rules speak of, in the first, a middle and the last block of a row."""
    generator = torch.Generator().manual_seed(seed + K)
    x = torch.randn(24, K, generator=generator)
    x[1] *= 1e-3
    x[2] *= 1e30 if dtype != torch.float16 else 1e4
    x[3] *= 1e-38  # subnormal elements; 1 / absmax is finite, or not
    x[4] *= 1e-41
    x[5] = 0
    x[6] = -0.0
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 3e38, -1e-45, -0.0, 1e-39, 2.0**-127), start=7):
        for column in (0, K // 2, K - 1):
            x[row + (8 if column == K // 2 else 0), column] = value
    x[15, : K // 2] = 0  # zero blocks beside others
    x[23] = 2.0 ** torch.randint(-126, 127, (K,), generator=generator)
    return x.to(dtype)


def near_thresholds(format: str, rows: int = 8, K: int = 4096, spread: float = 0.0) -> Tensor:
    """(rows, K) fp32 a few ulps (or `spread` of absmax) around every decision, times an absmax that is in every block."""
    generator = torch.Generator().manual_seed(0)
    f = Format.parse(format)
    if f.bits == 4:
        edges = torch.tensor(NF4_THRESHOLDS if f.codebook == "nf4" else FP4_THRESHOLDS)
        block = f.block_size
    else:
        largest = 127.0 if f.codebook == "int8" else 448.0
        steps = torch.arange(256, dtype=torch.uint8)
        values = steps.view(torch.int8).float() if f.codebook == "int8" else steps.view(torch.float8_e4m3fn).float()
        values = values[values.isfinite() & (values.abs() <= largest)].unique()  # sorted, one zero
        edges = (values[1:] + values[:-1]) / 2 / largest
        block = K
    pick = torch.randint(0, len(edges), (rows, K // block, block), generator=generator)
    absmax = torch.rand(rows, K // block, 1, generator=generator) * 3 + 0.1
    sign = torch.randint(0, 2, pick.shape, generator=generator) * 2.0 - 1 if f.codebook == "fp4" else 1.0
    x = edges[pick] * absmax * sign
    x.view(torch.int32).add_(torch.randint(-3, 4, x.shape, generator=generator, dtype=torch.int32))
    x += (torch.rand(x.shape, generator=generator) * 2 - 1) * spread * absmax
    x[..., 0] = absmax[..., 0]
    return x.reshape(rows, K)


def assert_same_floats(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, but for NaN, of which there are many."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = torch.int32 if actual.dtype == torch.float32 else torch.int16
    same = (actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())
    assert bool(same.all()), f"{int((~same).sum())} elements differ, first at {(~same).nonzero()[0].tolist()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ALL_FORMATS)
def test_quantize(format: str, dtype: torch.dtype) -> None:
    for K in WIDTHS:
        x = hard_rows(K, dtype)
        assert torch.equal(quantize(x, format), reference.quantize(x, format)), K


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_quantize_near_thresholds(format: str) -> None:
    x = near_thresholds(format)
    expected = reference.quantize(x, format)
    assert torch.equal(quantize(x, format), expected)
    assert not torch.equal(expected, reference.quantize(x * (1 - 2**-20), format)), "the values decide nothing"
    for dtype in DTYPES[1:]:
        assert torch.equal(quantize(x.to(dtype), format), reference.quantize(x.to(dtype), format))
    for x in (near_thresholds(format, spread=spread) for spread in (2**-15, 2**-13, 2**-10)):  # codes are found by words
        assert torch.equal(quantize(x, format), reference.quantize(x, format))


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_quantize_with_scales(format: str) -> None:
    for K in (1, 63, 100, 960, 4097):
        for dtype in DTYPES:
            x = hard_rows(K, dtype)
            blocks = Format.parse(format).num_blocks(K)
            scales = torch.rand(24, blocks, generator=torch.Generator().manual_seed(K)) + 0.3
            for row, value in enumerate((0.0, -0.0, -1.0, torch.inf, torch.nan, 1e-45, 1e-38, 3e38, 1e-5, 1e-30)):
                scales[row, -1] = scales[row + 10, 0] = value
            assert torch.equal(quantize(x, format, scales), reference.quantize_with_scales(x, scales, format)), (K, dtype)


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_own_scales_given_change_nothing(format: str) -> None:
    x = torch.randn(5, 1000)
    block = Format.parse(format).block_size or 1000
    padded = torch.nn.functional.pad(x, (0, -1000 % block))
    scales = padded.view(5, -1, block).abs().amax(-1)
    assert torch.equal(quantize(x, format, scales), quantize(x, format))


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_dequantize_any_bytes(format: str) -> None:
    for K in WIDTHS:
        generator = torch.Generator().manual_seed(K)
        rows = Format.parse(format).row_bytes(K)
        noise = torch.randint(0, 256, (48, rows), dtype=torch.uint8, generator=generator)  # scales too: NaN, Inf, negative
        if "-dq" in format:  # the reference's fma wants step and low as quantize writes them, not negative
            begin = Format.parse(format).row_scales_offset(K)
            noise[:, begin + 3] &= 127
            noise[:, begin + 7] &= 127
        for packed in (noise, reference.quantize(hard_rows(K, torch.float32), format)):
            for dtype in DTYPES:
                expected = reference.dequantize(packed, format, K, dtype)
                assert_same_floats(dequantize(packed, format, K, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_embedding(format: str, dtype: torch.dtype) -> None:
    f = Format.parse(format)
    for K in (1, 63, 64, 100, 576):
        packed = quantize(torch.randn(50, K), format)
        for indices in (torch.randint(0, 50, (3, 7)), torch.randint(0, 50, (600,), dtype=torch.int32), torch.tensor(49)):
            actual = ops.embedding(indices, packed, f.id, f.block_size, K, dtype)
            assert_same_floats(actual, reference.embedding(indices, packed, format, K, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [4096, 4304, 4097, 576])
def test_outputs_past_the_cache(K: int, dtype: torch.dtype) -> None:
    """Large outputs in used memory bypass the caches, from aligned and unaligned rows; new and small ones do not.

    All are the same bytes.
    """
    rows = (17 << 20) // dtype.itemsize // K
    some = quantize(torch.randn(64, K, dtype=dtype), "nf4")
    packed = some.repeat(rows // 64 + 1, 1)
    # Kept all together, the later ones do not fit what was free; the next one takes what they leave.
    several = [dequantize(packed, "nf4", K, dtype) for _ in range(6)]
    whole = several[0].clone()
    assert all(torch.equal(each, whole) for each in several)
    several.clear()
    assert torch.equal(dequantize(packed, "nf4", K, dtype), whole)
    assert whole.numel() * dtype.itemsize >= 16 << 20
    few = dequantize(some, "nf4", K, dtype)
    assert torch.equal(whole.view(-1, 64, K), few.expand(len(packed) // 64, 64, K))
    indices = torch.arange(len(packed)) % 64
    assert torch.equal(ops.embedding(indices, some, 0, 64, K, dtype), whole)
    assert torch.equal(quantize(whole, "nf4"), quantize(few, "nf4").repeat(len(packed) // 64, 1))


@pytest.mark.parametrize("format", FORMATS)
def test_flushing_of_subnormals_changes_nothing(format: str) -> None:
    x = hard_rows(100, torch.float32)
    packed = reference.quantize(x, format)
    values = reference.dequantize(packed, format, 100, torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        actual, decoded = quantize(x, format), dequantize(packed, format, 100, torch.float32)
        flushed = torch.tensor(1e-39) * 1.0  # the mode is still on after our ops
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(actual, packed)
    assert_same_floats(decoded, values)
    assert flushed.item() == 0.0


@pytest.mark.parametrize("format", FORMATS)
def test_threads_change_nothing(format: str) -> None:
    x = torch.randn(301, 1001)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        packed = quantize(x, format)
        results.append((packed, dequantize(packed, format, 1001, torch.bfloat16)))
    for packed, values in results[1:]:
        assert torch.equal(packed, results[0][0])
        assert torch.equal(values, results[0][1])


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(ALL_FORMATS),
    rows=st.integers(0, 5),
    K=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    exponent=st.integers(-44, 37),
    seed=st.integers(0, 2**32),
)
def test_any_shape(format: str, rows: int, K: int, dtype: torch.dtype, out: torch.dtype, exponent: int, seed: int) -> None:
    x = (torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent).to(dtype)
    packed = quantize(x, format)
    assert torch.equal(packed, reference.quantize(x, format))
    assert_same_floats(dequantize(packed, format, K, out), reference.dequantize(packed, format, K, out))


def test_the_forced_isa_is_in_use() -> None:
    forced = os.environ.get("HALFBYTE_CPU_ISA")
    assert forced in (None, cpu_isa())


def test_everything_here_under_another_isa(other_isa: Any) -> None:
    other_isa.tests(__file__)
