"""quantize_broadcast_ and quantize_scatter_: one rank quantizes, the packed rows travel.

C++ quantizes straight into the buffer that is sent and `torch.distributed` moves it, which leaves timeouts, watchdogs and
every backend to torch. A whole model goes through `halfbyte.distributed.quantize_broadcast` and `load_quantized`, which
overlap the two and agree on failures; here a failing rank is an error like in any collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from halfbyte._library import overload, register_fake, register_kernel
from halfbyte.formats import Format
from halfbyte.ops.quantize import quantize_

_broadcast = overload("quantize_broadcast_")
_scatter = overload("quantize_scatter_")


def quantize_broadcast_(
    packed: Tensor, input: Tensor | None, format: str | Format = "nf4", *, process_group: Any = None, source_rank: int = 0
) -> None:
    """Writes the packed rows of one rank's `input` into `packed` on every rank.

    Args:
        packed: where the rows go, shape (..., N, row_bytes) uint8, contiguous; the same shape on every rank.
        input: on the source, shape (..., N, K), float32, bfloat16 or float16; None elsewhere.
        format: a `Format` or its name.
        process_group: None: the default group if torch.distributed is initialized, else this process alone.
        source_rank: rank within the group that has `input`.

    Raises:
        ValueError: `input` is missing on the source or given elsewhere, or does not fit `packed`.
        RuntimeError: `input` requires grad, or another rank failed.

    Example:
        >>> import torch, halfbyte
        >>> packed = torch.empty(2, 64, dtype=torch.uint8)
        >>> halfbyte.ops.quantize_broadcast_(packed, torch.ones(2, 100))
    """
    fmt = Format.parse(format)
    _broadcast(packed, input, fmt.id, fmt.block_size, source_rank, _name_of(process_group))


def quantize_scatter_(
    packed: Tensor, input: Tensor | None, format: str | Format = "nf4", *, process_group: Any = None, source_rank: int = 0
) -> None:
    """Writes to each rank's `packed` its share of the packed rows of one rank's `input`.

    Shares are those of `Shard(0)`: rank r of W has rows r*c to (r+1)*c of N, where c = ceil(N / W); the last ranks may have
    fewer rows, or none.

    Args:
        packed: this rank's rows, shape (rows, ..., row_bytes) uint8, contiguous.
        input: on the source, shape (N, ..., K), float32, bfloat16 or float16; None elsewhere.
        format: a `Format` or its name.
        process_group: None: the default group if torch.distributed is initialized, else this process alone.
        source_rank: rank within the group that has `input`.

    Raises:
        ValueError: `input` is missing on the source or given elsewhere, or `packed` has not this rank's rows.
        RuntimeError: `input` requires grad, or another rank failed.
    """
    fmt = Format.parse(format)
    _scatter(packed, input, fmt.id, fmt.block_size, source_rank, _name_of(process_group))


def shard_rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    """(first, last + 1) of the rows that `Shard(0)` gives a rank.

    Example:
        >>> [shard_rows(5, 4, rank) for rank in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-rows // world)
    return min(rank * share, rows), min((rank + 1) * share, rows)


def _name_of(process_group: Any) -> str:
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        process_group = dist.group.WORLD
    return str(process_group.group_name)


def _resolve(op: str, input: Tensor | None, source_rank: int, group_name: str) -> tuple[Any, int, int]:
    """(group or None, rank, world) with the arguments checked."""
    registry: Any = distributed_c10d  # names of its members that are private, but the only way from a name to a group
    group = registry._resolve_process_group(group_name) if group_name else None
    rank, world = (group.rank(), group.size()) if group is not None else (0, 1)
    if not 0 <= source_rank < world:
        raise ValueError(f"halfbyte::{op}: source_rank must be from 0 to {world - 1}, got {source_rank}")
    if (input is None) is (rank == source_rank):
        where = "is missing on" if input is None else "must be None away from"
        raise ValueError(f"halfbyte::{op}: input {where} the source (rank {source_rank} of the group), this is rank {rank}")
    if input is not None and input.requires_grad:
        raise RuntimeError(f"halfbyte::{op}: input requires grad, but quantization has no derivative; detach() it")
    return group, rank, world


def _broadcast_kernel(
    packed: Tensor, input: Tensor | None, format: int, block_size: int, source_rank: int, group_name: str
) -> None:
    group, _, _ = _resolve("quantize_broadcast_", input, source_rank, group_name)
    if input is not None:
        quantize_(packed, input, Format.from_id(format, block_size))
    if group is not None:
        dist.broadcast(packed, group=group, group_src=source_rank)


def _scatter_kernel(
    packed: Tensor, input: Tensor | None, format: int, block_size: int, source_rank: int, group_name: str
) -> None:
    group, _, world = _resolve("quantize_scatter_", input, source_rank, group_name)
    if group is None:
        assert input is not None
        quantize_(packed, input, Format.from_id(format, block_size))
        return
    fmt, parts, size = Format.from_id(format, block_size), None, torch.zeros(1, dtype=torch.int64)
    if input is not None:
        share = -(-input.shape[0] // world)
        rows = input.new_zeros((world * share, *input.shape[1:-1], fmt.row_bytes(input.shape[-1])), dtype=torch.uint8)
        quantize_(rows[: input.shape[0]], input, fmt)
        parts = list(rows.chunk(world)) if share else None
        size[0] = input.shape[0]
    size = size.to(packed.device)
    dist.broadcast(size, group=group, group_src=source_rank)
    first, last = shard_rows(int(size), world, group.rank())
    if packed.shape[0] != last - first or not packed.is_contiguous():
        raise ValueError(
            f"halfbyte::quantize_scatter_: packed must be this rank's {last - first} rows of {int(size)}, contiguous, "
            f"got shape {tuple(packed.shape)}"
        )
    if int(size):
        piece = packed.new_empty((-(-int(size) // world), *packed.shape[1:]))
        dist.scatter(piece, parts, group=group, group_src=source_rank)
        packed.copy_(piece[: last - first])


register_kernel("quantize_broadcast_", _broadcast_kernel)
register_kernel("quantize_scatter_", _scatter_kernel)


@register_fake("quantize_broadcast_")
def _(packed: Tensor, input: Tensor | None, format: int, block_size: int, source_rank: int, group_name: str) -> None:
    Format.from_id(format, block_size)


@register_fake("quantize_scatter_")
def _(packed: Tensor, input: Tensor | None, format: int, block_size: int, source_rank: int, group_name: str) -> None:
    Format.from_id(format, block_size)
