"""Samples and hostile arguments of every op, for tests that enumerate the registry so that no op can be forgotten.

A new op without an entry in `SPECS` fails `tests/ops/test_registry.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import FORMATS, Format

ALL_FORMATS = tuple(Format.parse(name) for name in (*FORMATS, "nf4:32", "fp4-dq:128"))
"""Every format once, and two block sizes that are not the default."""

AWKWARD_K = (1, 31, 63, 64, 65, 100, 576, 4304)
"""Row lengths that are odd, ragged, shorter than a block or longer than a cache line of scales."""


class Call(tuple[Any, ...]):
    """Positional arguments of one call, with keyword arguments beside them.

    Attributes:
        keywords: the keyword arguments.
    """

    keywords: dict[str, Any]

    @classmethod
    def of(cls, *args: Any, **keywords: Any) -> Call:
        """The call with these arguments."""
        call = cls(args)
        call.keywords = keywords
        return call


def keywords_of(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Keyword arguments of a sample; a plain tuple has none."""
    return arguments.keywords if isinstance(arguments, Call) else {}


@dataclass(frozen=True)
class OpSpec:
    """How to call one op.

    Attributes:
        samples: given a device, yields valid argument tuples (small), or `Call`s where keywords are needed.
        hostile: given a device, yields (arguments, exception type, regular expression of the message).
        differentiable: whether samples include inputs that require grad.
    """

    samples: Callable[[str], Iterator[tuple[Any, ...]]]
    hostile: Callable[[str], Iterator[tuple[tuple[Any, ...], type[Exception], str]]]
    differentiable: bool = False


def registered_ops() -> list[str]:
    """Names of all ops in the `halfbyte` namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.split("::")[1] for name in names if name.startswith("halfbyte::"))


def random_packed(format: Format, rows: int, columns: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """Packed rows of normally distributed numbers; the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator)
    return torch.ops.halfbyte.quantize(dense, format.id, format.block_size).to(device)


def _quantize_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield torch.randn(3, 65, device=device, dtype=dtype), format.id, format.block_size
    yield torch.randn(64, 5, device=device).t(), 0, 64  # strided
    yield torch.randn(2, 3, 64, device=device), 0, 64
    yield torch.randn(0, 64, device=device), 0, 64


def _bad_formats(build: Callable[[int, int], tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    for id, block_size in ((-1, 64), (99, 64), (2**40, 64)):
        yield build(id, block_size), ValueError, "format must be an id"
    for block_size in (0, -64, 48, 16, 8192, 2**62):
        yield build(0, block_size), ValueError, "block_size must be a power of two"
    yield build(4, 64), ValueError, "block_size must be 0 for int8"


def _quantize_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    x = torch.randn(2, 64, device=device)
    yield from _bad_formats(lambda id, size: (x, id, size))
    yield (torch.randn(64, device=device), 0, 64), ValueError, "at least 2 dimensions"
    yield (torch.tensor(1.0, device=device), 0, 64), ValueError, "at least 2 dimensions"
    yield (torch.randn(2, 0, device=device), 0, 64), ValueError, "in_features must be"
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool):
        yield (torch.ones(2, 64, device=device, dtype=dtype), 0, 64), ValueError, "input must be float32"


def _quantize_list_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            shapes = ((3, 64), (2, 65), (5, 8), (1, 576))
            yield [torch.randn(shape, device=device, dtype=dtype) for shape in shapes], format.id, format.block_size
    x = torch.randn(2, 3, 64, device=device)
    yield [torch.randn(64, 5, device=device).t(), x, x[:0]], 0, 64
    yield [x[0, :1]] * 100, 0, 64  # more than a launch takes
    yield [x], 0, 64


def _quantize_list_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    good = torch.randn(2, 64, device=device)
    for (x, format, block_size), error, text in _quantize_hostile(device):
        named = text.replace("in_features must", r"in_features\[1\] must").replace("input must", r"input\[1\] must")
        named = named.replace("at least 2", r"input\[1\] must have at least 2")
        yield ([good, x], format, block_size), error, named
    mixed = [good, good.bfloat16()]
    yield (mixed, 0, 64), ValueError, r"input\[1\] must have the dtype of input\[0\], float32, got bfloat16"


def _scales_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        x = torch.randn(3, 100, device=device)
        yield x, torch.rand(3, format.num_blocks(100), device=device) + 0.5, format.id, format.block_size


def _scales_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    x, scales = torch.randn(2, 128, device=device), torch.ones(2, 2, device=device)
    yield from _bad_formats(lambda id, size: (x, scales, id, size))
    yield (x, torch.ones(2, 3, device=device), 0, 64), ValueError, "scales must have input's shape"
    yield (x, torch.ones(2, device=device), 0, 64), ValueError, "scales must have input's shape"
    yield (x, scales.double(), 0, 64), ValueError, "scales must be float32"


def _in_place_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows = torch.zeros(3, format.row_bytes(65), dtype=torch.uint8, device=device)
            yield rows, torch.randn(3, 65, device=device, dtype=dtype), format.id, format.block_size
    yield torch.zeros(2, 3, 48, dtype=torch.uint8, device=device), torch.randn(2, 3, 64, device=device), 0, 64
    yield torch.zeros(0, 48, dtype=torch.uint8, device=device), torch.randn(0, 64, device=device), 0, 64


def _in_place_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    x, rows = torch.randn(2, 64, device=device), torch.zeros(2, 48, dtype=torch.uint8, device=device)
    yield from _bad_formats(lambda id, size: (rows, x, id, size))
    yield (rows[0], x[0], 0, 64), ValueError, "at least 2 dimensions"
    yield (rows, x.double(), 0, 64), ValueError, "input must be float32"
    yield (rows[:1], x, 0, 64), ValueError, "packed must have input's shape"
    yield (rows.view(2, 1, 48), x, 0, 64), ValueError, "packed must have input's shape"
    yield (rows[:, :32], x, 0, 64), ValueError, "packed must have 48 bytes per row"
    yield (rows.to(torch.int8), x, 0, 64), ValueError, "packed must be uint8"
    yield (torch.zeros(4, 48, dtype=torch.uint8, device=device)[::2], x, 0, 64), ValueError, "packed must be contiguous"


def _moving_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for packed, input, format, block_size in _in_place_samples(device):
        yield packed, input, format, block_size, 0, ""  # one process; tests/distributed runs them on several


def _moving_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    x, rows = torch.randn(2, 64, device=device), torch.zeros(2, 48, dtype=torch.uint8, device=device)
    yield (rows, None, 0, 64, 0, ""), ValueError, "input is missing on the source"
    yield (rows, x, 0, 64, 1, ""), ValueError, "source_rank must be from 0 to 0, got 1"
    yield (rows, x.requires_grad_(), 0, 64, 0, ""), RuntimeError, "input requires grad"


def _dequantize_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield random_packed(format, 3, 65, device), format.id, format.block_size, 65, dtype
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield packed[::2], 0, 64, 64, torch.float32  # rows that are not contiguous
    yield packed.view(2, 2, -1), 0, 64, 64, torch.float32
    yield packed[:0], 0, 64, 64, torch.float32


_HUGE = 2**62


def _bad_rows(build: Callable[..., tuple[Any, ...]], device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    """Wrong rows and sizes, for `build(packed, format, block_size, in_features)`."""
    packed = random_packed(ALL_FORMATS[0], 2, 64, device)
    yield from _bad_formats(lambda id, size: build(packed, id, size, 64))
    for columns in (0, -1, -_HUGE, _HUGE):
        yield build(packed, 0, 64, columns), ValueError, "in_features must be"
    yield build(packed, 0, 64, 4096), ValueError, "packed must have 2304 bytes per row"
    yield build(packed[:, :-1], 0, 64, 64), ValueError, "packed must have 48 bytes per row"
    yield build(packed.to(torch.int8), 0, 64, 64), ValueError, "packed must be uint8"
    yield build(packed.float(), 0, 64, 64), ValueError, "packed must be uint8"
    yield build(packed[0], 0, 64, 64), ValueError, "at least 2 dimensions"


def _dequantize_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    yield from _bad_rows(lambda packed, *sizes: (packed, *sizes, torch.float32), device)
    packed = random_packed(ALL_FORMATS[0], 2, 64, device)
    for dtype in (torch.float64, torch.int32, torch.uint8):
        yield (packed, 0, 64, 64, dtype), ValueError, "dtype must be float32"


def _dequantize_list_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            columns = [64, 65, 8, 576]
            packed = [random_packed(format, n, k, device, n) for n, k in zip((3, 2, 5, 1), columns, strict=True)]
            yield packed, format.id, format.block_size, columns, dtype
    rows = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield [rows[::2], rows.view(2, 2, -1), rows[:0]], 0, 64, [64, 64, 64], torch.float32
    yield [rows[:1]] * 100, 0, 64, [64] * 100, torch.bfloat16  # more than a launch takes
    yield [rows], 0, 64, [64], torch.float32


def _dequantize_list_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    good = random_packed(ALL_FORMATS[0], 2, 64, device)
    # The text names the entry: the bad one is the second.
    for arguments, error, text in _bad_rows(lambda packed, *sizes: (packed, *sizes, torch.float32), device):
        packed, format, block_size, columns, dtype = arguments
        named = text.replace("in_features must", r"in_features\[1\] must").replace("packed must", r"packed\[1\] must")
        named = named.replace("at least 2", r"packed\[1\] must have at least 2")
        yield ([good, packed], format, block_size, [64, columns], dtype), error, named
    lengths = "in_features must have one entry per tensor of packed, 2, got 1"
    yield ([good, good], 0, 64, [64], torch.float32), ValueError, lengths
    yield ([good], 0, 64, [64], torch.float64), ValueError, "dtype must be float32"


def _linear_samples(device: str) -> Iterator[tuple[Any, ...]]:
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


def _linear_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    x = torch.randn(3, 64, device=device)
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield from _bad_rows(lambda rows, *sizes: (x, rows, None, *sizes), device)
    yield (torch.randn(3, 63, device=device), packed, None, 0, 64, 64), ValueError, "last dimension must be in_features=64"
    yield (torch.tensor(1.0, device=device), packed, None, 0, 64, 64), ValueError, "at least 1 dimension"
    yield (x.double(), packed, None, 0, 64, 64), ValueError, "input must be float32"
    yield (x.long(), packed, None, 0, 64, 64), ValueError, "input must be float32"
    yield (x, packed.view(2, 2, -1), None, 0, 64, 64), ValueError, "must have 2 dimensions"
    yield (x, packed, torch.ones(3, device=device), 0, 64, 64), ValueError, "bias must have shape"
    yield (x, packed, torch.ones(1, 4, device=device), 0, 64, 64), ValueError, "bias must have shape"
    yield (x, packed, torch.ones(4, device=device).bfloat16(), 0, 64, 64), ValueError, "bias must have input's dtype"


def _quantized_input_samples(name: str) -> Callable[[str], Iterator[tuple[Any, ...]]]:
    def samples(device: str) -> Iterator[tuple[Any, ...]]:
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


def _quantized_input_hostile(name: str) -> Callable[[str], Iterator[tuple[tuple[Any, ...], type[Exception], str]]]:
    def hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
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


def _backward_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            grad = torch.randn(3, 5, device=device, dtype=dtype, requires_grad=True)
            yield grad, random_packed(format, 5, 65, device), format.id, format.block_size, 65
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    for shape in ((4,), (0, 4), (2, 3, 4), (130, 4)):
        yield torch.randn(shape, device=device, requires_grad=True), packed, 0, 64, 64
    yield torch.randn(3, 0, device=device), packed[:0], 0, 64, 64


def _backward_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    grad = torch.randn(3, 2, device=device)
    yield from _bad_rows(lambda rows, *sizes: (grad, rows, *sizes), device)
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield (grad, packed, 0, 64, 64), ValueError, "last dimension must be out_features=4"
    yield (torch.ones(3, 4, device=device).double(), packed, 0, 64, 64), ValueError, "grad_output must be float32"


def _lora_samples(device: str) -> Iterator[tuple[Any, ...]]:
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


def _random_mask(leading: tuple[int, ...], columns: int, device: str) -> Tensor:
    return torch.randint(256, (*leading, (columns + 7) // 8), dtype=torch.uint8, device=device)


def _lora_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    x, a, b = (torch.randn(shape, device=device) for shape in ((3, 64), (2, 64), (4, 2)))
    packed, sizes = random_packed(ALL_FORMATS[0], 4, 64, device), (0, 64, 64)
    yield from _bad_rows(lambda rows, *sizes: (x, rows, None, a, b, 1.0, [], *sizes), device)
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


def _lora_backward_samples(device: str) -> Iterator[tuple[Any, ...]]:
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


def _lora_backward_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    grad, low, a = (torch.randn(shape, device=device) for shape in ((3, 2), (3, 5), (5, 64)))
    yield from _bad_rows(lambda rows, *sizes: (grad, rows, low, a, *sizes), device)
    packed, sizes = random_packed(ALL_FORMATS[0], 2, 64, device), (0, 64, 64)
    yield (grad, packed, low[1:], a, *sizes), ValueError, "grad_projected must have grad_output's shape"
    yield (grad, packed, low.long(), a, *sizes), ValueError, "grad_projected must be float32"
    yield (grad, packed, low, a[:, :5], *sizes), ValueError, r"lora_A must have shape \(rank, 64\)"
    yield (grad, packed, low, a, *sizes, _random_mask((3,), 65, device)), ValueError, "mask must have a bit for each of 64"


def _adapter_samples(device: str) -> Iterator[tuple[Any, ...]]:
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


def _adapter_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
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


def _mask_samples(device: str) -> Iterator[tuple[Any, ...]]:
    seed = torch.tensor([2**63 - 5], device=device)
    for shape in ((3, 65), (2, 5, 64), (7,), (0, 9), (300, 131)):
        yield torch.randn(shape, device=device), seed, 0.1
    yield torch.randn(4, 9, device=device, dtype=torch.bfloat16), seed[0], 1.0


def _mask_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    x, seed = torch.zeros(3, 65, device=device), torch.tensor([1], device=device)
    yield (x[0, 0], seed, 0.1), ValueError, "input must have at least 1 dimension"
    yield (x, seed.int(), 0.1), ValueError, r"seed must be one int64, got int32 of shape \(1,\)"
    yield (x, seed[:0], 0.1), ValueError, r"seed must be one int64, got int64 of shape \(0,\)"
    for p in (-0.1, 1.5, math.nan):
        yield (x, seed, p), ValueError, f"p must be from 0 to 1, got {p}"


def _embedding_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        packed = random_packed(format, 7, 65, device)
        yield torch.tensor([[0, 6], [3, 3]], device=device), packed, format.id, format.block_size, 65, torch.float32
    packed = random_packed(ALL_FORMATS[0], 7, 64, device)
    yield torch.tensor(3, device=device), packed, 0, 64, 64, torch.bfloat16
    yield torch.tensor([1, 2], device=device, dtype=torch.int32), packed, 0, 64, 64, torch.float16
    yield torch.zeros(0, dtype=torch.int64, device=device), packed, 0, 64, 64, torch.float32
    yield torch.arange(6, device=device).view(2, 3).t(), packed, 0, 64, 64, torch.float32


def _embedding_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    ids = torch.tensor([0, 1], device=device)
    yield from _bad_rows(lambda rows, *sizes: (ids, rows, *sizes, torch.float32), device)
    packed = random_packed(ALL_FORMATS[0], 2, 64, device)
    yield (ids.float(), packed, 0, 64, 64, torch.float32), ValueError, "indices must be int64 or int32"
    if device == "cpu":  # CUDA asserts on the device, as torch's own embedding does
        for bad in (2, -1, 2**62):
            yield (torch.tensor([0, bad]), packed, 0, 64, 64, torch.float32), IndexError, "indices must be from 0 to 1"


def _feedback_samples(device: str) -> Iterator[tuple[Any, ...]]:
    for format in ALL_FORMATS:
        weight = torch.randn(5, 100, device=device)
        factor = torch.eye(100, device=device) + 0.1 * torch.randn(100, 100, device=device).triu(1)
        ones, candidates = torch.ones(100, device=device), torch.tensor([1.0, 0.9], device=device)
        yield weight, factor, ones, None, candidates, format.id, format.block_size
        scales = torch.rand(5, format.num_blocks(100), device=device) + 0.5
        yield weight, factor, ones, scales, candidates[:0], format.id, format.block_size
    yield weight, None, ones, None, candidates, 0, 64
    yield weight[:0], factor, ones, None, candidates, 0, 64
    yield torch.randn(100, 3, device=device).t(), factor.t().contiguous().t(), ones, None, candidates, 0, 64  # strided


def _feedback_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    w, u, d = torch.randn(3, 64, device=device), torch.eye(64, device=device), torch.ones(64, device=device)
    c = torch.ones(2, device=device)
    yield from _bad_formats(lambda id, size: (w, u, d, None, c, id, size))
    yield (w.bfloat16(), u, d, None, c, 0, 64), ValueError, "weight must be float32"
    yield (w[0], u, d, None, c, 0, 64), ValueError, "weight must have 2 dimensions"
    yield (w, u.double(), d, None, c, 0, 64), ValueError, "factor must be float32"
    yield (w, u[:63], d, None, c, 0, 64), ValueError, r"factor must have shape \(in_features, in_features\)"
    yield (w, u, d[:63], None, c, 0, 64), ValueError, r"importance must have shape \(in_features,\)"
    scales = torch.ones(3, 2, device=device)
    yield (w, u, d, scales, c, 0, 64), ValueError, r"scales must have shape \(out_features, num_blocks\)"
    yield (w, u, d, None, c[:0], 0, 64), ValueError, "candidates must not be empty"
    yield (w, u, d, None, u, 0, 64), ValueError, "candidates must have 1 dimension"


def _no_arguments(device: str) -> Iterator[tuple[Any, ...]]:
    yield ()


def _nothing_hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
    yield from ()


_OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {  # moments, hyper-parameters
    "adamw8bit_step_": (2, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}),
    "adam8bit_step_": (2, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}),
    "lion8bit_step_": (1, {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01}),
    "sgd8bit_step_": (1, {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": True}),
}


def _optimizer_call(name: str, device: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, **changes: Any) -> Call:
    moments, hyper = _OPTIMIZERS[name]
    params = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    lists: list[list[Tensor]] = [params, [torch.randn_like(p) for p in params]]
    for moment in range(moments):
        zero = 127 if moment == 0 else 0  # the codes of 0.0 in the signed and in the unsigned map
        lists.append([torch.full(p.shape, zero, dtype=torch.uint8, device=device) for p in params])
        rows = [(1, p.numel()) if p.dim() == 1 else (p.shape[0], p[0].numel()) for p in params]
        lists.append([torch.zeros(n, -(-k // 256), device=device) for n, k in rows])
    steps = [torch.ones((), device=device)] if params else []
    return Call.of(*lists, steps, **{"lr": 1e-3, **hyper, **changes})


def _optimizer_samples(name: str) -> Callable[[str], Iterator[tuple[Any, ...]]]:
    def samples(device: str) -> Iterator[tuple[Any, ...]]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield _optimizer_call(name, device, ((300,), (17, 33), (2, 3, 300)), dtype)
        yield _optimizer_call(name, device, ((4, 256),), torch.bfloat16, maximize=True, seed=7, element_offsets=[11])
        one = torch.ones((), device=device)
        yield _optimizer_call(name, device, ((4, 256),), torch.float32, lr_tensor=one, grad_scale=one, found_inf=one)

    return samples


def _optimizer_hostile(name: str) -> Callable[[str], Iterator[tuple[tuple[Any, ...], type[Exception], str]]]:
    def changed(device: str, **changes: Any) -> Call:
        return _optimizer_call(name, device, ((4, 300),), torch.float32, **changes)

    def with_list(device: str, position: int, value: list[Tensor]) -> Call:
        call = changed(device)
        return Call.of(*call[:position], value, *call[position + 1 :], **call.keywords)

    def hostile(device: str) -> Iterator[tuple[tuple[Any, ...], type[Exception], str]]:
        p = torch.randn(4, 300, device=device)
        yield with_list(device, 1, []), ValueError, "must have one entry per parameter"
        yield with_list(device, 1, [p[:3]]), ValueError, r"grads\[0\] must have params\[0\]'s shape"
        yield with_list(device, 0, [p.double()]), ValueError, "must be float32, bfloat16 or float16"
        yield with_list(device, 0, [torch.randn(300, 4, device=device).t()]), ValueError, "must be contiguous"
        yield with_list(device, 2, [torch.zeros(4, 300, device=device)]), ValueError, r"codes\[0\] must be uint8"
        yield with_list(device, 3, [torch.zeros(4, 1, device=device)]), ValueError, r"scales\[0\] must have shape \(4, 2\)"
        yield changed(device, weight_decay=-0.1), ValueError, "weight_decay must not be negative"
        yield changed(device, element_offsets=[1, 2]), ValueError, "element_offsets must be empty or have one entry"

    return hostile


SPECS: dict[str, OpSpec] = {
    "quantize": OpSpec(_quantize_samples, _quantize_hostile),
    "quantize_list": OpSpec(_quantize_list_samples, _quantize_list_hostile),
    "quantize_with_scales": OpSpec(_scales_samples, _scales_hostile),
    "quantize_": OpSpec(_in_place_samples, _in_place_hostile),
    "quantize_broadcast_": OpSpec(_moving_samples, _moving_hostile),
    "quantize_scatter_": OpSpec(_moving_samples, _moving_hostile),
    "dequantize": OpSpec(_dequantize_samples, _dequantize_hostile),
    "dequantize_list": OpSpec(_dequantize_list_samples, _dequantize_list_hostile),
    "linear": OpSpec(_linear_samples, _linear_hostile, differentiable=True),
    "linear_backward_input": OpSpec(_backward_samples, _backward_hostile, differentiable=True),
    "int8_linear": OpSpec(_quantized_input_samples("int8"), _quantized_input_hostile("int8"), differentiable=True),
    "fp8_linear": OpSpec(_quantized_input_samples("fp8"), _quantized_input_hostile("fp8"), differentiable=True),
    "lora_linear": OpSpec(_lora_samples, _lora_hostile, differentiable=True),
    "lora_linear_backward_input": OpSpec(_lora_backward_samples, _lora_backward_hostile, differentiable=True),
    "lora_linear_backward_adapter": OpSpec(_adapter_samples, _adapter_hostile),
    "dropout_mask": OpSpec(_mask_samples, _mask_hostile),
    "embedding": OpSpec(_embedding_samples, _embedding_hostile),
    "error_feedback": OpSpec(_feedback_samples, _feedback_hostile),
    "cpu_isa": OpSpec(_no_arguments, _nothing_hostile),
    "clear_workspace": OpSpec(_no_arguments, _nothing_hostile),
    "workspace_bytes": OpSpec(_no_arguments, _nothing_hostile),
    **{name: OpSpec(_optimizer_samples(name), _optimizer_hostile(name)) for name in _OPTIMIZERS},
}
"""Every op of the registry."""
