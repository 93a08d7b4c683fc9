"""What the tests of the emulated products with packed rows share: kernels, their oracle, orders of events."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import halfbyte
from halfbyte.formats import Format

from .conftest import DTYPES, Emulated

KERNELS = ("small", "tiled", "backward", "wgmma", "backward wgmma")  # as emulated_entry.cpp numbers them
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding, relative
SCHEDULES = list(itertools.product((False, True), repeat=2))


def packed_product(
    emulated: Emulated,
    kernel: str,
    input: Tensor,
    packed: Tensor,
    fmt: Format,
    k: int,
    addend: Tensor | None = None,
    splits: int = 1,
) -> Tensor:
    """Of contiguous input with packed rows of k elements; an addend has 1 or 2 dimensions."""
    m, columns = input.shape[0], k if "backward" in kernel else packed.shape[0]
    output = torch.full((m, columns), 7.0, dtype=input.dtype)
    partial = torch.full((splits, m, columns), float("nan"))
    sizes = (fmt.id, fmt.block_size, k, DTYPES[input.dtype])
    added = (ctypes.c_void_p(None), 0) if addend is None else (addend, columns if addend.dim() == 2 else 0)
    arguments = (KERNELS.index(kernel), input, m, packed, packed.shape[0], *sizes, *added, output, partial, splits)
    emulated.call("emulated_packed_product", *arguments)
    return output


def check_product(y: Tensor, x: Tensor, w: Tensor, addend: Tensor | None, weights: float, tiny: float = 0.0) -> None:
    """y = x @ w + addend by float64, within what rounding allows.

    A weight's error is `weights` of it (and `tiny`), sums are made in fp32, the result is rounded once.
    """
    w, added = w.double(), torch.zeros(1, dtype=torch.float64) if addend is None else addend.double()
    exact, magnitude = x.double() @ w + added, x.double().abs() @ w.abs() + added.abs()
    bound = magnitude * (weights + len(w) * 2.0**-24) + exact.abs() * ROUNDING[x.dtype] * 1.01 + 2.0**-25
    bound += tiny * x.double().abs().sum(1, keepdim=True)
    assert ((y.double() - exact).abs() <= bound).all(), float(((y.double() - exact).abs() / bound).max())


def decoded(packed: Tensor, fmt: Format, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return halfbyte.dequantize(packed, fmt, k, dtype)


@contextmanager
def scheduled(emulated: Emulated, reverse: bool, late: bool = False) -> Iterator[None]:
    """reverse: threads from the last to the first, copies at once; late: products at the wait that asks for them."""
    emulated.reversed_threads(reverse)
    emulated.late_products(late)
    try:
        yield
    finally:
        emulated.reversed_threads(False)
        emulated.late_products(False)


def check_least_splits(
    splits: int, tiles: int, steps: int, sms: int, start: int, sums: int, second: int, unit: int = 1
) -> None:
    """None is empty, and no other number is done earlier: `least_splits` of linear_route.h, by trying all."""
    units = -(-steps // unit)
    length = -(-units // splits)
    assert (splits - 1) * length < units <= splits * length

    def cost(count: int) -> int:
        several = count > 1
        return -(-tiles * count // sms) * (-(-units // count) * unit + start + sums * several) + second * several

    assert cost(splits) == min(map(cost, range(1, min(units, 64) + 1)))
