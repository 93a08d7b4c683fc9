"""The linear kernel for wgmma, run on the CPU: emulated warpgroup products (emulator_wgmma.cpp) and asynchronous copies."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte.formats import Format

from .conftest import aligned, packed_product

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding, relative


def run(emulated: Any, x: Tensor, packed: Tensor, fmt: Format, addend: Tensor | None = None, splits: int = 1) -> Tensor:
    return packed_product(emulated, 3, x, packed, fmt, x.shape[1], packed.shape[0], addend, splits)


@contextmanager
def scheduled(emulated: Any, reverse: bool, late: bool) -> Iterator[None]:
    """reverse: threads from the last to the first, copies at once; late: products at the wait that asks for them."""
    emulated.reversed_threads(reverse)
    emulated.late_products(late)
    try:
        yield
    finally:
        emulated.reversed_threads(False)
        emulated.late_products(False)


def check(y: Tensor, x: Tensor, packed: Tensor, fmt: Format, addend: Tensor | None = None) -> None:
    """Weights are what dequantize gives: what is left is the order of the sums in fp32, and one rounding of the result."""
    w = halfbyte.dequantize(packed, fmt, x.shape[1], x.dtype).double()
    added = torch.zeros(1, dtype=torch.float64) if addend is None else addend.double()
    exact, magnitude = x.double() @ w.T + added, x.double().abs() @ w.abs().T + added.abs()
    bound = magnitude * x.shape[1] * 2.0**-24 + exact.abs() * ROUNDING[x.dtype] * 1.01 + 2.0**-25  # fp16 subnormals
    assert ((y.double() - exact).abs() <= bound).all(), ((y.double() - exact).abs() / bound).max()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4-dq", "fp4-dq:128", "nf4:4096"])
def test_values(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    # Every kernel (64, 128, 192, 256 rows of input), full and not; one step, fewer than the ring has slots, more; an odd number
    # and an even one; one row of packed, a ragged tile, two tiles.
    for m, n, k in [(65, 129, 64), (64, 40, 704), (128, 33, 640), (150, 1, 192), (193, 20, 448), (256, 17, 384)]:
        x = torch.randn(m, k, generator=generator).to(dtype)
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator), fmt)
        bias = torch.randn(n, generator=generator).to(dtype)
        check(run(emulated, x, packed, fmt, bias), x, packed, fmt, bias)
    addend = torch.randn(m, n, generator=generator).to(dtype)  # lora_linear's branch
    for added, splits in ((None, 1), (addend, 1), (addend, 2)):
        check(run(emulated, x, packed, fmt, added, splits), x, packed, fmt, added)
