"""What the products with packed rows take on CUDA during a call: the rules of csrc/cuda/linear_route.h, without its kernels.

A plan needs neither a GPU nor the CUDA library. `tests/cuda/test_emulated_plan.py` compares its rules with the C++.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["backward_bytes", "linear_bytes"]

_SMALL_M, _TILED_M, _BACKWARD_M = 16, 128, 32
# Where the device has wgmma: the tiled kernel's largest M, and the wgmma kernels'.
_BESIDE_WGMMA_M, _WGMMA_M, _WGMMA_LARGE_M, _BACKWARD_WGMMA_M = 32, 256, 512, 256
_LARGE_WEIGHT = 1 << 25  # elements
_CHUNK = 64  # elements of a step of the forward kernels
_H200 = 132, (9, 0)  # multiprocessors and compute capability, where no GPU says otherwise


def linear_bytes(tokens: int, rows: int, columns: int, format: int, block_size: int, dtype: torch.dtype) -> int:
    """Temporary bytes of input (tokens, columns) times packed (rows, ...): sums of splits, or the decoded weight."""
    takes = format < 4 and block_size >= _CHUNK and columns % _CHUNK == 0 and dtype != torch.float32
    multiprocessors, capability = _device()
    wgmma = capability == (9, 0)
    most = _TILED_M if not wgmma else _WGMMA_LARGE_M if rows * columns > _LARGE_WEIGHT else _WGMMA_M
    if takes and 1 <= tokens <= most:
        beside = wgmma and tokens > _BESIDE_WGMMA_M
        splits = small_splits if tokens <= _SMALL_M else wgmma_splits if beside else tiled_splits
        return _sums(splits(rows, columns, multiprocessors), tokens, rows)
    return rows * columns * dtype.itemsize


def backward_bytes(tokens: int, rows: int, columns: int, format: int, dtype: torch.dtype) -> int:
    """The same for grad_output (tokens, rows) times packed."""
    takes = format < 4 and columns % 16 == 0 and rows % 4 == 0 and dtype != torch.float32
    multiprocessors, capability = _device()
    wgmma = capability == (9, 0) and rows % 8 == 0  # it takes 16 bytes of gradients at a time, 8 rows
    if takes and wgmma and _SMALL_M < tokens <= _BACKWARD_WGMMA_M:
        return _sums(backward_wgmma_splits(rows, columns, multiprocessors), tokens, columns)
    if takes and 1 <= tokens <= _BACKWARD_M:
        resident = 2 if tokens <= _SMALL_M else 1
        return _sums(backward_splits(rows, columns, multiprocessors, resident), tokens, columns)
    return rows * columns * dtype.itemsize


def small_splits(rows: int, columns: int, multiprocessors: int) -> int:
    """Ranges of K that the kernel for up to 16 tokens adds up (`small_plan`)."""
    wanted = multiprocessors * 2 // -(-rows // 16)
    return min(max(1, wanted), max(1, columns // _CHUNK // 32))


def tiled_splits(rows: int, columns: int, multiprocessors: int) -> int:
    """The same of the kernel for 17 to 128 tokens: the number that is done first."""
    return _least_splits(-(-rows // 256), columns, multiprocessors, unit=1, start=2, sums=5, second=5)


def wgmma_splits(rows: int, columns: int, multiprocessors: int) -> int:
    """The same of the wgmma kernel."""
    return _least_splits(-(-rows // 128), columns, multiprocessors, unit=4, start=4, sums=8, second=6)


def backward_wgmma_splits(rows: int, columns: int, multiprocessors: int) -> int:
    """Ranges of N that backward's wgmma kernel adds up."""
    return wgmma_splits(columns, -(-rows // _CHUNK) * _CHUNK, multiprocessors)


def _least_splits(tiles: int, columns: int, multiprocessors: int, *, unit: int, start: int, sums: int, second: int) -> int:
    units = -(-(columns // _CHUNK) // unit)

    def cost(wanted: int) -> tuple[int, int]:
        length = -(-units // wanted)
        splits = -(-units // length)
        waves = -(-tiles * splits // multiprocessors)
        several = splits > 1
        return waves * (length * unit + start + (sums if several else 0)) + (second if several else 0), splits

    found = min((cost(wanted) for wanted in range(1, min(units, 64) + 1)), key=lambda each: each[0], default=(0, 1))
    return found[1]


def backward_splits(rows: int, columns: int, multiprocessors: int, resident: int) -> int:
    """Ranges of N that the backward kernel adds up, with `resident` CTAs a multiprocessor."""
    wanted = multiprocessors * resident // -(-columns // 256)
    return min(max(1, wanted), max(1, -(-rows // 16) // 16))


def _sums(splits: int, tokens: int, columns: int) -> int:
    return splits * tokens * columns * 4 if splits > 1 else 0


@functools.cache
def _device() -> tuple[int, tuple[int, int]]:
    """Multiprocessors and compute capability. A library built without sm_90a has no wgmma and makes other splits."""
    if not torch.cuda.is_available():
        return _H200
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(device.multi_processor_count), (int(device.major), int(device.minor))
