"""The arithmetic of csrc/cuda/elements.h and geometry.h, compiled for the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte


def floats_of_interest() -> np.ndarray:
    """Every bfloat16 value that is not NaN, a million random bit patterns and a million values around [-1, 1]."""
    bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    random = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    uniform = np.random.default_rng(1).uniform(-1.2, 1.2, 1_000_000).astype(np.float32)
    values = np.concatenate([bf16, random, uniform])
    return np.ascontiguousarray(values[~np.isnan(values)])


def thresholds() -> np.ndarray:
    """The midpoints of both codebooks, and four floats to either side of each."""
    every_code = torch.arange(16, dtype=torch.uint8).repeat(1, 4)
    books = []
    for name in ("nf4:32", "fp4:32"):
        packed = halfbyte.quantize(torch.ones(1, 32), name)
        packed[:, :16] = every_code[:, :16] * 17
        books.append(np.sort(halfbyte.dequantize(packed, name, 32, torch.float32).double().numpy()[0, ::2]))
    middles = np.concatenate([(book[1:] + book[:-1]) / 2 for book in books]).astype(np.float32)
    around = middles.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)[None]
    values = np.ascontiguousarray(around.reshape(-1)).view(np.float32)
    return values[~np.isnan(values)]


@pytest.mark.parametrize("fp4", [0, 1])
def test_bucket_encoder_counts_thresholds(emulated: Any, fp4: int) -> None:
    for values in (floats_of_interest(), thresholds()):
        pointer = values.ctypes.data_as(ctypes.c_void_p)
        emulated.c.check_encode_4bit.restype = ctypes.c_int64
        wrong = emulated.c.check_encode_4bit(pointer, ctypes.c_int64(len(values)), fp4)
        assert wrong == -1, f"v = {values[wrong]!r}"


@pytest.mark.slow
@pytest.mark.parametrize("fp4", [0, 1])
def test_bucket_encoder_on_every_float_up_to_two(emulated: Any, fp4: int) -> None:
    emulated.c.check_encode_4bit.restype = ctypes.c_int64
    for sign in (0, 0x80000000):
        for start in range(0, 0x40000000, 1 << 26):
            values = (np.arange(start, start + (1 << 26), dtype=np.uint32) | np.uint32(sign)).view(np.float32)
            wrong = emulated.c.check_encode_4bit(values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(values)), fp4)
            assert wrong == -1, f"v = {values[wrong]!r}"


def test_fp8_decodes_like_torch(emulated: Any) -> None:
    got = np.empty(256, dtype=np.float32)
    emulated.c.fp8_decode_all(got.ctypes.data_as(ctypes.c_void_p))
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got[:127]), np.signbit(expected[:127]))  # -0 too
    assert np.array_equal(np.signbit(got[128:255]), np.signbit(expected[128:255]))


def test_fp8_encodes_like_torch_with_saturation(emulated: Any) -> None:
    values = floats_of_interest()
    codes = np.empty(len(values), dtype=np.uint8)
    emulated.c.fp8_encode(
        values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(values)), codes.ctypes.data_as(ctypes.c_void_p)
    )
    expected = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(codes, expected)


def test_fast_division_is_exact(emulated: Any) -> None:
    divisors = {
        1,
        2,
        3,
        5,
        6,
        7,
        8,
        9,
        72,
        512,
        513,
        538,
        4096,
        14336,
        2**16 - 1,
        2**16 + 1,
        2**30,
        2**30 + 1,
        2**31 - 2,
        2**31 - 1,
    }
    divisors |= {int(d) for d in np.random.default_rng(0).integers(1, 2**31, 2000)}
    emulated.c.check_divisor.restype = ctypes.c_int64
    assert {d: n for d in divisors if (n := emulated.c.check_divisor(ctypes.c_uint32(d)))} == {}


def tiles(emulated: Any, rows: int, items: int, most: int = 4096) -> list[tuple[int, int, int, int]]:
    out = np.zeros((most, 4), dtype=np.int64)
    emulated.c.tiles_of.restype = ctypes.c_int64
    count = emulated.c.tiles_of(
        ctypes.c_int64(rows), ctypes.c_int64(items), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(most)
    )
    assert count < most
    return [tuple(map(int, row)) for row in out[:count]]


@pytest.mark.parametrize(
    ("rows", "items"),
    [
        (1, 1),
        (4096, 512),
        (2**31, 1),
        (2**31 + 5, 3),
        (2**22, 2**10),
        (1, 2**31 - 1),
        (3, 2**31),
        (2, 2**33 + 7),
        (2**35, 1),
    ],
)
def test_tiles_cover_the_grid_once(emulated: Any, rows: int, items: int) -> None:
    parts = tiles(emulated, rows, items)
    assert sum(r * c for _, r, _, c in parts) == rows * items
    assert all(r * c < 2**31 for _, r, _, c in parts)  # 32-bit indices
    row, item = 0, 0
    for first_row, count, first_item, columns in parts:  # in order, row ranges outside, column ranges inside
        assert (first_row, first_item) == (row, item)
        item += columns
        if item == items:
            row, item = row + count, 0
    assert (row, item) == (rows, 0)


@pytest.mark.parametrize(("rows", "items"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_cover(emulated: Any, rows: int, items: int) -> None:
    assert tiles(emulated, rows, items) == []


@pytest.mark.parametrize(
    ("address", "pitch", "width"),
    [(0x1000, 64, 16), (0x1008, 64, 8), (0x1000, 200, 8), (0x1004, 64, 4), (0x1000, 2, 2), (0x1001, 64, 1), (0x1000, 65, 1)],
)
def test_access_width(emulated: Any, address: int, pitch: int, width: int) -> None:
    assert emulated.c.access_width_of(ctypes.c_uint64(address), ctypes.c_int64(pitch)) == width
