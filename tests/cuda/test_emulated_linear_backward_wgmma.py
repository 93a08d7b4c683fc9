"""The wgmma kernel of linear_backward_input, run on the CPU: emulated warpgroup products, matrix loads and copies."""

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


def run(
    emulated: Any, grad: Tensor, packed: Tensor, fmt: Format, k: int, addend: Tensor | None = None, splits: int = 1
) -> Tensor:
    return packed_product(emulated, "backward wgmma", grad, packed, fmt, k, addend, splits)


def check(dx: Tensor, grad: Tensor, packed: Tensor, fmt: Format, addend: Tensor | None = None) -> None:
    """Weights are what dequantize gives: what is left is the order of the sums in fp32, and one rounding of the result."""
    check_product(dx, grad, decoded(packed, fmt, dx.shape[1], grad.dtype), addend, 0.0)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4-dq", "fp4-dq:128", "nf4:32", "nf4:512"])
def test_values(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    # Every kernel (64, 128, 192, 256 rows of gradients), full and not; less than a step, one, fewer than the ring has slots,
    # more, the last one ragged or not; half a unit of 32 columns, a ragged tile, two tiles.
    for m, n, k in [(65, 64, 272), (64, 712, 48), (128, 640, 128), (150, 8, 16), (193, 456, 80), (256, 384, 144)]:
        grad = torch.randn(m, n, generator=generator).to(dtype)
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator), fmt)
        check(run(emulated, grad, packed, fmt, k), grad, packed, fmt)
    addend = torch.randn(m, k, generator=generator).to(dtype)  # lora_linear_backward_input's branch
    for added, splits in ((None, 2), (addend, 1), (addend, 3)):
        check(run(emulated, grad, packed, fmt, k, added, splits), grad, packed, fmt, added)


@pytest.mark.parametrize(("m", "splits"), [(65, 1), (130, 3), (256, 2)])
def test_nothing_depends_on_when_copies_and_products_happen(emulated: Any, m: int, splits: int) -> None:
    """17 steps, more than the ring has slots; 3 splits have 6, 6, 5."""
    fmt = Format.parse("nf4-dq")
    grad, packed = torch.randn(m, 1080).bfloat16(), halfbyte.quantize(torch.randn(1080, 144), fmt)
    dx = run(emulated, grad, packed, fmt, 144, None, splits)
    check(dx, grad, packed, fmt)
    for reverse, late in SCHEDULES[1:]:
        with scheduled(emulated, reverse, late):
            assert torch.equal(run(emulated, grad, packed, fmt, 144, None, splits), dx)


def test_each_weight_meets_its_own_gradient_and_is_what_dequantize_gives(emulated: Any) -> None:
    """Unit gradients pick single rows: a wrong row, column or scale shows by itself, and every weight bit for bit."""
    n, k = 136, 304
    scales = torch.logspace(-2, 2, n)[:, None] * torch.logspace(-1, 1, k)
    for name in ("nf4", "fp4-dq", "nf4:32", "nf4-dq:32", "nf4:128"):
        fmt = Format.parse(name)
        packed = halfbyte.quantize(torch.randn(n, k) * scales, fmt)
        for dtype in ROUNDING:
            rows = run(emulated, torch.eye(n, dtype=dtype), packed, fmt, k)
            assert torch.equal(rows, decoded(packed, fmt, k, dtype))


def test_more_splits_than_steps_leave_the_last_without_any(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    grad, packed = torch.randn(70, 320).half(), halfbyte.quantize(torch.randn(320, 48), fmt)
    check(run(emulated, grad, packed, fmt, 48, None, 4), grad, packed, fmt)  # 5 steps: 2, 2, 1, 0


def test_a_row_does_not_depend_on_its_batch(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    grad = torch.randn(520, 576).to(torch.bfloat16)  # past 256 rows: 3 tiles of 174
    packed = halfbyte.quantize(torch.randn(576, 32), fmt)
    whole = run(emulated, grad, packed, fmt, 32, None, 2)
    check(whole, grad, packed, fmt)
    for m in (1, 65, 128, 129, 192, 256, 257, 512):  # every kernel, one tile and two
        assert torch.equal(run(emulated, grad[:m].contiguous(), packed, fmt, 32, None, 2), whole[:m])


def test_nothing_invalid_leaves_its_place(emulated: Any) -> None:
    """A block's columns, a gradient's row; an infinite weight (in fp16) in the last row of packed meets its own only."""
    fmt = Format.parse("nf4")
    weight, grad = torch.randn(24, 192), torch.rand(66, 24).half() + 1
    weight[3, 70], grad[5, 20] = float("inf"), float("nan")
    weight[23, 128] = 1e9
    dx = run(emulated, grad, halfbyte.quantize(weight, fmt), fmt, 192)
    assert torch.equal(dx.isnan(), (torch.arange(66) == 5)[:, None] | (torch.arange(192) // 64 == 1)[None])
    assert dx[0, 128] == float("inf")


def test_rows_at_addresses_of_16(emulated: Any) -> None:
    """The least that the route lets through: rows 16 bytes off a line."""
    fmt, n, k = Format.parse("nf4-dq"), 104, 320
    grad, packed = torch.randn(70, n).bfloat16(), halfbyte.quantize(torch.randn(n, k), fmt)
    rows = aligned(packed.numel(), 16).view_as(packed).copy_(packed)
    at = aligned(grad.numel() * 2, 16).view(torch.bfloat16).view_as(grad).copy_(grad)
    assert torch.equal(run(emulated, at, rows, fmt, k), run(emulated, grad, packed, fmt, k))
    off = aligned(packed.numel(), 8).view_as(packed).copy_(packed)
    for wrong in ((grad, off), (grad[:, :100].contiguous(), packed[:100])):
        with pytest.raises(RuntimeError, match="716"):  # cudaErrorMisalignedAddress: what the route keeps away
            run(emulated, *wrong, fmt, k)


@pytest.mark.parametrize("sms", [1, 20, 108, 132])
@pytest.mark.parametrize(("n", "k"), [(8, 16), (2**20, 128), (584, 576), (4096, 14336), (14336, 4096), (8, 2**30 - 16)])
def test_splits_are_full_and_the_best_of_all(emulated: Any, n: int, k: int, sms: int) -> None:
    emulated.c.backward_wgmma_splits_of.restype = ctypes.c_int64
    splits = emulated.c.backward_wgmma_splits_of(*map(ctypes.c_int64, (n, k, sms)))
    check_least_splits(splits, -(-k // 128), -(-n // 64), sms, start=4, sums=8, second=6, unit=4)
