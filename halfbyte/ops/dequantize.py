"""dequantize and dequantize_list: packed rows to float rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte._library import overload, register_fake
from halfbyte.formats import Format
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe, with_columns

_dequantize = overload("dequantize")
_dequantize_list = overload("dequantize_list")


def dequantize(packed: Tensor, format: str | Format, in_features: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decodes packed rows: one float32 product per element, rounded once to `dtype` (nearest even).

    Args:
        packed: shape (..., N, row_bytes) uint8, as `quantize` returns it.
        format: the format it was quantized with.
        in_features: K, the elements of a row before packing.
        dtype: float32, bfloat16 or float16.

    Returns:
        Shape (..., N, K) of `dtype`.

    Raises:
        TypeError: `packed` is not uint8, or `dtype` is not one of the three.
        ValueError: unknown format, or rows of another size than `format` and `in_features` give.

    Example:
        >>> import torch, halfbyte
        >>> packed = halfbyte.quantize(torch.tensor([[0.5, -1.0, 0.25]]), "int8")
        >>> halfbyte.dequantize(packed, "int8", 3, torch.float32)
        tensor([[ 0.5039, -1.0000,  0.2520]])
    """
    fmt = Format.parse(format)
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8:
        raise TypeError(f"halfbyte.dequantize: packed must be a uint8 tensor, got {describe(packed)}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.dequantize: dtype must be {FLOAT_NAMES}, got {dtype}")
    return _dequantize(packed, fmt.id, fmt.block_size, in_features, dtype)


def dequantize_list(
    packed: Sequence[Tensor], format: str | Format, in_features: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """`dequantize` of several tensors of one format: one launch on a GPU (48 a launch), one parallel region on a CPU.

    Args:
        packed: tensors of shape (..., N, row_bytes) uint8 on one device, each with its own N and K.
        format: the format they were quantized with.
        in_features: K of each.
        dtype: float32, bfloat16 or float16.

    Returns:
        Tensors of shape (..., N, K) of `dtype`, each with memory of its own; bit for bit what `dequantize` gives.

    Raises:
        TypeError: an entry of `packed` is not a uint8 tensor, or `dtype` is not one of the three.
        ValueError: unknown format, lists of different lengths, several devices, or rows of another size than `format` and
            `in_features` give; the text names the entry.

    Note:
        It pays where a launch costs as much as a tensor: for weights of less than some 60 MiB of output on a GPU.

    Example:
        >>> import torch, halfbyte
        >>> packed = [halfbyte.quantize(torch.ones(n, 64)) for n in (2, 3)]
        >>> [weight.shape for weight in halfbyte.ops.dequantize_list(packed, "nf4", [64, 64])]
        [torch.Size([2, 64]), torch.Size([3, 64])]
    """
    fmt = Format.parse(format)
    for i, rows in enumerate(packed):
        if not isinstance(rows, Tensor) or rows.dtype != torch.uint8:
            raise TypeError(f"halfbyte.dequantize_list: packed[{i}] must be a uint8 tensor, got {describe(rows)}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.dequantize_list: dtype must be {FLOAT_NAMES}, got {dtype}")
    if not packed and not in_features:  # the dispatcher has no device to choose a kernel by
        return []
    return _dequantize_list(list(packed), fmt.id, fmt.block_size, list(in_features), dtype)


@register_fake("dequantize")
def _(packed: Tensor, format: int, block_size: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return with_columns(packed, in_features, dtype)


@register_fake("dequantize_list")
def _(packed: list[Tensor], format: int, block_size: int, in_features: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [with_columns(rows, k, dtype) for rows, k in zip(packed, in_features, strict=True)]
