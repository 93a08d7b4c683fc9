"""quantize_broadcast and quantize_scatter: one rank's tensors become packed rows on every rank, or a share on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed.connections import LoaderGroup
from halfbyte.distributed.loading import BUCKET_BYTES, plan_buckets, receive, send
from halfbyte.formats import Format
from halfbyte.ops.broadcast import shard_rows

__all__ = ["quantize_broadcast", "quantize_scatter"]


def quantize_broadcast(
    tensors: Mapping[str, Tensor] | None,
    format: str | Format = "nf4",
    *,
    process_group: Any = None,
    source_rank: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Tensor]:
    """Quantizes one rank's tensors and gives the packed rows to every rank.

    While one bucket is sent the next is filled. A failure on any rank raises on all within 10 s and leaves the group usable.

    Args:
        tensors: on the source, dense tensors by name, shape (..., N, K), float32, bfloat16 or float16; a lazy mapping
            holds one at a time (each is taken twice: for its shape, then for its values). None elsewhere.
        format: a `Format` or its name; the same on every rank.
        process_group: None: the default group.
        source_rank: rank within the group that has the tensors.
        bucket_bytes: bytes of one bucket, of which the source keeps two and every other rank one.

    Returns:
        Packed rows by name on the CPU, shape (..., N, row_bytes) uint8, the same bytes on every rank.

    Raises:
        ValueError: ranks differ in `format`, or `source_rank` is not in the group.
        TypeError: `tensors` is missing on the source.
        RuntimeError: no process group is initialized, or another rank failed; the text is that of the failure.
    """
    return _distribute(
        "quantize_broadcast", tensors, format, process_group, source_rank, bucket_bytes, lambda rows, world, rank: (0, rows)
    )


def quantize_scatter(
    tensors: Mapping[str, Tensor] | None,
    format: str | Format = "nf4",
    *,
    process_group: Any = None,
    source_rank: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Tensor]:
    """`quantize_broadcast` that gives each rank only its rows: those that `Shard(0)` of FSDP2 gives it.

    Args:
        tensors: as for `quantize_broadcast`: shape (N, ..., K), float32, bfloat16 or float16.
        format: a `Format` or its name; the same on every rank.
        process_group: None: the default group.
        source_rank: rank within the group that has the tensors.
        bucket_bytes: bytes of one bucket over all ranks.

    Returns:
        Packed rows by name on the CPU, shape (rows, ..., row_bytes) uint8: rows r*c to (r+1)*c of N on rank r of W, with
        c = ceil(N / W); fewer, or none, on the last ranks.

    Raises:
        ValueError: ranks differ in `format`, or `source_rank` is not in the group.
        TypeError: `tensors` is missing on the source.
        RuntimeError: no process group is initialized, or another rank failed; the text is that of the failure.
    """
    return _distribute("quantize_scatter", tensors, format, process_group, source_rank, bucket_bytes, shard_rows)


@dataclass
class _Rows:
    """Rows of an entry in memory of their own."""

    entry: Any
    start: int
    stop: int
    memory: Tensor

    def write(self, first: int, data: Tensor) -> None:
        begin = first * self.entry.row_nbytes
        self.memory[begin : begin + data.numel()].copy_(data)


def _distribute(
    what: str,
    tensors: Mapping[str, Tensor] | None,
    format: str | Format,
    process_group: Any,
    source_rank: int,
    bucket_bytes: int,
    share: Callable[[int, int, int], tuple[int, int]],
) -> dict[str, Tensor]:
    from halfbyte.checkpoint.sources import Entry, TensorSource

    fmt = Format.parse(format)
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"{what}: no process group is initialized; call torch.distributed.init_process_group() first")
        process_group = dist.group.WORLD
    with LoaderGroup(process_group, source_rank, what) as ranks, torch.no_grad():
        source = TensorSource(tensors or {})

        def plan() -> Any:
            if not ranks.is_source:
                return str(fmt), None
            if tensors is None:
                raise TypeError(f"{what}: tensors must be a mapping of names to tensors on the source, got None")
            entries = []
            for name in tensors:
                shape = source.find(name, None).shape
                if shape is None or len(shape) < 2 or not shape[-1]:
                    raise ValueError(f"{what}: {name} must have at least 2 dimensions and K >= 1, got shape {shape}")
                entries.append(Entry.packed(name, shape, fmt))
            return str(fmt), entries

        found = ranks.agree(plan)
        _, entries = found[source_rank]
        for rank, (other, _) in enumerate(found):
            if other != found[source_rank][0]:
                raise ValueError(
                    f"{what}: ranks differ in format: rank {source_rank} (the source) has {found[source_rank][0]}, "
                    f"rank {rank} has {other}"
                )
        spans = [[share(entry.rows, ranks.world, rank) for entry in entries] for rank in range(ranks.world)]
        targets = [
            _Rows(entry, start, stop, torch.empty((stop - start) * entry.row_nbytes, dtype=torch.uint8))
            for entry, (start, stop) in zip(entries, spans[ranks.rank], strict=True)
        ]
        buckets = plan_buckets(entries, spans, bucket_bytes)
        if ranks.is_source:
            send(ranks, targets, spans, buckets, lambda run, still_wanted: run(source), lambda nbytes: None)
        else:
            receive(ranks, targets, buckets)
    return {
        target.entry.name: target.memory.view(target.stop - target.start, *target.entry.shape[1:]) for target in targets
    }
