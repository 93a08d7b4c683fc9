"""quantize, quantize_list and quantize_: float rows to packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfbyte._library import overload, register_fake
from halfbyte.formats import Format

_quantize = overload("quantize")
_quantize_list = overload("quantize_list")
_quantize_with_scales = overload("quantize_with_scales")
_quantize_ = overload("quantize_")


def quantize(tensor: Tensor, format: str | Format = "nf4", *, scales: Tensor | None = None) -> Tensor:
    """Packs the rows of `tensor` into self-contained byte rows.

    Every row becomes its codes, its scales and zero padding to 16 bytes (docs/formats.md). The result is the same bytes
    on every device and instruction set.

    Args:
        tensor: shape (..., N, K), float32, bfloat16 or float16, at least 2 dimensions.
        format: a `Format` or its name, such as "nf4", "nf4:32", "nf4-dq", "fp4", "int8", "fp8".
        scales: absmax values to use instead of the computed ones, shape (..., N, num_blocks) float32, where num_blocks is
            `Format.num_blocks(K)` (1 for int8 and fp8). Larger elements saturate. A negative or non-finite scale writes a
            block that decodes to NaN.

    Returns:
        Packed rows, shape (..., N, row_bytes) uint8.

    Raises:
        TypeError: `tensor` or `scales` is not a tensor of an accepted dtype.
        ValueError: unknown format, fewer than 2 dimensions, K = 0, or `scales` of another shape.

    Note:
        A NaN or Inf makes its block (int8, fp8, -dq: its row) decode to NaN; an all-zero block decodes to zeros.

    Example:
        >>> import torch, halfbyte
        >>> halfbyte.quantize(torch.ones(2, 100)).shape
        torch.Size([2, 64])

    Source:
        NormalFloat: Dettmers et al. 2023, arXiv:2305.14314.
    """
    fmt = Format.parse(format)
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.quantize: tensor must be a {FLOAT_NAMES} tensor, got {describe(tensor)}")
    if scales is None:
        return _quantize(tensor, fmt.id, fmt.block_size)
    if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
        raise TypeError(f"halfbyte.quantize: scales must be a float32 tensor, got {describe(scales)}")
    return _quantize_with_scales(tensor, scales, fmt.id, fmt.block_size)


def quantize_list(tensors: Sequence[Tensor], format: str | Format = "nf4") -> list[Tensor]:
    """`quantize` of several tensors: one launch on a GPU (28 tensors a launch), one parallel region on a CPU.

    Args:
        tensors: each of shape (..., N, K) with its own N and K, all of one dtype (float32, bfloat16 or float16) and device.
        format: a `Format` or its name.

    Returns:
        Packed rows of each, shape (..., N, row_bytes) uint8; the same bytes that `quantize` gives.

    Raises:
        TypeError: an entry is not a tensor of an accepted dtype.
        ValueError: unknown format, several dtypes or devices, or an entry that `quantize` would not take; the text names it.

    Example:
        >>> import torch, halfbyte
        >>> [rows.shape for rows in halfbyte.ops.quantize_list([torch.ones(2, 64), torch.ones(3, 100)], "nf4")]
        [torch.Size([2, 48]), torch.Size([3, 64])]
    """
    fmt = Format.parse(format)
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"halfbyte.quantize_list: tensors[{i}] must be a {FLOAT_NAMES} tensor, got {describe(tensor)}")
    if not tensors:  # the dispatcher has no device to choose a kernel by
        return []
    return _quantize_list(list(tensors), fmt.id, fmt.block_size)


def quantize_(packed: Tensor, input: Tensor, format: str | Format = "nf4") -> None:
    """`quantize` into memory that exists: a slice of a communication bucket, or a parameter.

    Args:
        packed: where the rows go, shape (..., N, row_bytes) uint8, contiguous, on the device of `input`.
        input: shape (..., N, K), float32, bfloat16 or float16.
        format: a `Format` or its name.

    Raises:
        TypeError: `input` is not a tensor of an accepted dtype.
        ValueError: unknown format, or `packed` has another shape, dtype or device, or is not contiguous.
        RuntimeError: `input` requires grad (quantization has no derivative).

    Example:
        >>> import torch, halfbyte
        >>> bucket = torch.zeros(1000, dtype=torch.uint8)
        >>> halfbyte.ops.quantize_(bucket[64:192].view(2, 64), torch.ones(2, 100))
        >>> torch.equal(bucket[64:192].view(2, 64), halfbyte.quantize(torch.ones(2, 100)))
        True
    """
    fmt = Format.parse(format)
    if not isinstance(input, Tensor) or input.dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.quantize_: input must be a {FLOAT_NAMES} tensor, got {describe(input)}")
    if input.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("halfbyte.quantize_: input requires grad, but quantization has no derivative; detach() it")
    _quantize_(packed, input, fmt.id, fmt.block_size)
    if not packed.is_inference():  # the stable ABI does not bump version counters
        increment_version(packed)


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_NAMES = "float32, bfloat16 or float16"


def describe(value: object) -> str:
    """How an unsuitable argument is named in an error: its dtype if it is a tensor, else its type."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def with_columns(t: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """What most fakes return: a new tensor of t's shape with another last dimension, and t's dtype unless one is given."""
    return t.new_empty((*t.shape[:-1], columns), dtype=dtype)


@register_fake("quantize")
def _(input: Tensor, format: int, block_size: int) -> Tensor:
    torch._check(input.dim() >= 2, lambda: f"halfbyte::quantize: input must have at least 2 dimensions, got {input.shape}")
    row_bytes = Format.from_id(format, block_size).row_bytes(input.shape[-1])
    return with_columns(input, row_bytes, torch.uint8)


@register_fake("quantize_list")
def _(input: list[Tensor], format: int, block_size: int) -> list[Tensor]:
    fmt = Format.from_id(format, block_size)
    return [with_columns(x, fmt.row_bytes(x.shape[-1]), torch.uint8) for x in input]


@register_fake("quantize_with_scales")
def _(input: Tensor, scales: Tensor, format: int, block_size: int) -> Tensor:
    row_bytes = Format.from_id(format, block_size).row_bytes(input.shape[-1])
    return with_columns(input, row_bytes, torch.uint8)


@register_fake("quantize_")
def _(packed: Tensor, input: Tensor, format: int, block_size: int) -> None:
    Format.from_id(format, block_size).row_bytes(input.shape[-1])
