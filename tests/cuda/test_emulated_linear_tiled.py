"""The linear kernel for 17 to 128 rows of input, run on the CPU with emulated tensor cores and asynchronous copies."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte.formats import Format

from .conftest import aligned
from .products import ROUNDING, check_least_splits, packed_product, scheduled
from .test_emulated_linear import check


def run(emulated: Any, x: Tensor, packed: Tensor, fmt: Format, addend: Tensor | None = None, splits: int = 1) -> Tensor:
    return packed_product(emulated, "tiled", x, packed, fmt, x.shape[1], addend, splits)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4-dq", "fp4-dq:128", "nf4:512"])
def test_values(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    # Every number of columns, full and not; K of one step, of less than a round, of ragged rounds past the ring's 4; one row
    # of packed, a ragged tile, two tiles.
    for m, n, k in [(17, 257, 64), (31, 40, 1088), (64, 1, 704), (65, 100, 320), (97, 256, 64), (128, 33, 448)]:
        x = torch.randn(m, k, generator=generator).to(dtype)
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator), fmt)
        bias = torch.randn(n, generator=generator).to(dtype)
        check(run(emulated, x, packed, fmt, bias), x, packed, fmt, bias)
    addend = torch.randn(m, n, generator=generator).to(dtype)  # lora_linear's branch
    for added, splits in ((None, 1), (addend, 1), (addend, 2)):
        check(run(emulated, x, packed, fmt, added, splits), x, packed, fmt, added)


def test_each_weight_meets_its_own_input(emulated: Any) -> None:
    """Unit inputs pick single columns: a wrong row, column or scale shows by itself."""
    fmt, n, k = Format.parse("nf4"), 300, 128
    packed = halfbyte.quantize(torch.randn(n, k) * torch.logspace(-2, 2, n)[:, None], fmt)
    rows = run(emulated, torch.eye(k).bfloat16(), packed, fmt)
    weight = halfbyte.dequantize(packed, fmt, k, torch.float32)
    torch.testing.assert_close(rows.T.float(), weight, rtol=1.01 * 2.0**-7, atol=0)


@pytest.mark.parametrize(("m", "splits"), [(20, 3), (40, 7), (100, 5)])
def test_splits_are_added_repeatably_and_nothing_races(emulated: Any, m: int, splits: int) -> None:
    """7 splits of 17 steps: 3 each, the last one has none."""
    fmt = Format.parse("nf4-dq")
    x, packed = torch.randn(m, 1088).bfloat16(), halfbyte.quantize(torch.randn(20, 1088), fmt)
    bias = torch.randn(20).bfloat16()
    y = run(emulated, x, packed, fmt, bias, splits)
    check(y, x, packed, fmt, bias)
    with scheduled(emulated, reverse=True):
        assert torch.equal(run(emulated, x, packed, fmt, bias, splits), y)


def test_a_row_does_not_depend_on_its_batch(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    x = torch.randn(150, 576).to(torch.bfloat16)  # past 128 rows: two launches
    packed = halfbyte.quantize(torch.randn(24, 576), fmt)
    whole = run(emulated, x, packed, fmt, None, 2)
    check(whole, x, packed, fmt)
    for m in (1, 17, 33, 64, 65, 128):
        assert torch.equal(run(emulated, x[:m].contiguous(), packed, fmt, None, 2), whole[:m])
    assert torch.equal(run(emulated, x[128:].contiguous(), packed, fmt, None, 2), whole[128:])


def test_nothing_invalid_leaves_its_row(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    weight, x = torch.randn(20, 128), torch.randn(18, 128).half()
    weight[3, 70], x[5, 60] = float("inf"), float("nan")
    y = run(emulated, x, halfbyte.quantize(weight, fmt), fmt)
    assert torch.equal(y.isnan(), (torch.arange(18) == 5)[:, None] | (torch.arange(20) == 3)[None])


def test_rows_at_addresses_of_8(emulated: Any) -> None:
    """The least that the route lets through: rows of packed 8 bytes off, rows of input 16 bytes off a line."""
    fmt, k = Format.parse("nf4-dq"), 320
    x, packed = torch.randn(20, k).bfloat16(), halfbyte.quantize(torch.randn(10, k), fmt)
    rows = aligned(packed.numel(), 8).view_as(packed).copy_(packed)
    at = aligned(x.numel() * 2, 16).view(torch.bfloat16).view_as(x).copy_(x)
    assert torch.equal(run(emulated, at, rows, fmt), run(emulated, x, packed, fmt))


@pytest.mark.parametrize("offset", [2, 8])
def test_copies_from_other_addresses_are_refused(emulated: Any, offset: int) -> None:
    """What the route keeps away: the emulator knows cp.async's alignment."""
    fmt = Format.parse("nf4")
    x = aligned(20 * 64 * 2, offset).view(torch.bfloat16).view(20, 64).fill_(1)
    with pytest.raises(RuntimeError, match="716"):  # cudaErrorMisalignedAddress
        run(emulated, x, halfbyte.quantize(torch.randn(10, 64), fmt), fmt)


@pytest.mark.parametrize("sms", [1, 20, 108, 132])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 64), (256, 2**20), (576, 576), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (2**31 - 1, 64)],
)
def test_splits_are_full_and_the_best_of_all(emulated: Any, n: int, k: int, sms: int) -> None:
    emulated.c.tiled_splits_of.restype = ctypes.c_int64
    splits = emulated.c.tiled_splits_of(*map(ctypes.c_int64, (n, k, sms)))
    check_least_splits(splits, -(-n // 256), k // 64, sms, start=2, sums=5, second=5)
