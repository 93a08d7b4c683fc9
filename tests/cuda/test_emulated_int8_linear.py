"""The int8_linear kernels of csrc/cuda, run on the CPU, against the integer oracle: bit for bit; and the choice of route."""

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

INT8 = Format.parse("int8")


def run(emulated: Any, x: Tensor, packed: Tensor, bias: Tensor | None, k: int, sums: Tensor | None = None) -> Tensor:
    m, n = x.shape[0], packed.shape[0]
    output = torch.full((m, n), 7.0, dtype=x.dtype)
    rows = aligned(packed.numel(), 0).view_as(packed).copy_(packed)
    null = ctypes.c_void_p(None)
    arguments = (null if sums is None else sums, DTYPES[x.dtype], null if bias is None else bias, output)
    emulated.call("emulated_int8_linear", emulated.quantize(x, INT8), m, rows, n, k, *arguments)
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit(emulated: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in [(1, 9, 1), (3, 40, 65), (8, 5, 511), (9, 70, 512), (17, 16, 576), (33, 3, 1027)]:
        x = torch.randn(m, k, generator=generator).to(dtype)
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator), INT8)
        bias = torch.randn(n, generator=generator).to(dtype)
        for added in (None, bias):
            expected = reference.int8_linear(x, packed, added, k)
            assert torch.equal(run(emulated, x, packed, added, k), expected)
            codes = [rows[:, :k].view(torch.int8).int() for rows in (halfbyte.quantize(x, INT8), packed)]
            sums = (codes[0] @ codes[1].T).contiguous()  # what aten::_int_mm returns
            assert torch.equal(run(emulated, x, packed, added, k, sums), expected)


def test_no_race_and_nan_stays_where_it_is(emulated: Any) -> None:
    x, weight = torch.randn(10, 100), torch.randn(6, 100)
    x[3, 50], weight[2, 99] = float("nan"), float("inf")
    packed = halfbyte.quantize(weight, INT8)
    y = run(emulated, x, packed, None, 100)
    assert torch.equal(y.isnan(), (torch.arange(10) == 3)[:, None] | (torch.arange(6) == 2)[None])
    emulated.reversed_threads(True)
    try:
        assert torch.equal(run(emulated, x, packed, None, 100).nan_to_num(), y.nan_to_num())
    finally:
        emulated.reversed_threads(False)


@pytest.mark.parametrize(
    ("m", "n", "k", "taken"),
    [
        (17, 8, 8, 1),
        (1, 4096, 4096, 1),
        (0, 8, 8, 0),
        (4096, 4095, 4096, 0),
        (4096, 4096, 4095, 0),
        (4096, 4096, 4096, 1),
        (2**31, 8, 8, 0),
        (17, 0, 8, 0),
    ],
)
def test_int_mm_gets_what_it_takes(emulated: Any, m: int, n: int, k: int, taken: int) -> None:
    assert emulated.c.int8_takes_int_mm(*map(ctypes.c_int64, (m, n, k))) == taken
