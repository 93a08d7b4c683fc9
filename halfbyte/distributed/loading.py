"""One rank reads and quantizes, the others receive: what `load_quantized` and `quantize_broadcast` run on.

One collective on the training group first: all ranks are here. Everything else goes through connections of its own
(`LoaderGroup`), whose timeouts can't hurt training and which close with the process: a rank that dies or gives up is noticed
at once by all. There every rank says what it has (or why it failed), then that it is ready; then the data follows. The
source's thread fills one of two slots while the other is sent.

On the wire: a header of 64 bytes, then, if it announces one, a bucket. A header is sent at least every 2 s, so a slow disk
is not taken for a dead source; a failed source sends its message instead of a bucket, so nobody waits for what won't come.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.checkpoint.sources import Entry, Source
from halfbyte.distributed.connections import ALIVE_S, LoaderGroup

__all__ = ["BUCKET_BYTES", "Bucket", "Target", "plan_buckets", "receive", "send"]

BUCKET_BYTES = 16 << 20

_ALIGNMENT = 64
_HEADER = struct.Struct("<4sIQQ")
_MAGIC = b"HBLD"
_DATA, _FAILED, _ALIVE, _DONE = range(4)


class Target(Protocol):
    """Where this rank keeps (part of) an entry."""

    entry: Entry
    start: int
    stop: int

    def write(self, first: int, data: Tensor) -> None:
        """Copies the bytes of whole rows to this rank's rows from `first` on."""


@dataclass(frozen=True)
class Piece:
    """Some rows of one entry in a bucket.

    Attributes:
        entry: index of the entry.
        first: first row, counted from the first row that a rank holds.
        count: rows; a rank that holds fewer has that many less.
        offset: of their bytes in the bucket.
    """

    entry: int
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """What one collective moves.

    Attributes:
        scatter: whether each rank gets rows of its own.
        nbytes: bytes for each rank.
        pieces: what they are.
    """

    scatter: bool
    nbytes: int
    pieces: tuple[Piece, ...]


def plan_buckets(entries: Sequence[Entry], spans: Sequence[Sequence[tuple[int, int]]], bucket_bytes: int) -> list[Bucket]:
    """Cuts entries into buckets, the same on every rank.

    Args:
        entries: what is to be moved.
        spans: for each rank the (first row, last row + 1) that it holds of each entry.
        bucket_bytes: bytes that the source keeps per slot; a single row may exceed it.
    """
    world = len(spans)
    buckets: list[Bucket] = []
    for scatter in (False, True):
        limit = max(_ALIGNMENT, bucket_bytes // world if scatter else bucket_bytes)
        pieces: list[Piece] = []
        used = 0
        for index, entry in enumerate(entries):
            if scatter is all(span[index] == (0, entry.rows) for span in spans) or not entry.nbytes:
                continue
            rows, first = max(span[index][1] - span[index][0] for span in spans), 0
            while first < rows:
                count = min(rows - first, (limit - used) // entry.row_nbytes)
                if count <= 0 and not pieces:
                    count = 1
                if count > 0:
                    pieces.append(Piece(index, first, count, used))
                    used += -(-count * entry.row_nbytes // _ALIGNMENT) * _ALIGNMENT
                    first += count
                if first < rows or used >= limit:
                    buckets.append(Bucket(scatter, used, tuple(pieces)))
                    pieces, used = [], 0
        if pieces:
            buckets.append(Bucket(scatter, used, tuple(pieces)))
    return buckets


class _Stopped(Exception):  # noqa: N818 - not an error: the other thread has one
    """Ends the filling thread."""


def send(
    group: LoaderGroup,
    targets: Sequence[Target],
    spans: Sequence[Sequence[tuple[int, int]]],
    buckets: Sequence[Bucket],
    each_source: Callable[[Callable[[Source], None], Callable[[], None]], None],
    tick: Callable[[int], None],
) -> None:
    """The source's side: fills, sends, and keeps its own rows.

    Args:
        group: connected.
        targets: where this rank keeps the entries.
        spans: of every rank, as for `plan_buckets`.
        buckets: from `plan_buckets`.
        each_source: calls its first argument with a source that fills the entries; again with another one if that turns out
            to be damaged, which sends everything anew. Runs in a thread; the second argument, to be called every now and
            then, raises when the load was given up.
        tick: called with the bytes of every bucket sent.
    """
    size = max((bucket.nbytes * (group.world if bucket.scatter else 1) for bucket in buckets), default=0)
    free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    ready: queue.SimpleQueue[tuple[int, Tensor] | Exception | None] = queue.SimpleQueue()
    stop = threading.Event()
    for _ in range(2):
        free.put(torch.empty(size, dtype=torch.uint8))

    def still_wanted() -> None:
        if stop.is_set():
            raise _Stopped

    def fill_all(source: Source) -> None:
        for index, bucket in enumerate(buckets):
            slot = free.get()
            still_wanted()
            try:
                _fill(bucket, targets, spans, source, slot)
            except BaseException:
                free.put(slot)
                raise
            ready.put((index, slot))

    def produce() -> None:
        try:
            with torch.no_grad():
                each_source(fill_all, still_wanted)
            ready.put(None)
        except _Stopped:
            return
        except Exception as error:
            ready.put(error)

    thread = threading.Thread(target=produce, name="halfbyte-loading", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = ready.get(timeout=ALIVE_S)
            except queue.Empty:
                _tell(group, _ALIVE)
                continue
            if item is None:
                _tell(group, _DONE)
                break
            if isinstance(item, Exception):
                _tell_failure(group, item)
                raise item
            index, slot = item
            bucket = buckets[index]
            _tell(group, _DATA, index, bucket.nbytes)
            if bucket.scatter:
                parts = list(slot[: bucket.nbytes * group.world].view(group.world, bucket.nbytes))
                mine = torch.empty(bucket.nbytes, dtype=torch.uint8)
                group.scatter(mine, parts)
            else:
                mine = slot[: bucket.nbytes]
                group.broadcast(mine)
            _keep(bucket, targets, mine)
            tick(bucket.nbytes * (group.world if bucket.scatter else 1))
            free.put(slot)
    finally:
        stop.set()
        free.put(torch.empty(0, dtype=torch.uint8))
        thread.join()
    group.finish()


def _fill(
    bucket: Bucket, targets: Sequence[Target], spans: Sequence[Sequence[tuple[int, int]]], source: Source, slot: Tensor
) -> None:
    for piece in bucket.pieces:
        entry = targets[piece.entry].entry
        for rank in range(len(spans)) if bucket.scatter else (0,):
            start, stop = spans[rank][piece.entry]
            first = min(start + piece.first, stop)
            last = min(first + piece.count, stop)
            begin = rank * bucket.nbytes + piece.offset
            if last > first:
                source.fill(entry, first, last, slot[begin : begin + (last - first) * entry.row_nbytes])


def _tell(group: LoaderGroup, kind: int, index: int = 0, nbytes: int = 0) -> None:
    """On the source: the next header."""
    header = _HEADER.pack(_MAGIC, kind, index, nbytes).ljust(64, b"\0")
    group.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))


def _tell_failure(group: LoaderGroup, error: Exception) -> None:
    """On the source: why nothing more will come."""
    text = bytearray(f"{type(error).__name__}: {error}".encode())
    with suppress(RuntimeError):  # if nobody is left to be told, the error itself counts
        _tell(group, _FAILED, 0, len(text))
        group.broadcast(torch.frombuffer(text, dtype=torch.uint8))
        group.finish()


def _hear(group: LoaderGroup) -> tuple[int, int]:
    """On every other rank: kind and index of the source's next header.

    Raises:
        RuntimeError: the source failed, with its text, or a rank is gone.
    """
    header = torch.empty(64, dtype=torch.uint8)
    group.broadcast(header)
    magic, kind, index, nbytes = _HEADER.unpack(bytes(header[: _HEADER.size].tolist()))
    if magic != _MAGIC or kind not in (_DATA, _FAILED, _ALIVE, _DONE):
        raise RuntimeError(f"{group.what}: received something else than a header; does the source run this halfbyte?")
    if kind == _FAILED:
        text = torch.empty(nbytes, dtype=torch.uint8)
        group.broadcast(text)
        group.finish()
        raise RuntimeError(f"{group.what}: {group.name(group.source)} failed: {bytes(text.tolist()).decode()}")
    return kind, index


def receive(group: LoaderGroup, targets: Sequence[Target], buckets: Sequence[Bucket]) -> None:
    """Every other rank's side: takes what the source announces until it says that all is sent.

    Raises:
        RuntimeError: the source failed, with its text, or a rank is gone.
    """
    slot = torch.empty(max((bucket.nbytes for bucket in buckets), default=0), dtype=torch.uint8)
    while True:
        kind, index = _hear(group)
        if kind == _DONE:
            group.finish()
            return
        if kind == _DATA:
            bucket = buckets[index]
            mine = slot[: bucket.nbytes]
            if bucket.scatter:
                group.scatter(mine, None)
            else:
                group.broadcast(mine)
            _keep(bucket, targets, mine)


def _keep(bucket: Bucket, targets: Sequence[Target], mine: Tensor) -> None:
    for piece in bucket.pieces:
        target = targets[piece.entry]
        count = min(piece.count, target.stop - target.start - piece.first)
        if count > 0:
            target.write(piece.first, mine[piece.offset : piece.offset + count * target.entry.row_nbytes])
