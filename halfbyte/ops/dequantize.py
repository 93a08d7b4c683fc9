"""dequantize: packed rows to float rows."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte._library import overload, register_fake
from halfbyte.formats import Format
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe

_dequantize = overload("dequantize")


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


@register_fake("dequantize")
def _(packed: Tensor, format: int, block_size: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], in_features), dtype=dtype)
