"""What plans say of the products on CUDA (halfbyte/memory/cuda_kernels.py) against the rules of csrc/cuda/linear_route.h."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch

from halfbyte.memory import cuda_kernels as kernels

from .conftest import route_of

SIZES = [16, 48, 64, 192, 576, 1024, 1536, 4096, 14336, 28672, 128256]
MULTIPROCESSORS = [1, 30, 108, 132, 144]
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def test_splits_are_those_of_the_kernels(emulated: Any) -> None:
    c, wide = emulated.c, ctypes.c_int64
    c.tiled_splits_of.restype = c.wgmma_splits_of.restype = wide
    c.backward_splits_of.restype = c.backward_wgmma_splits_of.restype = wide
    plan = (wide * 3)()
    for n, k, sms in itertools.product(SIZES, SIZES, MULTIPROCESSORS):
        if k % 64 == 0:
            c.small_plan_of(wide(n), wide(k), wide(sms), plan)
            assert kernels.small_splits(n, k, sms) == plan[1], (n, k, sms)
            assert kernels.tiled_splits(n, k, sms) == c.tiled_splits_of(wide(n), wide(k), wide(sms)), (n, k, sms)
            assert kernels.wgmma_splits(n, k, sms) == c.wgmma_splits_of(wide(n), wide(k), wide(sms)), (n, k, sms)
        expected = c.backward_wgmma_splits_of(wide(n), wide(k), wide(sms))
        assert kernels.backward_wgmma_splits(n, k, sms) == expected, (n, k, sms)
        for resident in (1, 2):
            expected = c.backward_splits_of(*map(wide, (n, k, sms, resident)))
            assert kernels.backward_splits(n, k, sms, resident) == expected, (n, k, sms, resident)


@pytest.mark.parametrize("wgmma", [0, 1])
@pytest.mark.parametrize("dtype", DTYPE_IDS, ids=str)
def test_bytes_are_those_of_the_route(
    emulated: Any, dtype: torch.dtype, wgmma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoded weight where the route is dense, else the sums of as many splits as the kernel makes."""
    monkeypatch.setattr(kernels, "_device", lambda: (132, (9, 0) if wgmma else (8, 0)))
    tokens = (1, 16, 17, 32, 33, 128, 129, 256, 257, 512, 513, 4096)
    rows, columns = (12, 16, 18, 1024, 8192, 8193), (48, 64, 100, 4096)
    for m, n, k, format, block in itertools.product(tokens, rows, columns, (0, 2, 4), (32, 64)):
        sizes = {"M": m, "N": n, "K": k, "format": format, "block_size": block, "dtype": DTYPE_IDS[dtype], "wgmma": wgmma}
        pitch = 16 if n % 8 == 0 else 8  # of rows of gradients
        dense = n * k * dtype.itemsize
        forward = kernels.linear_bytes(m, n, k, format, block, dtype)
        of_route = {"small": kernels.small_splits, "tiled": kernels.tiled_splits, "wgmma": kernels.wgmma_splits}
        splits = of_route.get(route_of(emulated, backward=False, **sizes))
        count = splits(n, k, 132) if splits else 0
        assert forward == (dense if splits is None else count * m * n * 4 * (count > 1)), sizes
        backward = kernels.backward_bytes(m, n, k, format, dtype)
        route = route_of(emulated, backward=True, **sizes, input_width=pitch)
        resident = {"small": 2, "tiled": 1}.get(route)
        count = kernels.backward_splits(n, k, 132, resident) if resident else kernels.backward_wgmma_splits(n, k, 132)
        assert backward == (count * m * k * 4 * (count > 1) if resident or route == "wgmma" else dense), sizes
