"""The linear kernel for wgmma, run on the CPU: emulated warpgroup products (emulator_wgmma.cpp) and asynchronous copies."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte.formats import Format

from .conftest import aligned
from .products import ROUNDING, SCHEDULES, check_least_splits, check_product, decoded, packed_product, scheduled


def run(emulated: Any, x: Tensor, packed: Tensor, fmt: Format, addend: Tensor | None = None, splits: int = 1) -> Tensor:
    return packed_product(emulated, "wgmma", x, packed, fmt, x.shape[1], addend, splits)


def check(y: Tensor, x: Tensor, packed: Tensor, fmt: Format, addend: Tensor | None = None) -> None:
    """Weights are what dequantize gives: what is left is the order of the sums in fp32, and one rounding of the result."""
    check_product(y, x, decoded(packed, fmt, x.shape[1], x.dtype).T, addend, 0.0)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4-dq", "fp4-dq:128", "nf4:4096"])
def test_values(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    # Every kernel (64, 128, 192, 256 rows of input), full and not; one step, a last quad of each length, fewer quads than
    # the ring has slots, more; one row of packed, a ragged tile, two tiles.
    for m, n, k in [(65, 129, 64), (64, 40, 1728), (128, 33, 1664), (150, 1, 192), (193, 20, 448), (256, 17, 1408)]:
        x = torch.randn(m, k, generator=generator).to(dtype)
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator), fmt)
        bias = torch.randn(n, generator=generator).to(dtype)
        check(run(emulated, x, packed, fmt, bias), x, packed, fmt, bias)
    addend = torch.randn(m, n, generator=generator).to(dtype)  # lora_linear's branch
    for added, splits in ((None, 1), (addend, 1), (addend, 2)):
        check(run(emulated, x, packed, fmt, added, splits), x, packed, fmt, added)


@pytest.mark.parametrize(("m", "splits"), [(65, 1), (130, 3), (256, 2)])
def test_nothing_depends_on_when_copies_and_products_happen(emulated: Any, m: int, splits: int) -> None:
    """17 steps, more than the ring has slots; 3 splits have 6, 6, 5."""
    fmt = Format.parse("nf4-dq")
    x, packed = torch.randn(m, 1088).bfloat16(), halfbyte.quantize(torch.randn(130, 1088), fmt)
    bias = torch.randn(130).bfloat16()
    y = run(emulated, x, packed, fmt, bias, splits)
    check(y, x, packed, fmt, bias)
    for reverse, late in SCHEDULES[1:]:
        with scheduled(emulated, reverse, late):
            assert torch.equal(run(emulated, x, packed, fmt, bias, splits), y)


def test_each_weight_meets_its_own_input_and_is_what_dequantize_gives(emulated: Any) -> None:
    """Unit inputs pick single columns: a wrong row, column or scale shows by itself, and every weight bit for bit."""
    for name in ("nf4", "fp4-dq", "nf4:128"):
        fmt, n, k = Format.parse(name), 200, 128
        packed = halfbyte.quantize(torch.randn(n, k) * torch.logspace(-2, 2, n)[:, None], fmt)
        for dtype in ROUNDING:
            rows = run(emulated, torch.eye(k, dtype=dtype), packed, fmt)
            assert torch.equal(rows.T, halfbyte.dequantize(packed, fmt, k, dtype))


def test_more_splits_than_steps_leave_the_last_without_any(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    x, packed = torch.randn(70, 320).half(), halfbyte.quantize(torch.randn(20, 320), fmt)
    check(run(emulated, x, packed, fmt, None, 4), x, packed, fmt)  # 5 steps: 2, 2, 1, 0


def test_a_row_does_not_depend_on_its_batch(emulated: Any) -> None:
    """Up to 128 rows in a tile, whose groups add their sums, and past it: every kernel, one tile and two."""
    fmt = Format.parse("nf4")
    x = torch.randn(520, 576).to(torch.bfloat16)  # 3 tiles of 174
    packed = halfbyte.quantize(torch.randn(24, 576), fmt)
    for whole, batches in ((x[:128], (1, 33, 64, 65)), (x, (129, 192, 256, 257, 512))):
        y = run(emulated, whole.contiguous(), packed, fmt, None, 2)
        check(y, whole, packed, fmt)
        for m in batches:
            assert torch.equal(run(emulated, x[:m].contiguous(), packed, fmt, None, 2), y[:m]), m


def test_nothing_invalid_leaves_its_row(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    weight, x = torch.randn(20, 128), torch.randn(66, 128).half()
    weight[3, 70], x[5, 60] = float("inf"), float("nan")
    y = run(emulated, x, halfbyte.quantize(weight, fmt), fmt)
    assert torch.equal(y.isnan(), (torch.arange(66) == 5)[:, None] | (torch.arange(20) == 3)[None])


def test_rows_at_addresses_of_16(emulated: Any) -> None:
    """The least that the route lets through: rows 16 bytes off a line."""
    fmt, k = Format.parse("nf4-dq"), 320
    x, packed = torch.randn(70, k).bfloat16(), halfbyte.quantize(torch.randn(10, k), fmt)
    rows = aligned(packed.numel(), 16).view_as(packed).copy_(packed)
    at = aligned(x.numel() * 2, 16).view(torch.bfloat16).view_as(x).copy_(x)
    assert torch.equal(run(emulated, at, rows, fmt), run(emulated, x, packed, fmt))
    off = aligned(packed.numel(), 8).view_as(packed).copy_(packed)
    with pytest.raises(RuntimeError, match="716"):  # cudaErrorMisalignedAddress: what the route keeps away
        run(emulated, x, off, fmt)


@pytest.mark.parametrize("sms", [1, 20, 108, 132])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (128, 2**20), (576, 576), (4096, 4096), (14336, 4096), (2**31 - 1, 64)])
def test_splits_are_full_and_the_best_of_all(emulated: Any, n: int, k: int, sms: int) -> None:
    emulated.c.wgmma_splits_of.restype = ctypes.c_int64
    splits = emulated.c.wgmma_splits_of(*map(ctypes.c_int64, (n, k, sms)))
    check_least_splits(splits, -(-n // 128), k // 64, sms, start=4, sums=8, second=6, unit=4)
