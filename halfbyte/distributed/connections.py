"""The connections over which ranks load together, and what a rank that fails, dies or hangs looks like to the others."""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALIVE_S", "LoaderGroup"]

TIMEOUT_S = 8.0
"""Of every collective that moves data: with what it takes to raise, a failure is known everywhere within 10 s."""
SILENCE_S = 60.0
"""How long a rank may say nothing while it works by itself. It does every 2 s, unless a library call keeps Python's lock, as
initializing CUDA may. The connections tell of a death at once."""
ALIVE_S = 2.0


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
        """Runs `make` on every rank, for as long as it takes, and returns all results; if it raises anywhere, all raise.

        The rank that failed raises its own exception, the others a RuntimeError with its text (the source's first).
        """
        error: Exception | None = None
        mine: tuple[str | None, Any]
        with self._heard():
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

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Inside, a thread tells the other ranks every 2 s that this one is alive; it ends when all have left."""
        left = threading.Event()
        gone: list[RuntimeError] = []

        def tell() -> None:
            try:
                while not all(self._all(torch.tensor([int(left.wait(ALIVE_S))]))):
                    pass
            except RuntimeError as error:
                gone.append(error)

        thread = threading.Thread(target=tell, name="halfbyte-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()
        if gone:
            raise gone[0]

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
        options.timeout = timedelta(seconds=SILENCE_S)
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
