"""embedding: a gather of packed rows, decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte._library import overload, register_fake
from halfbyte.formats import Format
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe

_embedding = overload("embedding")


def embedding(
    indices: Tensor, packed: Tensor, format: str | Format, embedding_dim: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Looks up packed rows and decodes them, reading nothing but those rows.

    Args:
        indices: shape (...), int64 or int32, from 0 to num_embeddings - 1.
        packed: shape (num_embeddings, row_bytes) uint8.
        format: the format of `packed`.
        embedding_dim: elements of a row before packing.
        dtype: float32, bfloat16 or float16.

    Returns:
        Shape (..., embedding_dim) of `dtype`. It carries no gradient: packed rows are frozen.

    Raises:
        TypeError: `indices` is not int64 or int32, `packed` is not uint8, or `dtype` is not one of the three.
        IndexError: an index outside the table (on CUDA: a device-side assertion, as in `torch.nn.functional.embedding`).
        ValueError: unknown format, or rows of another size than `format` and `embedding_dim` give.
    """
    fmt = Format.parse(format)
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"halfbyte.embedding: indices must be an int64 or int32 tensor, got {describe(indices)}")
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8:
        raise TypeError(f"halfbyte.embedding: packed must be a uint8 tensor, got {describe(packed)}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.embedding: dtype must be {FLOAT_NAMES}, got {dtype}")
    return _embedding(indices, packed, fmt.id, fmt.block_size, embedding_dim, dtype)


@register_fake("embedding")
def _(indices: Tensor, packed: Tensor, format: int, block_size: int, embedding_dim: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*indices.shape, embedding_dim), dtype=dtype)
