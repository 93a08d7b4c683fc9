"""One rank reads and quantizes, the others receive: what `load_quantized` and `quantize_broadcast` run on.

One collective on the training group first: all ranks are here. Everything else goes through a gloo group of its own, whose
timeouts can't hurt training and whose connections close with the process: a rank that dies or gives up is noticed at once
by all. There every rank says what it has (or why it failed), then that it is ready; then the data follows. The source's
thread fills one of two slots while the other is sent.

On the wire: a header of 64 bytes, then, if it announces one, a bucket. A header is sent at least every 2 s, so a slow disk
is not taken for a dead source; a failed source sends its message instead of a bucket, so nobody waits for what won't come.
"""

from __future__ import annotations

import pickle
import queue
import struct
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.checkpoint.sources import Entry, Source

__all__ = [
    "ALIVE_S",
    "BUCKET_BYTES",
    "Bucket",
    "LoaderGroup",
    "Target",
    "announce",
    "announce_failure",
    "hear_data",
    "plan_buckets",
    "receive",
    "send",
]

BUCKET_BYTES = 16 << 20
TIMEOUT_S = 8.0
"""Of every collective that moves data: with what it takes to raise, a failure is known everywhere within 10 s."""
PATIENCE_S = 1800.0
"""How long a rank may take to plan and to allocate; the connections tell of a death at once."""
ALIVE_S = 2.0

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


class LoaderGroup:
    """The ranks that load together: a context that all of them enter at once, which connects them.

    Args:
        process_group: the training group.
        source_rank: rank within it that reads.
        what: names the operation in errors.
    """

    def __init__(self, process_group: Any, source_rank: int, what: str) -> None:
        self.training, self.source, self.what = process_group, source_rank, what
        self.rank, self.world = process_group.rank(), process_group.size()
        if not 0 <= source_rank < self.world:
            raise ValueError(f"{what}: source_rank must be from 0 to {self.world - 1}, got {source_rank}")
        self._group: Any = None
        self._store: Any = None

    @property
    def is_source(self) -> bool:
        """Whether this rank reads."""
        return bool(self.rank == self.source)

    def agree(self, make: Callable[[], Any]) -> list[Any]:
        """Runs `make` on every rank and returns all results; if it raises anywhere, every rank raises.

        The rank that failed raises its own exception, the others a RuntimeError with its text (the source's first).
        """
        error: Exception | None = None
        mine: tuple[str | None, Any]
        try:
            mine = None, make()
        except Exception as raised:
            error, mine = raised, (f"{type(raised).__name__}: {raised}", None)
        found = [pickle.loads(data) for data in self._exchange(pickle.dumps(mine))]
        if any(text is not None for text, _ in found):
            with suppress(RuntimeError):
                self.finish()  # nobody closes a connection from which another still reads
        if error is not None:
            raise error
        for rank in (self.source, *range(self.world)):
            if found[rank][0] is not None:
                raise RuntimeError(f"{self.what}: {self.name(rank)} failed: {found[rank][0]}")
        return [result for _, result in found]

    def _exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank."""
        sizes = self._all(torch.tensor([len(data)]))
        room = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(self._all(room), sizes, strict=True)]

    def _all(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        torch_dist: Any = dist
        options = torch_dist.distributed_c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=PATIENCE_S)
        self._run(lambda group: group.allgather([parts], [tensor], options))
        return parts

    def name(self, rank: int) -> str:
        """How a rank is called in errors."""
        return f"rank {rank} (the source)" if rank == self.source else f"rank {rank}"

    def __enter__(self) -> LoaderGroup:
        try:
            self._connect()
        except RuntimeError as error:
            raise RuntimeError(f"{self.what}: {self._reason(error)}") from error
        return self

    def _connect(self) -> None:
        tags: list[Any] = [None] * self.world
        dist.all_gather_object(tags, uuid.uuid4().hex, group=self.training)
        # Not `new_group`: every rank of the job would have to call it, and it reuses the names of groups that are gone.
        torch_dist: Any = dist
        store = torch_dist.distributed_c10d._get_default_store()
        self._store = torch_dist.PrefixStore(f"halfbyte/loading/{tags[self.source]}", store)
        self._group = dist.ProcessGroupGloo(self._store, self.rank, self.world, timedelta(seconds=TIMEOUT_S))

    def broadcast(self, tensor: Tensor) -> None:
        """Moves the source's bytes to every rank."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.source, 0
        self._run(lambda group: group.broadcast([tensor], options))

    def scatter(self, out: Tensor, parts: list[Tensor] | None) -> None:
        """Moves each part of the source's to its rank."""
        options = dist.ScatterOptions()
        options.rootRank = self.source
        self._run(lambda group: group.scatter([out], [] if parts is None else [parts], options))

    def finish(self) -> None:
        """Returns when every rank has come here."""
        self._run(lambda group: group.barrier(dist.BarrierOptions()))

    def _run(self, collective: Callable[[Any], Any]) -> None:
        try:
            collective(self._group).wait()  # in no variable: a traceback would keep the connections open
        except RuntimeError as error:
            raise RuntimeError(f"{self.what}: {self._reason(error)}") from error

    def _reason(self, error: RuntimeError) -> str:
        """What another rank left in the store before it closed its connections, else what the connection says."""
        try:
            self._store.wait(["failed"], timedelta(seconds=1))
            return str(self._store.get("failed").decode())
        except Exception:
            text = str(error).partition(" This is typically")[0]  # and gloo's advice
            text = text.partition("] ")[2] or text
            return f"a rank ended or stopped answering while loading from {self.name(self.source)}: {text}"

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why this one gives up, and closes its connections."""
        if self._group is not None:
            try:
                if not self._store.check(["failed"]):
                    self._store.set("failed", f"{self.name(self.rank)} failed: {type(error).__name__}: {error}")
            except Exception:  # the store's own process is gone; the others see the connections close
                pass
        self.close()

    def close(self) -> None:
        """Closes the data group's connections."""
        self._group = None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.fail(error)
        self.close()


def _encoded(kind: int, index: int = 0, nbytes: int = 0) -> Tensor:
    return torch.frombuffer(bytearray(_HEADER.pack(_MAGIC, kind, index, nbytes).ljust(64, b"\0")), dtype=torch.uint8)


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
                announce(group, None)
                continue
            if item is None:
                group.broadcast(_encoded(_DONE))
                break
            if isinstance(item, Exception):
                announce_failure(group, item)
                raise item
            index, slot = item
            bucket = buckets[index]
            group.broadcast(_encoded(_DATA, index, bucket.nbytes))
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


def announce(group: LoaderGroup, data: bytes | None) -> None:
    """On the source, outside `send`: says that it is alive (None), or hands every rank the same bytes."""
    if data is None:
        group.broadcast(_encoded(_ALIVE))
        return
    group.broadcast(_encoded(_DATA, 0, len(data)))
    group.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def announce_failure(group: LoaderGroup, error: Exception) -> None:
    """On the source: tells the others why nothing more will come."""
    text = bytearray(f"{type(error).__name__}: {error}".encode())
    try:
        group.broadcast(_encoded(_FAILED, 0, len(text)))
        group.broadcast(torch.frombuffer(text, dtype=torch.uint8))
        group.finish()
    except RuntimeError:  # nobody is left to be told; the error itself counts
        pass


@dataclass(frozen=True)
class Message:
    """A header of the source's.

    Attributes:
        kind: alive, data or done; a failure raises.
        index: of the bucket that follows.
        nbytes: that follow.
    """

    kind: int
    index: int
    nbytes: int


def hear(group: LoaderGroup) -> Message:
    """On every other rank: the source's next header.

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
    return Message(kind, index, nbytes)


def hear_data(group: LoaderGroup) -> bytes:
    """On every other rank: the bytes that the source `announce`s, however long it takes while it is alive."""
    while (message := hear(group)).kind != _DATA:
        pass
    data = torch.empty(message.nbytes, dtype=torch.uint8)
    group.broadcast(data)
    return data.numpy().tobytes()


def receive(
    group: LoaderGroup, targets: Sequence[Target], buckets: Sequence[Bucket]
) -> None:
    """Every other rank's side: takes what the source announces until it says that all is sent.

    Raises:
        RuntimeError: the source failed, with its text, or a rank is gone.
    """
    slot = torch.empty(max((bucket.nbytes for bucket in buckets), default=0), dtype=torch.uint8)
    while True:
        message = hear(group)
        if message.kind == _DONE:
            group.finish()
            return
        if message.kind == _DATA:
            bucket = buckets[message.index]
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
