"""The small-batch linear kernel of csrc/cuda, run on the CPU with emulated tensor cores, and the choice of route."""

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


def run(emulated: Any, x: Tensor, packed: Tensor, fmt: Format, bias: Tensor | None = None, splits: int = 1) -> Tensor:
    return packed_product(emulated, "small", x, packed, fmt, x.shape[1], bias, splits)


def check(y: Tensor, x: Tensor, packed: Tensor, fmt: Format, bias: Tensor | None = None) -> None:
    """Codebook values are rounded to 16 bits."""
    check_product(y, x, decoded(packed, fmt, x.shape[1]).T, bias, ROUNDING[x.dtype])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4-dq", "fp4-dq:128", "nf4:512"])
def test_values(emulated: Any, name: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(0)
    # K of one step; less than a round of 8 warps; ragged rounds; N with rows missing in the last tile.
    for m, n, k in [(1, 16, 64), (3, 40, 576), (8, 5, 2240), (9, 16, 128), (16, 17, 1152)]:
        x = torch.randn(m, k, generator=generator).to(dtype)
        packed = halfbyte.quantize(torch.randn(n, k, generator=generator), fmt)
        bias = torch.randn(n, generator=generator).to(dtype)
        check(run(emulated, x, packed, fmt), x, packed, fmt)
        check(run(emulated, x, packed, fmt, bias), x, packed, fmt, bias)
        addend = torch.randn(m, n, generator=generator).to(dtype)  # lora_linear's branch
        for splits in (1, 2):
            check(run(emulated, x, packed, fmt, addend, splits), x, packed, fmt, addend)


@pytest.mark.parametrize("splits", [2, 3, 9])
def test_splits_are_added_and_repeatable(emulated: Any, splits: int) -> None:
    fmt = Format.parse("nf4")
    x = torch.randn(4, 576).to(torch.bfloat16)
    packed = halfbyte.quantize(torch.randn(20, 576), fmt)
    bias = torch.randn(20).to(torch.bfloat16)
    y = run(emulated, x, packed, fmt, bias, splits)
    check(y, x, packed, fmt, bias)
    with scheduled(emulated, reverse=True):
        assert torch.equal(run(emulated, x, packed, fmt, bias, splits), y)


def test_a_row_does_not_depend_on_its_batch(emulated: Any) -> None:
    fmt = Format.parse("nf4-dq")
    x = torch.randn(16, 576).to(torch.bfloat16)
    packed = halfbyte.quantize(torch.randn(24, 576), fmt)
    whole = run(emulated, x, packed, fmt)
    for m in (1, 2, 8, 9):
        assert torch.equal(run(emulated, x[:m].contiguous(), packed, fmt), whole[:m])


def test_an_invalid_block_gives_nan_in_its_row_only(emulated: Any) -> None:
    fmt = Format.parse("nf4")
    weight = torch.randn(20, 128)
    weight[3, 70] = float("inf")
    y = run(emulated, torch.randn(2, 128).to(torch.float16), halfbyte.quantize(weight, fmt), fmt)
    assert y[:, 3].isnan().all()
    assert y[:, [i for i in range(20) if i != 3]].isfinite().all()


def test_more_tiles_than_thread_blocks(emulated: Any) -> None:
    """The emulated device has 2 multiprocessors, 4 resident blocks: 10 tiles make them loop."""
    fmt = Format.parse("nf4")
    x, packed = torch.randn(2, 64).to(torch.bfloat16), halfbyte.quantize(torch.randn(150, 64), fmt)
    check(run(emulated, x, packed, fmt), x, packed, fmt)


@pytest.mark.parametrize(
    ("change", "route"),
    [
        ({}, "small"),
        ({"M": 1}, "small"),
        ({"M": 17}, "tiled"),
        ({"M": 128}, "tiled"),
        ({"M": 129}, "M is past kTiledM"),
        ({"M": 0}, "nothing to multiply"),
        ({"M": 16, "wgmma": 1}, "small"),
        ({"M": 17, "wgmma": 1}, "tiled"),
        ({"M": 32, "wgmma": 1}, "tiled"),
        ({"M": 33, "wgmma": 1}, "wgmma"),
        ({"M": 256, "wgmma": 1}, "wgmma"),
        ({"M": 257, "wgmma": 1, "N": 8192, "K": 4096}, "M is past kWgmmaM"),  # 2^25 elements
        ({"M": 257, "wgmma": 1, "N": 8193, "K": 4096}, "wgmma"),
        ({"M": 512, "wgmma": 1, "N": 8192, "K": 8192}, "wgmma"),
        ({"M": 513, "wgmma": 1, "N": 8192, "K": 8192}, "M is past kWgmmaM"),
        ({"M": 100, "wgmma": 1, "packed_width": 8}, "packed is not 16-byte aligned"),
        ({"M": 200, "wgmma": 1, "block_size": 32}, "block size 32"),
        ({"M": 200, "wgmma": 1, "dtype": 0}, "float32 input"),
        ({"M": 2000, "wgmma": 1, "forced": 3}, "wgmma"),
        ({"M": 2000, "wgmma": 1, "forced": 1}, "tiled"),
        ({"M": 2000, "wgmma": 0, "forced": 3}, "dense"),
        ({"M": 17, "forced": 0}, "dense"),
        ({"M": 8, "wgmma": 1, "forced": 3}, "wgmma"),
        ({"M": 8, "forced": 2}, "dense"),
        ({"M": 8, "forced": 1, "K": 4304}, "K is not a multiple of 64"),
        ({"N": 0}, "nothing to compute"),
        ({"format": 4, "block_size": 4096}, "not a 4-bit format"),
        ({"block_size": 32}, "block size 32"),
        ({"K": 4304}, "K is not a multiple of 64"),
        ({"dtype": 0}, "float32 input"),
        ({"input_width": 8}, "input is not 16-byte aligned"),
        ({"packed_width": 8}, "packed is not 16-byte aligned"),
        ({"N": 2**31}, "N is 2^31 or more"),
        ({"M": 100, "N": 2**31 - 1, "K": 2**31 - 64, "format": 3, "dtype": 2}, "tiled"),
        ({"M": 64, "packed_width": 8}, "packed is not 16-byte aligned"),
    ],
)
def test_route(emulated: Any, change: dict[str, int], route: str) -> None:
    assert route_of(emulated, backward=False, **change) == route


@pytest.mark.parametrize("sms", [1, 20, 108, 132])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 64), (16, 2**20), (576, 1536), (4096, 4096), (14336, 4096), (28672, 8192), (2**31 - 1, 64)]
)
def test_plan_covers_the_weight_and_fills_the_device(emulated: Any, n: int, k: int, sms: int) -> None:
    out = (ctypes.c_int64 * 3)()
    emulated.c.small_plan_of(ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_int64(sms), out)
    tiles, splits, grid = out
    assert (tiles - 1) * 16 < n <= tiles * 16
    assert 1 <= grid <= tiles
    assert 1 <= splits <= max(1, k // 64 // 32)  # at least 4 steps a warp
    per_split = -(-(k // 64) // splits)
    assert per_split * splits >= k // 64
    assert grid * splits <= max(2 * sms, 1) or grid == 1 or splits == 1
    assert grid * splits >= min(2 * sms, tiles) // 2
