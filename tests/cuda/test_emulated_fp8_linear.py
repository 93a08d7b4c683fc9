"""What csrc/cuda/fp8_linear.cu makes for aten::_scaled_mm, run on the CPU: byte for byte; and the choice of route."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte import reference_products as reference
from halfbyte.formats import Format

from .conftest import DTYPES, aligned

FP8 = Format.parse("fp8")


def operands(emulated: Any, x: Tensor, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of the tokens, their scales and the scales of the rows, by the emulated kernel."""
    (m, k), n = x.shape, packed.shape[0]
    codes = torch.full((m, k), 0xA5, dtype=torch.uint8)
    token_scales, row_scales = torch.full((m,), 7.0), torch.full((n,), 7.0)
    rows = aligned(packed.numel(), 0).view_as(packed).copy_(packed)
    emulated.call("emulated_fp8_operands", x, DTYPES[x.dtype], m, rows, n, k, codes, token_scales, row_scales)
    return codes, token_scales, row_scales


def scales_of(rows: Tensor, k: int) -> Tensor:
    begin = FP8.scales_offset(k)
    return rows[:, begin : begin + 4].contiguous().view(torch.float32)[:, 0] / 448


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_are_what_quantize_writes(emulated: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # K of one unit a thread and less; several; past the 8192 elements that a CTA keeps in registers.
    for m, n, k in [(1, 1, 16), (3, 300, 576), (5, 16, 2064), (2, 16, 8192), (3, 7, 8208), (1, 16, 20480)]:
        x = torch.randn(m, k, generator=generator).to(dtype)
        x[0, : k // 2] *= 1e-3
        if m > 2:
            x[1], x[2, k - 1] = 0, float("nan")
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator), FP8)
        tokens = halfbyte.quantize(x, FP8)
        codes, token_scales, row_scales = operands(emulated, x, packed)
        assert torch.equal(codes, tokens[:, :k])
        assert same(token_scales, scales_of(tokens, k))
        assert same(row_scales, scales_of(packed, k))


def test_the_scaled_product_of_the_operands_is_the_op(emulated: Any) -> None:
    """What aten::_scaled_mm computes of them: float(codes) @ float(rows' codes)^T, times both scales, plus the bias."""
    x, packed, bias = torch.randn(5, 96).bfloat16(), halfbyte.quantize(torch.randn(32, 96), FP8), torch.randn(32).bfloat16()
    codes, token_scales, row_scales = operands(emulated, x, packed)
    mat1, mat2 = codes.view(torch.float8_e4m3fn), packed.view(torch.float8_e4m3fn)[:, :96].t()
    assert mat2.stride() == (1, packed.shape[1])
    assert packed.shape[1] % 16 == 0
    y = (mat1.double() @ mat2.double()) * token_scales[:, None].double() * row_scales[None].double() + bias.double()
    torch.testing.assert_close(y, reference.fp8_linear(x, packed, bias, 96), rtol=1e-6, atol=1e-6)


def test_the_order_of_threads_does_not_matter(emulated: Any) -> None:
    x, packed = torch.randn(6, 2560), halfbyte.quantize(torch.randn(300, 2560), FP8)
    forward = operands(emulated, x, packed)
    emulated.reversed_threads(True)
    try:
        assert all(map(torch.equal, operands(emulated, x, packed), forward))
    finally:
        emulated.reversed_threads(False)


@pytest.mark.parametrize("k", [1, 15, 16, 64, 576, 4096, 4304, 8192, 14336])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_pitch_of_8bit_rows_is_one_that_cublaslt_takes(name: str, k: int) -> None:
    """A multiple of 16 bytes, whatever K: neither product needs a copy of the codes."""
    assert Format.parse(name).row_bytes(k) % 16 == 0


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({}, None),
        ({"m": 1}, None),
        ({"capability": 89}, None),
        ({"capability": 80}, "no fp8 tensor cores (compute capability below 8.9)"),
        ({"capability": 0}, "no fp8 tensor cores (compute capability below 8.9)"),
        ({"capability": 100}, None),
        ({"capability": 120}, "compute capability 12"),
        ({"dtype": 0}, "input is not bfloat16"),
        ({"dtype": 2}, "input is not bfloat16"),
        ({"k": 4104}, "K is not a multiple of 16"),
        ({"n": 4104}, "N is not a multiple of 16"),
        ({"n": 0}, "N is not a multiple of 16"),
        ({"packed_width": 8}, "packed is not 16-byte aligned"),
        ({"m": 2**31}, "M, N or K is 2^31 or more"),
    ],
)
def test_route(emulated: Any, change: dict[str, int], obstacle: str | None) -> None:
    p = {"m": 512, "n": 4096, "k": 4096, "dtype": 1, "packed_width": 16, "capability": 90, **change}
    emulated.c.fp8_obstacle_of.restype = ctypes.c_char_p
    sizes = (ctypes.c_int64(p[name]) for name in "mnk")
    name = emulated.c.fp8_obstacle_of(*sizes, p["dtype"], p["packed_width"], p["capability"])
    assert (name and name.decode()) == obstacle
