"""Samples and hostile arguments of `lora_linear`, its backward ops and its dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfbyte.testing.calls import ALL_FORMATS, Hostile, OpSpec, Samples, bad_rows, random_packed


def _random_mask(leading: tuple[int, ...], columns: int, device: str) -> Tensor:
    return torch.randint(256, (*leading, (columns + 7) // 8), dtype=torch.uint8, device=device)


def _lora_samples(device: str) -> Samples:
    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    for format in ALL_FORMATS:
        packed, sizes = random_packed(format, 5, 65, device), (format.id, format.block_size, 65)
        yield leaf(3, 65), packed, leaf(5), leaf(2, 65), leaf(5, 2), 0.5, [], *sizes
    packed, sizes = random_packed(ALL_FORMATS[0], 5, 64, device), (0, 64, 64)
    for dtype in (torch.bfloat16, torch.float16):
        x, bias = leaf(2, 9, 64, dtype=dtype), leaf(5, dtype=dtype)
        for adapter in (dtype, torch.float32):
            yield x, packed, bias, leaf(3, 64, dtype=adapter), leaf(5, 3, dtype=adapter), 2.0, [], *sizes
    yield leaf(20, 64), packed, None, leaf(6, 64), leaf(5, 2), 1.0, [3, 0, 2], *sizes  # three linears, one without rows
    yield leaf(0, 64), packed, None, leaf(1, 64), leaf(5, 1), 1.0, [], *sizes
    yield leaf(64), packed[::2], None, leaf(1, 64), leaf(3, 1), 1.0, [], *sizes
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, a, b = leaf(2, 9, 65, dtype=dtype), leaf(3, 65, dtype=dtype), leaf(5, 3, dtype=dtype)
        rows, mask = random_packed(ALL_FORMATS[0], 5, 65, device), _random_mask((2, 9), 65, device)
        yield x, rows, None, a, b, 2.0, [], 0, 64, 65, mask
    yield leaf(0, 64), packed, None, leaf(1, 64), leaf(5, 1), 1.0, [], *sizes, _random_mask((0,), 64, device)


def _lora_hostile(device: str) -> Hostile:
    x, a, b = (torch.randn(shape, device=device) for shape in ((3, 64), (2, 64), (4, 2)))
    packed, sizes = random_packed(ALL_FORMATS[0], 4, 64, device), (0, 64, 64)
    yield from bad_rows(lambda rows, *sizes: (x, rows, None, a, b, 1.0, [], *sizes), device)
    yield (x, packed, torch.ones(3, device=device), a, b, 1.0, [], *sizes), ValueError, "bias must have shape"
    yield (x, packed, None, a.double(), b, 1.0, [], *sizes), ValueError, "lora_A must be float32"
    yield (x, packed, None, a, b.bfloat16(), 1.0, [], *sizes), ValueError, "lora_B must have lora_A's dtype"
    yield (x, packed, None, a[:, 1:], b, 1.0, [], *sizes), ValueError, r"lora_A must have shape \(2, 64\)"
    yield (x, packed, None, a, b[1:], 1.0, [], *sizes), ValueError, r"lora_B must have shape \(4, rank\)"
    yield (x, packed, None, a[:0], b[:, :0], 1.0, [], *sizes), ValueError, "with a rank of at least 1"
    yield (x, packed, None, a, b, 1.0, [2, 2], *sizes), ValueError, r"lora_A must have shape \(4, 64\): one block of 2"
    yield (x, packed, None, a, b, 1.0, [2, 1], *sizes), ValueError, "splits must add up to 4"
    yield (x, packed, None, a, b, 1.0, [5, -1], *sizes), ValueError, "splits must be from 0 to 4"
    mask, beside = _random_mask((3,), 64, device), "mask must have a bit for each of 64 columns, 8 bytes beside"
    yield (x, packed, None, a, b, 1.0, [], *sizes, mask.bool()), ValueError, "mask must be uint8"
    yield (x, packed, None, a, b, 1.0, [], *sizes, mask[:, 1:]), ValueError, beside
    yield (x, packed, None, a, b, 1.0, [], *sizes, mask[1:]), ValueError, beside


def _lora_backward_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        packed, sizes = random_packed(format, 5, 65, device), (format.id, format.block_size, 65)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            adapter = torch.float32 if dtype == torch.bfloat16 else dtype
            grad = torch.randn(3, 5, device=device, dtype=dtype, requires_grad=True)
            low = torch.randn(3, 2, device=device, dtype=adapter, requires_grad=True)
            a = torch.randn(2, 65, device=device, dtype=adapter, requires_grad=True)
            yield grad, packed, low, a, *sizes
            yield grad, packed, low, a, *sizes, _random_mask((3,), 65, device)
    a = torch.randn(2, 65, device=device)
    for mask in (None, _random_mask((3,), 65, device)):
        yield torch.randn(3, 0, device=device), packed[:0], torch.randn(3, 2, device=device), a, *sizes, mask


def _lora_backward_hostile(device: str) -> Hostile:
    grad, low, a = (torch.randn(shape, device=device) for shape in ((3, 2), (3, 5), (5, 64)))
    yield from bad_rows(lambda rows, *sizes: (grad, rows, low, a, *sizes), device)
    packed, sizes = random_packed(ALL_FORMATS[0], 2, 64, device), (0, 64, 64)
    yield (grad, packed, low[1:], a, *sizes), ValueError, "grad_projected must have grad_output's shape"
    yield (grad, packed, low.long(), a, *sizes), ValueError, "grad_projected must be float32"
    yield (grad, packed, low, a[:, :5], *sizes), ValueError, r"lora_A must have shape \(rank, 64\)"
    yield (grad, packed, low, a, *sizes, _random_mask((3,), 65, device)), ValueError, "mask must have a bit for each of 64"


def _adapter_samples(device: str) -> Samples:
    def call(shape: Any, dtype: torch.dtype, adapter: torch.dtype, splits: list[int], *needs: bool) -> tuple[Any, ...]:
        groups, wide = len(splits) or 1, dtype if dtype == adapter else torch.float32
        grad, x = (torch.randn(*shape, size, device=device, dtype=dtype) for size in (5, 65))
        low, more = (torch.randn(*shape, 2 * groups, device=device, dtype=wide) for _ in range(2))
        return grad, x, low, torch.randn(5, 2, device=device, dtype=adapter), more if needs[0] else None, 0.5, splits, *needs

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield call((3, 2), dtype, torch.float32, [], True, True)
        yield call((3,), dtype, dtype, [3, 0, 2], True, False)
        yield *call((3, 2), dtype, dtype, [], True, True), _random_mask((3, 2), 65, device)
    for shape in ((), (0,), (130,)):
        yield call(shape, torch.float32, torch.float32, [], False, True)
        yield *call(shape, torch.float32, torch.float32, [], True, False), _random_mask(shape, 65, device)


def _adapter_hostile(device: str) -> Hostile:
    grad, x, low, b = (torch.randn(shape, device=device) for shape in ((3, 5), (3, 64), (3, 2), (5, 2)))
    rest: tuple[Any, ...] = (None, 1.0, [], True, True)
    yield (grad.bfloat16(), x, low, b, *rest), ValueError, "grad_output must have input's dtype"
    yield (grad, x, low.bfloat16(), b, *rest), ValueError, "projected must be float32"
    yield (grad, x, low, b.double(), *rest), ValueError, "lora_B must be float32"
    yield (grad[:, 1:], x, low, b, *rest), ValueError, r"grad_output must have input's shape .* replaced by 5"
    yield (grad, x[1:], low, b, *rest), ValueError, r"grad_output must have input's shape"
    yield (grad, x, low[:, 1:], b, *rest), ValueError, r"projected must have input's shape .* replaced by 2"
    yield (grad, x, low, b[:, :0], *rest), ValueError, "with a rank of at least 1"
    yield (grad, x, low, b, None, 1.0, [2, 2], True, True), ValueError, "splits must add up to 5"
    yield (grad, x, low, b, low[1:], 1.0, [], True, True), ValueError, "grad_projected must have projected's dtype and shape"
    yield (grad, x, low, b, *rest, _random_mask((2,), 64, device)), ValueError, "mask must have a bit for each of 64 columns"


def _mask_samples(device: str) -> Samples:
    seed = torch.tensor([2**63 - 5], device=device)
    for shape in ((3, 65), (2, 5, 64), (7,), (0, 9), (300, 131)):
        yield torch.randn(shape, device=device), seed, 0.1
    yield torch.randn(4, 9, device=device, dtype=torch.bfloat16), seed[0], 1.0


def _mask_hostile(device: str) -> Hostile:
    x, seed = torch.zeros(3, 65, device=device), torch.tensor([1], device=device)
    yield (x[0, 0], seed, 0.1), ValueError, "input must have at least 1 dimension"
    yield (x, seed.int(), 0.1), ValueError, r"seed must be one int64, got int32 of shape \(1,\)"
    yield (x, seed[:0], 0.1), ValueError, r"seed must be one int64, got int64 of shape \(0,\)"
    for p in (-0.1, 1.5, math.nan):
        yield (x, seed, p), ValueError, f"p must be from 0 to 1, got {p}"


SPECS = {
    "lora_linear": OpSpec(_lora_samples, _lora_hostile, differentiable=True),
    "lora_linear_backward_input": OpSpec(_lora_backward_samples, _lora_backward_hostile, differentiable=True),
    "lora_linear_backward_adapter": OpSpec(_adapter_samples, _adapter_hostile),
    "dropout_mask": OpSpec(_mask_samples, _mask_hostile),
}
