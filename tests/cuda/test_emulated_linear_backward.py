"""The small-batch kernel of linear_backward_input, run on the CPU with emulated tensor cores, and its route."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte.formats import Format

from .conftest import route_of
from .products import ROUNDING, check_product, decoded, packed_product, scheduled


def run(
    emulated: Any, grad: Tensor, packed: Tensor, fmt: Format, k: int, addend: Tensor | None = None, splits: int = 1
) -> Tensor:
    return packed_product(emulated, "backward", grad, packed, fmt, k, addend, splits)


def check(dx: Tensor, grad: Tensor, packed: Tensor, fmt: Format, addend: Tensor | None = None) -> None:
    """Codebook, scale and product of a weight are rounded to 16 bits; tiny: fp16 weights below 2^-14."""
    check_product(dx, grad, decoded(packed, fmt, dx.shape[1]), addend, 3.02 * ROUNDING[grad.dtype], 2.0**-25)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4-dq", "fp4-dq:128", "nf4:32", "nf4:512"])
def test_values(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    # Columns of one lane, of parts of a warp and of a CTA, of two CTAs; rows of one lane, ragged steps, several rounds.
    for m, n, k in [
        *[(1, 4, 16), (3, 40, 576), (8, 100, 112), (9, 16, 128), (16, 212, 272), (2, 300, 64)],
        *[(17, 100, 112), (32, 180, 64), (25, 84, 272), (32, 20, 64), (24, 52, 16), (31, 36, 160)],
    ]:
        grad = torch.randn(m, n, generator=generator).to(dtype)
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator) * 0.05, fmt)
        addend = torch.randn(m, k, generator=generator).to(dtype)  # lora_linear_backward_input's branch
        for splits in (1, 2):
            check(run(emulated, grad, packed, fmt, k, None, splits), grad, packed, fmt)
        check(run(emulated, grad, packed, fmt, k, addend, 2), grad, packed, fmt, addend)


def test_each_weight_meets_its_own_gradient(emulated: Any) -> None:
    """Unit gradients pick single rows: a wrong row, column or scale shows by itself."""
    fmt, k = Format.parse("nf4"), 288
    packed = halfbyte.quantize(torch.randn(16, k) * torch.logspace(-2, 2, 16)[:, None], fmt)
    rows = run(emulated, torch.eye(16).bfloat16(), packed, fmt, k)
    torch.testing.assert_close(rows.float(), halfbyte.dequantize(packed, fmt, k, torch.float32), rtol=3.02 * 2.0**-8, atol=0)


@pytest.mark.parametrize(("m", "splits"), [(4, 2), (4, 3), (4, 9), (20, 2), (32, 3)])
def test_splits_are_added_and_repeatable(emulated: Any, m: int, splits: int) -> None:
    fmt = Format.parse("nf4")
    grad, packed = torch.randn(m, 340).bfloat16(), halfbyte.quantize(torch.randn(340, 80), fmt)
    dx = run(emulated, grad, packed, fmt, 80, None, splits)
    check(dx, grad, packed, fmt)
    with scheduled(emulated, reverse=True):
        assert torch.equal(run(emulated, grad, packed, fmt, 80, None, splits), dx)


def test_a_row_does_not_depend_on_its_batch(emulated: Any) -> None:
    fmt = Format.parse("nf4-dq")
    grad, packed = torch.randn(32, 100).bfloat16(), halfbyte.quantize(torch.randn(100, 160), fmt)
    for most, fewer in ((16, (1, 2, 8, 9)), (32, (17, 25))):
        whole = run(emulated, grad[:most].contiguous(), packed, fmt, 160)
        for m in fewer:
            assert torch.equal(run(emulated, grad[:m].contiguous(), packed, fmt, 160), whole[:m])


def test_an_invalid_block_gives_nan_in_its_columns_only(emulated: Any) -> None:
    fmt, weight = Format.parse("nf4"), torch.randn(20, 256)
    weight[3, 70] = float("inf")
    dx = run(emulated, torch.randn(2, 20).half(), halfbyte.quantize(weight, fmt), fmt, 256)
    assert dx[:, 64:128].isnan().all()
    assert torch.cat([dx[:, :64], dx[:, 128:]], 1).isfinite().all()


@pytest.mark.parametrize(
    ("change", "route"),
    [
        ({}, "small"),
        ({"M": 1, "N": 4, "K": 16, "block_size": 32}, "small"),
        ({"M": 17}, "tiled"),
        ({"M": 32, "format": 2}, "tiled"),
        ({"M": 33}, "M is past kBackwardM"),
        ({"M": 0}, "nothing to multiply"),
        ({"M": 16, "wgmma": 1}, "small"),
        ({"M": 17, "wgmma": 1}, "wgmma"),
        ({"M": 17, "wgmma": 1, "packed_width": 8}, "tiled"),
        ({"M": 256, "wgmma": 1, "N": 8, "K": 16, "block_size": 32}, "wgmma"),
        ({"M": 257, "wgmma": 1}, "M is past kBackwardWgmmaM"),
        ({"M": 65, "wgmma": 1, "input_width": 8}, "M is past kBackwardM"),
        ({"M": 65, "wgmma": 1, "packed_width": 8}, "M is past kBackwardM"),
        ({"M": 65, "wgmma": 1, "dtype": 0}, "float32 grad_output"),
        ({"M": 2000, "wgmma": 1, "forced": 3}, "wgmma"),
        ({"M": 8, "wgmma": 1, "forced": 3}, "wgmma"),
        ({"M": 65, "forced": 3}, "dense"),
        ({"M": 32, "wgmma": 1, "forced": 1}, "tiled"),
        ({"M": 33, "forced": 1}, "dense"),
        ({"M": 17, "forced": 0}, "dense"),
        ({"M": 8, "forced": 2}, "dense"),
        ({"format": 4, "block_size": 4096}, "not a 4-bit format"),
        ({"K": 4104}, "K is not a multiple of 16"),
        ({"N": 4098}, "N is not a multiple of 4"),
        ({"N": 0}, "N is not a multiple of 4"),
        ({"dtype": 0}, "float32 grad_output"),
        ({"input_width": 4}, "grad_output is not 8-byte aligned"),
        ({"packed_width": 4}, "packed is not 8-byte aligned"),
        ({"K": 2**30}, "N or K is 2^30 or more"),
    ],
)
def test_route(emulated: Any, change: dict[str, int], route: str) -> None:
    assert route_of(emulated, backward=True, **change) == route


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("sms", [1, 20, 108, 132])
@pytest.mark.parametrize(("n", "k"), [(4, 16), (4096, 4096), (14336, 4096), (4096, 14336), (2**29, 16), (64, 2**29)])
def test_splits_fill_the_device_once(emulated: Any, n: int, k: int, sms: int, resident: int) -> None:
    emulated.c.backward_splits_of.restype = ctypes.c_int64
    splits = emulated.c.backward_splits_of(*map(ctypes.c_int64, (n, k, sms, resident)))
    tiles = -(-k // 256)
    assert 1 <= splits <= max(1, -(-n // 16) // 16)  # at least 4 steps a warp
    assert splits == 1 or tiles * splits <= resident * sms  # no second wave
    assert splits <= 65535
