"""Samples and hostile arguments of the ops that write packed rows, and of those that decode them."""

from __future__ import annotations

import torch

from halfbyte.testing.calls import ALL_FORMATS, Hostile, OpSpec, Samples, bad_formats, bad_rows, random_packed


def _quantize_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield torch.randn(3, 65, device=device, dtype=dtype), format.id, format.block_size
    yield torch.randn(64, 5, device=device).t(), 0, 64  # strided
    yield torch.randn(2, 3, 64, device=device), 0, 64
    yield torch.randn(0, 64, device=device), 0, 64


def _quantize_hostile(device: str) -> Hostile:
    x = torch.randn(2, 64, device=device)
    yield from bad_formats(lambda id, size: (x, id, size))
    yield (torch.randn(64, device=device), 0, 64), ValueError, "at least 2 dimensions"
    yield (torch.tensor(1.0, device=device), 0, 64), ValueError, "at least 2 dimensions"
    yield (torch.randn(2, 0, device=device), 0, 64), ValueError, "in_features must be"
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool):
        yield (torch.ones(2, 64, device=device, dtype=dtype), 0, 64), ValueError, "input must be float32"


def _quantize_list_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            shapes = ((3, 64), (2, 65), (5, 8), (1, 576))
            yield [torch.randn(shape, device=device, dtype=dtype) for shape in shapes], format.id, format.block_size
    x = torch.randn(2, 3, 64, device=device)
    yield [torch.randn(64, 5, device=device).t(), x, x[:0]], 0, 64
    yield [x[0, :1]] * 100, 0, 64  # more than a launch takes
    yield [x], 0, 64


def _quantize_list_hostile(device: str) -> Hostile:
    good = torch.randn(2, 64, device=device)
    for (x, format, block_size), error, text in _quantize_hostile(device):
        named = text.replace("in_features must", r"in_features\[1\] must").replace("input must", r"input\[1\] must")
        named = named.replace("at least 2", r"input\[1\] must have at least 2")
        yield ([good, x], format, block_size), error, named
    mixed = [good, good.bfloat16()]
    yield (mixed, 0, 64), ValueError, r"input\[1\] must have the dtype of input\[0\], float32, got bfloat16"


def _scales_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        x = torch.randn(3, 100, device=device)
        yield x, torch.rand(3, format.num_blocks(100), device=device) + 0.5, format.id, format.block_size


def _scales_hostile(device: str) -> Hostile:
    x, scales = torch.randn(2, 128, device=device), torch.ones(2, 2, device=device)
    yield from bad_formats(lambda id, size: (x, scales, id, size))
    yield (x, torch.ones(2, 3, device=device), 0, 64), ValueError, "scales must have input's shape"
    yield (x, torch.ones(2, device=device), 0, 64), ValueError, "scales must have input's shape"
    yield (x, scales.double(), 0, 64), ValueError, "scales must be float32"


def _in_place_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows = torch.zeros(3, format.row_bytes(65), dtype=torch.uint8, device=device)
            yield rows, torch.randn(3, 65, device=device, dtype=dtype), format.id, format.block_size
    yield torch.zeros(2, 3, 48, dtype=torch.uint8, device=device), torch.randn(2, 3, 64, device=device), 0, 64
    yield torch.zeros(0, 48, dtype=torch.uint8, device=device), torch.randn(0, 64, device=device), 0, 64


def _in_place_hostile(device: str) -> Hostile:
    x, rows = torch.randn(2, 64, device=device), torch.zeros(2, 48, dtype=torch.uint8, device=device)
    yield from bad_formats(lambda id, size: (rows, x, id, size))
    yield (rows[0], x[0], 0, 64), ValueError, "at least 2 dimensions"
    yield (rows, x.double(), 0, 64), ValueError, "input must be float32"
    yield (rows[:1], x, 0, 64), ValueError, "packed must have input's shape"
    yield (rows.view(2, 1, 48), x, 0, 64), ValueError, "packed must have input's shape"
    yield (rows[:, :32], x, 0, 64), ValueError, "packed must have 48 bytes per row"
    yield (rows.to(torch.int8), x, 0, 64), ValueError, "packed must be uint8"
    yield (torch.zeros(4, 48, dtype=torch.uint8, device=device)[::2], x, 0, 64), ValueError, "packed must be contiguous"


def _moving_samples(device: str) -> Samples:
    for packed, input, format, block_size in _in_place_samples(device):
        yield packed, input, format, block_size, 0, ""  # one process; tests/distributed runs them on several


def _moving_hostile(device: str) -> Hostile:
    x, rows = torch.randn(2, 64, device=device), torch.zeros(2, 48, dtype=torch.uint8, device=device)
    yield (rows, None, 0, 64, 0, ""), ValueError, "input is missing on the source"
    yield (rows, x, 0, 64, 1, ""), ValueError, "source_rank must be from 0 to 0, got 1"
    yield (rows, x.requires_grad_(), 0, 64, 0, ""), RuntimeError, "input requires grad"


def _dequantize_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield random_packed(format, 3, 65, device), format.id, format.block_size, 65, dtype
    packed = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield packed[::2], 0, 64, 64, torch.float32  # rows that are not contiguous
    yield packed.view(2, 2, -1), 0, 64, 64, torch.float32
    yield packed[:0], 0, 64, 64, torch.float32


def _dequantize_hostile(device: str) -> Hostile:
    yield from bad_rows(lambda packed, *sizes: (packed, *sizes, torch.float32), device)
    packed = random_packed(ALL_FORMATS[0], 2, 64, device)
    for dtype in (torch.float64, torch.int32, torch.uint8):
        yield (packed, 0, 64, 64, dtype), ValueError, "dtype must be float32"


def _dequantize_list_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            columns = [64, 65, 8, 576]
            packed = [random_packed(format, n, k, device, n) for n, k in zip((3, 2, 5, 1), columns, strict=True)]
            yield packed, format.id, format.block_size, columns, dtype
    rows = random_packed(ALL_FORMATS[0], 4, 64, device)
    yield [rows[::2], rows.view(2, 2, -1), rows[:0]], 0, 64, [64, 64, 64], torch.float32
    yield [rows[:1]] * 100, 0, 64, [64] * 100, torch.bfloat16  # more than a launch takes
    yield [rows], 0, 64, [64], torch.float32


def _dequantize_list_hostile(device: str) -> Hostile:
    good = random_packed(ALL_FORMATS[0], 2, 64, device)
    # The text names the entry: the bad one is the second.
    for arguments, error, text in bad_rows(lambda packed, *sizes: (packed, *sizes, torch.float32), device):
        packed, format, block_size, columns, dtype = arguments
        named = text.replace("in_features must", r"in_features\[1\] must").replace("packed must", r"packed\[1\] must")
        named = named.replace("at least 2", r"packed\[1\] must have at least 2")
        yield ([good, packed], format, block_size, [64, columns], dtype), error, named
    lengths = "in_features must have one entry per tensor of packed, 2, got 1"
    yield ([good, good], 0, 64, [64], torch.float32), ValueError, lengths
    yield ([good], 0, 64, [64], torch.float64), ValueError, "dtype must be float32"


def _embedding_samples(device: str) -> Samples:
    for format in ALL_FORMATS:
        packed = random_packed(format, 7, 65, device)
        yield torch.tensor([[0, 6], [3, 3]], device=device), packed, format.id, format.block_size, 65, torch.float32
    packed = random_packed(ALL_FORMATS[0], 7, 64, device)
    yield torch.tensor(3, device=device), packed, 0, 64, 64, torch.bfloat16
    yield torch.tensor([1, 2], device=device, dtype=torch.int32), packed, 0, 64, 64, torch.float16
    yield torch.zeros(0, dtype=torch.int64, device=device), packed, 0, 64, 64, torch.float32
    yield torch.arange(6, device=device).view(2, 3).t(), packed, 0, 64, 64, torch.float32


def _embedding_hostile(device: str) -> Hostile:
    ids = torch.tensor([0, 1], device=device)
    yield from bad_rows(lambda rows, *sizes: (ids, rows, *sizes, torch.float32), device)
    packed = random_packed(ALL_FORMATS[0], 2, 64, device)
    yield (ids.float(), packed, 0, 64, 64, torch.float32), ValueError, "indices must be int64 or int32"
    if device == "cpu":  # CUDA asserts on the device, as torch's own embedding does
        for bad in (2, -1, 2**62):
            yield (torch.tensor([0, bad]), packed, 0, 64, 64, torch.float32), IndexError, "indices must be from 0 to 1"


def _feedback_samples(device: str) -> Samples:
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


def _feedback_hostile(device: str) -> Hostile:
    w, u, d = torch.randn(3, 64, device=device), torch.eye(64, device=device), torch.ones(64, device=device)
    c = torch.ones(2, device=device)
    yield from bad_formats(lambda id, size: (w, u, d, None, c, id, size))
    yield (w.bfloat16(), u, d, None, c, 0, 64), ValueError, "weight must be float32"
    yield (w[0], u, d, None, c, 0, 64), ValueError, "weight must have 2 dimensions"
    yield (w, u.double(), d, None, c, 0, 64), ValueError, "factor must be float32"
    yield (w, u[:63], d, None, c, 0, 64), ValueError, r"factor must have shape \(in_features, in_features\)"
    yield (w, u, d[:63], None, c, 0, 64), ValueError, r"importance must have shape \(in_features,\)"
    scales = torch.ones(3, 2, device=device)
    yield (w, u, d, scales, c, 0, 64), ValueError, r"scales must have shape \(out_features, num_blocks\)"
    yield (w, u, d, None, c[:0], 0, 64), ValueError, "candidates must not be empty"
    yield (w, u, d, None, u, 0, 64), ValueError, "candidates must have 1 dimension"


SPECS = {
    "quantize": OpSpec(_quantize_samples, _quantize_hostile),
    "quantize_list": OpSpec(_quantize_list_samples, _quantize_list_hostile),
    "quantize_with_scales": OpSpec(_scales_samples, _scales_hostile),
    "quantize_": OpSpec(_in_place_samples, _in_place_hostile),
    "quantize_broadcast_": OpSpec(_moving_samples, _moving_hostile),
    "quantize_scatter_": OpSpec(_moving_samples, _moving_hostile),
    "dequantize": OpSpec(_dequantize_samples, _dequantize_hostile),
    "dequantize_list": OpSpec(_dequantize_list_samples, _dequantize_list_hostile),
    "embedding": OpSpec(_embedding_samples, _embedding_hostile),
    "error_feedback": OpSpec(_feedback_samples, _feedback_hostile),
}
