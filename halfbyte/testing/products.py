"""Samples and hostile arguments of products with packed rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfbyte.formats import Format
from halfbyte.testing.calls import _HUGE, ALL_FORMATS, Hostile, OpSpec, Samples, bad_rows, random_packed


def _linear_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            packed = random_packed(format, 5, 65, device)
            bias = torch.randn(5, device=device, dtype=dtype, requires_grad=True)
            x = torch.randn(3, 65, device=device, dtype=dtype, requires_grad=True)
            yield x, packed, bias, format.id, format.block_size, 65
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    for shape in ((64,), (0, 64), (2, 3, 64), (17, 64), (130, 64)):
        yield torch.randn(shape, device=device, requires_grad=True), packed, None, 0, 64, 64
    yield torch.randn(64, 5, device=device).t().requires_grad_(), packed, None, 0, 64, 64  # strided
    yield torch.randn(3, 64, device=device), packed[:0], None, 0, 64, 64  # no outputs
    yield torch.randn(3, 64, device=device), random_packed(ALL_FORMATS[0], 8, 64, device)[::2], None, 0, 64, 64


def _linear_hostile(device: str) -> Hostile:
    x = torch.randn(3, 64, device=device)
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield from bad_rows(lambda rows, *sizes: (x, rows, None, *sizes), device)
    yield (torch.randn(3, 63, device=device), packed, None, 0, 64, 64), ValueError, "last dimension must be in_features=64"
    yield (torch.tensor(1.0, device=device), packed, None, 0, 64, 64), ValueError, "at least 1 dimension"
    yield (x.double(), packed, None, 0, 64, 64), ValueError, "input must be float32"
    yield (x.long(), packed, None, 0, 64, 64), ValueError, "input must be float32"
    yield (x, packed.view(2, 2, -1), None, 0, 64, 64), ValueError, "must have 2 dimensions"
    yield (x, packed, torch.ones(3, device=device), 0, 64, 64), ValueError, "bias must have shape"
    yield (x, packed, torch.ones(1, 4, device=device), 0, 64, 64), ValueError, "bias must have shape"
    yield (x, packed, torch.ones(4, device=device).bfloat16(), 0, 64, 64), ValueError, "bias must have input's dtype"


def _backward_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            grad = torch.randn(3, 5, device=device, dtype=dtype, requires_grad=True)
            yield grad, random_packed(format, 5, 65, device), format.id, format.block_size, 65
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    for shape in ((4,), (0, 4), (2, 3, 4), (130, 4)):
        yield torch.randn(shape, device=device, requires_grad=True), packed, 0, 64, 64
    yield torch.randn(3, 0, device=device), packed[:0], 0, 64, 64


def _backward_hostile(device: str) -> Hostile:
    grad = torch.randn(3, 2, device=device)
    yield from bad_rows(lambda rows, *sizes: (grad, rows, *sizes), device)
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield (grad, packed, 0, 64, 64), ValueError, "last dimension must be out_features=4"
    yield (torch.ones(3, 4, device=device).double(), packed, 0, 64, 64), ValueError, "grad_output must be float32"


def _quantized_input_samples(name: str) -> Callable[[str], Samples]:
    def samples(device: str) -> Samples:
        format = Format.parse(name)
        packed = random_packed(format, 5, 65, device)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for M in (3, 20):
                x = torch.randn(M, 65, device=device, dtype=dtype, requires_grad=True)
                yield x, packed, torch.randn(5, device=device, dtype=dtype, requires_grad=True), 65
        packed = random_packed(format, 16, 64, device)
        for shape in ((64,), (0, 64), (2, 3, 64)):
            yield torch.randn(shape, device=device, requires_grad=True), packed, None, 64
        x, bias = (torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in ((3, 64), (16,)))
        yield x, packed, bias, 64  # what fp8 tensor cores take
        yield torch.randn(64, 5, device=device).t().requires_grad_(), packed[::2], None, 64  # strided
        yield torch.randn(3, 64, device=device), packed[:0], None, 64  # no outputs

    return samples


def _quantized_input_hostile(name: str) -> Callable[[str], Hostile]:
    def hostile(device: str) -> Hostile:
        x, packed = torch.randn(3, 64, device=device), random_packed(Format.parse(name), 4, 64, device)
        for columns in (0, -1, -_HUGE, _HUGE):
            yield (x, packed, None, columns), ValueError, "in_features must be"
        yield (x, packed[:, 16:], None, 64), ValueError, f"packed must have 80 bytes per row for {name}"
        yield (x, packed.float(), None, 64), ValueError, "packed must be uint8"
        yield (x[:, 1:], packed, None, 64), ValueError, "last dimension must be in_features=64"
        yield (x.double(), packed, None, 64), ValueError, "input must be float32"
        yield (x, packed, torch.ones(3, device=device), 64), ValueError, "bias must have shape"
        if name == "int8":
            wide = torch.zeros(1, 2**17 + 16, device=device, dtype=torch.uint8)
            long = torch.zeros(1, 2**17 + 1, device=device)
            yield (long, wide, None, 2**17 + 1), ValueError, "in_features must be at most 131072"

    return hostile


def _memory_samples(device: str) -> Samples:
    for tokens, rows, columns in ((0, 5, 65), (1, 5, 65), (40, 4, 64), (600, 192, 576)):
        for dtype in (torch.float32, torch.bfloat16):
            yield tokens, rows, 0, 64, columns, dtype


def _memory_hostile(device: str) -> Hostile:
    yield (-1, 4, 0, 64, 64, torch.float32), ValueError, "tokens must be from 0 to 2\\^30, got -1"
    yield (1, _HUGE, 0, 64, 64, torch.float32), ValueError, "rows must be from 0 to"
    yield (1, 4, 0, 64, 0, torch.float32), ValueError, "in_features must be from 1 to"
    yield (1, 4, 99, 64, 64, torch.float32), ValueError, "format must be an id"
    yield (1, 4, 0, 64, 64, torch.int8), ValueError, "dtype must be float32"


def _backward_memory_samples(device: str) -> Samples:
    for rank in (0, 16):
        yield from ((*sizes[:2], rank, *sizes[2:]) for sizes in _memory_samples(device))


def _backward_memory_hostile(device: str) -> Hostile:
    yield from (((*sizes[:2], 0, *sizes[2:]), error, text) for sizes, error, text in _memory_hostile(device))
    yield (1, 4, -8, 0, 64, 64, torch.float32), ValueError, "rank must be from 0 to"


def _int8_memory_samples(device: str) -> Samples:
    yield from ((tokens, 192, 576) for tokens in (0, 1, 12, 40, 600))


def _int8_memory_hostile(device: str) -> Hostile:
    yield (-1, 192, 576), ValueError, "tokens must be from 0 to"
    yield (1, 192, _HUGE), ValueError, "in_features must be from 0 to"


SPECS = {
    "linear": OpSpec(_linear_samples, _linear_hostile, differentiable=True),
    "linear_backward_input": OpSpec(_backward_samples, _backward_hostile, differentiable=True),
    "int8_linear": OpSpec(_quantized_input_samples("int8"), _quantized_input_hostile("int8"), differentiable=True),
    "fp8_linear": OpSpec(_quantized_input_samples("fp8"), _quantized_input_hostile("fp8"), differentiable=True),
    "linear_memory": OpSpec(_memory_samples, _memory_hostile),
    "linear_backward_memory": OpSpec(_backward_memory_samples, _backward_memory_hostile),
    "int8_linear_memory": OpSpec(_int8_memory_samples, _int8_memory_hostile),
}
