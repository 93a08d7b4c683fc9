"""Whole kernels of csrc/cuda, run on the CPU thread by thread, against the CPU ops: byte for byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.formats import Format

FORMATS = [
    "nf4",
    "fp4",
    "nf4-dq",
    "fp4-dq",
    "int8",
    "fp8",
    "nf4:32",
    "fp4:128",
    "nf4:256",
    "nf4:512",
    "nf4-dq:32",
    "fp4-dq:1024",
]
WIDTHS = [1, 2, 7, 8, 31, 63, 64, 65, 100, 576, 1027, 1304]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def samples(rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows that differ in kind: normal, zero, tiny, huge, one NaN, one Inf, few values, subnormal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    kinds = [lambda r: r, lambda r: r * 0, lambda r: r * 1e-30, lambda r: r * 1e4, lambda r: r.round(), lambda r: r * 1e-40]
    for row in range(rows):
        x[row] = kinds[row % len(kinds)](x[row])
    if rows > 6:
        x[6, k // 2] = float("nan")
    if rows > 7:
        x[7, k - 1] = float("-inf")
    x[:1, :1] = -0.0
    return x.to(dtype)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, except that one NaN is like another."""
    nan = a.isnan() & b.isnan()
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(integers) == b.view(integers)) | nan).all())


def misaligned(x: Tensor, by: int) -> Tensor:
    """The same values at an address `by` bytes past a multiple of 16."""
    size = x.numel() * x.element_size()
    buffer = torch.empty(size + 64, dtype=torch.uint8)
    start = -buffer.data_ptr() % 16 + by
    if start % x.element_size():
        raise ValueError("elements must stay aligned")
    out = buffer[start : start + size].view(x.dtype).view(x.shape) if not buffer.data_ptr() % x.element_size() else x
    return out.copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_quantize_equals_the_cpu_op(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    for k in WIDTHS:
        x = samples(9, k, dtype, seed=k)
        assert torch.equal(emulated.quantize(x, fmt), ops.quantize(x, fmt)), k


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_with_scales_equals_the_cpu_op(emulated: Any, name: str) -> None:
    fmt = Format.parse(name)
    for k, dtype in itertools.product((1, 65, 576), DTYPES):
        x = samples(9, k, dtype, seed=k)
        scales = torch.rand(9, fmt.num_blocks(k), generator=torch.Generator().manual_seed(k)) * 2
        scales[1, 0], scales[2, -1], scales[3, 0], scales[4, -1], scales[5, 0] = 0.0, -1.0, float("inf"), float("nan"), 1e-42
        assert torch.equal(emulated.quantize(x, fmt, scales), ops.quantize(x, fmt, scales=scales)), (k, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_equals_the_cpu_op(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    for k in WIDTHS:
        packed = ops.quantize(samples(9, k, torch.float32, seed=k), fmt)
        assert same_values(emulated.dequantize(packed, fmt, k, dtype), ops.dequantize(packed, fmt, k, dtype)), k


@pytest.mark.parametrize("name", ["nf4", "fp4-dq", "int8", "fp8"])
def test_addresses_need_no_alignment(emulated: Any, name: str) -> None:
    fmt = Format.parse(name)
    for k, by in itertools.product((64, 100, 576), (0, 2, 4, 8)):
        x = samples(8, k, torch.bfloat16, seed=k)
        assert torch.equal(emulated.quantize(misaligned(x, by), fmt), ops.quantize(x, fmt))
        packed = ops.quantize(x, fmt)
        for shift in (by, by + 1):
            moved = misaligned(packed, shift)
            assert same_values(
                emulated.dequantize(moved, fmt, k, torch.float16), ops.dequantize(packed, fmt, k, torch.float16)
            )


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_like_the_cpu_op(emulated: Any, name: str) -> None:
    """All 256 byte values as codes, also those a quantizer never writes."""
    fmt = Format.parse(name)
    k = 512
    packed = ops.quantize(torch.randn(2, k), fmt)
    count = fmt.code_bytes(k)
    packed[:, :count] = torch.arange(count).to(torch.uint8)
    for dtype in DTYPES:
        assert same_values(emulated.dequantize(packed, fmt, k, dtype), ops.dequantize(packed, fmt, k, dtype))


LISTS = [(9, 64), (1, 1304), (3, 576), (7, 65), (2, 8), (5, 1), (0, 64), (4, 2048)]


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_list_equals_the_cpu_op(emulated: Any, name: str) -> None:
    fmt = Format.parse(name)
    columns = [k for _, k in LISTS]
    packed = [ops.quantize(samples(rows, k, torch.float32, seed=k), fmt) for rows, k in LISTS]
    packed[2] = misaligned(packed[2], 4)
    for dtype in DTYPES:
        got = emulated.dequantize_list(packed, fmt, columns, dtype)
        assert emulated.launches == 2  # whole segments, and the rest
        for one, rows, k in zip(got, packed, columns, strict=True):
            assert same_values(one, ops.dequantize(rows, fmt, k, dtype)), k


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_list_equals_the_cpu_op(emulated: Any, name: str) -> None:
    fmt = Format.parse(name)
    for dtype in DTYPES:
        inputs = [samples(rows, k, dtype, seed=k) for rows, k in LISTS if rows]
        inputs[2] = misaligned(inputs[2], 4)
        got = emulated.quantize_list(inputs, fmt)
        assert emulated.launches == (2 if name in ("nf4", "fp4", "nf4:32", "fp4:128", "nf4:256") else 1)
        for one, x in zip(got, inputs, strict=True):
            assert torch.equal(one, ops.quantize(x, fmt)), x.shape


@pytest.mark.parametrize(("count", "launches"), [(0, 0), (1, 1), (2, 1), (48, 1), (49, 2), (100, 3)])
def test_a_list_is_decoded_in_as_few_launches_as_its_tables_hold(emulated: Any, count: int, launches: int) -> None:
    fmt = Format.parse("nf4")
    packed = [ops.quantize(samples(1 + i % 3, 64, torch.float32, seed=i), fmt) for i in range(count)]
    got = emulated.dequantize_list(packed, fmt, [64] * count, torch.bfloat16)
    assert emulated.launches == launches
    for one, rows in zip(got, packed, strict=True):
        assert same_values(one, ops.dequantize(rows, fmt, 64, torch.bfloat16))


@pytest.mark.parametrize(("count", "launches"), [(0, 0), (1, 1), (28, 1), (29, 2), (100, 4)])
@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_list_is_packed_in_as_few_launches_as_its_tables_hold(emulated: Any, name: str, count: int, launches: int) -> None:
    fmt = Format.parse(name)
    inputs = [samples(1 + i % 3, 64, torch.bfloat16, seed=i) for i in range(count)]
    got = emulated.quantize_list(inputs, fmt)
    assert emulated.launches == launches
    for one, x in zip(got, inputs, strict=True):
        assert torch.equal(one, ops.quantize(x, fmt))


def test_a_list_of_more_segments_than_one_pass_of_the_grid(emulated: Any) -> None:
    """Warps of the 32 emulated blocks cross from one tensor to the next in their loops, and come to several of one."""
    fmt = Format.parse("nf4-dq")
    shapes = [(150, 1024), (1, 8), (200, 2048), (3, 64), (90, 1032), (300, 27)]
    inputs = [samples(rows, k, torch.bfloat16, seed=rows) for rows, k in shapes]
    for other in ("nf4", "nf4:1024", "int8"):
        for one, x in zip(emulated.quantize_list(inputs, Format.parse(other)), inputs, strict=True):
            assert torch.equal(one, ops.quantize(x, other)), (other, x.shape)
    packed = [ops.quantize(x, fmt) for x in inputs]
    got = emulated.dequantize_list(packed, fmt, [k for _, k in shapes], torch.bfloat16)
    for one, rows, (_, k) in zip(got, packed, shapes, strict=True):
        assert same_values(one, ops.dequantize(rows, fmt, k, torch.bfloat16)), k


@pytest.mark.parametrize("name", ["nf4", "nf4-dq", "fp8"])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_embedding_equals_the_cpu_op(emulated: Any, name: str, index_dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    for k in (100, 1304):  # unit by unit; two segments of a row
        packed = ops.quantize(samples(50, k, torch.float32), fmt)
        indices = torch.randint(0, 50, (99,), generator=torch.Generator().manual_seed(1)).to(index_dtype)
        got = emulated.embedding(indices, packed, fmt, k, torch.bfloat16)
        assert same_values(got, ops.embedding(indices, packed, fmt, k, torch.bfloat16))


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_embedding_stops_at_a_bad_index(emulated: Any, bad: int) -> None:
    packed = ops.quantize(samples(50, 64, torch.float32), "nf4")
    with pytest.raises(RuntimeError, match="CUDA error 710"):  # cudaErrorAssert
        emulated.embedding(torch.tensor([3, bad]), packed, Format.parse("nf4"), 64, torch.float32)


def test_results_do_not_depend_on_the_order_of_threads(emulated: Any) -> None:
    """A thread that reads shared memory before a barrier made it safe gives another result in one of the orders."""
    x = samples(9, 4130, torch.bfloat16)
    for name in ("nf4", "nf4-dq", "fp4-dq:32", "int8"):
        fmt = Format.parse(name)
        forward = emulated.quantize(x, fmt)
        emulated.reversed_threads(True)
        try:
            backward = emulated.quantize(x, fmt)
        finally:
            emulated.reversed_threads(False)
        assert torch.equal(forward, backward)
        assert torch.equal(forward, ops.quantize(x, fmt))


def test_empty_tensors_launch_nothing(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    assert emulated.quantize(torch.empty(0, 64), fmt).shape == (0, 48)
    assert emulated.dequantize(torch.empty(0, 48, dtype=torch.uint8), fmt, 64, torch.bfloat16).shape == (0, 64)
    packed = ops.quantize(torch.randn(3, 64), fmt)
    assert emulated.embedding(torch.empty(0, dtype=torch.int64), packed, fmt, 64, torch.float32).shape == (0, 64)


def test_more_units_than_one_pass_of_the_grid(emulated: Any) -> None:
    """The emulated grid is 32 blocks of 1024 units: 40000 units make every block loop."""
    x = torch.randn(125, 2560, dtype=torch.bfloat16)
    fmt = Format.parse("nf4")
    packed = emulated.quantize(x, fmt)
    assert torch.equal(packed, ops.quantize(x, fmt))
    assert same_values(
        emulated.dequantize(packed, fmt, 2560, torch.bfloat16), ops.dequantize(packed, fmt, 2560, torch.bfloat16)
    )
