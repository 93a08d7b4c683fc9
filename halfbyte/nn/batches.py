"""Neighbouring layers decoded or packed by one call, where a call of its own would cost a layer as much as its work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from halfbyte.formats import Format
from halfbyte.nn.packed import PackedRows
from halfbyte.ops.dequantize import dequantize_list
from halfbyte.ops.quantize import FLOAT_DTYPES, quantize, quantize_list
from halfbyte.optim.sharding import is_dtensor

__all__ = ["dense_weights", "packed_weights"]

_GPU_BYTES, _CPU_BYTES = 64 << 20, 1 << 20
"""Dense bytes of a batch at most, unless one tensor has more: it is what the peak of memory grows by.

On an H200 64 MiB take 15 us to write (4.3 TB/s), several times what a launch costs: a larger batch gains nothing. On a CPU a
parallel region costs 2 to 5 us and 1 MiB takes 25 (40 GB/s).
"""

_T = TypeVar("_T")


def dense_weights(
    modules: Iterable[PackedRows], dtype: Callable[[PackedRows], torch.dtype]
) -> Iterator[tuple[PackedRows, Tensor]]:
    """Each module with the dense weight that its rows stand for, shape (rows, K) of `dtype(module)`, in order.

    Called where a whole model, or a block of it, becomes dense.
    """

    def kind(module: PackedRows) -> Hashable:
        rows = module.weight
        return id(module) if is_dtensor(rows) else (module.format, dtype(module), rows.device)

    def size(module: PackedRows) -> int:
        rows, columns = module.weight_shape
        return rows * columns * dtype(module).itemsize

    for batch in _batches(modules, kind, size, lambda module: module.weight.device):
        first = batch[0]
        if len(batch) == 1:
            yield first, first.dequantize(dtype(first))
            continue
        columns = [module.weight_shape[1] for module in batch]
        weights = dequantize_list([module.packed for module in batch], first.format, columns, dtype(first))
        yield from zip(batch, weights, strict=True)


def packed_weights(
    layers: Iterable[_T], weight: Callable[[_T], Tensor], format: Format
) -> Iterator[tuple[_T, Tensor]]:
    """Each layer with the packed rows of `weight(layer)`, dense (N, K), in order; on meta nothing is computed.

    Called where a whole model, or a block of it, is packed. `layers` is read one batch ahead of what is yielded.
    """

    def kind(item: tuple[_T, Tensor]) -> Hashable:
        tensor = item[1]
        several = tensor.dtype in FLOAT_DTYPES and not is_dtensor(tensor) and not tensor.is_meta
        return (tensor.dtype, tensor.device) if several else id(item[0])

    def size(item: tuple[_T, Tensor]) -> int:
        return item[1].numel() * item[1].element_size()

    items = ((layer, weight(layer)) for layer in layers)
    for batch in _batches(items, kind, size, lambda item: item[1].device):
        yield from zip((layer for layer, _ in batch), _packed([tensor for _, tensor in batch], format), strict=True)


def _packed(tensors: list[Tensor], format: Format) -> list[Tensor]:
    if len(tensors) > 1:
        return quantize_list(tensors, format)
    tensor = tensors[0]
    if tensor.is_meta:
        rows, columns = tensor.shape
        return [torch.empty((rows, format.row_bytes(columns)), dtype=torch.uint8, device="meta")]
    return [quantize(tensor, format)]


def _batches(
    items: Iterable[_T], kind: Callable[[_T], Hashable], size: Callable[[_T], int], device: Callable[[_T], torch.device]
) -> Iterator[list[_T]]:
    """Runs of neighbours of one kind, of as many bytes as their device's batches take."""
    batch: list[_T] = []
    left, last = 0, None
    for item in items:
        if batch and (kind(item) != last or size(item) > left):
            yield batch
            batch = []
        if not batch:
            left, last = _CPU_BYTES if device(item).type == "cpu" else _GPU_BYTES, kind(item)
        batch.append(item)
        left -= size(item)
    if batch:
        yield batch
