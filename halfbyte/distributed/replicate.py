"""replicate: one rank makes a module, every other one receives it."""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfbyte.distributed.connections import LoaderGroup
from halfbyte.distributed.loading import BUCKET_BYTES, plan_buckets, receive, send

__all__ = ["replicate", "replicating"]

T = TypeVar("T")


class _Thread(threading.local):
    making = False


_thread = _Thread()


def replicate(
    make: Callable[[], T],
    *,
    process_group: Any = None,
    source_rank: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    what: str = "replicate",
) -> T:
    """Calls `make` on one rank and gives its module to all: one process reads and quantizes, the others touch no file.

    The module travels as a pickle without its tensors, so it arrives as it is: renamed, merged, quantized, with adapters,
    tied weights still one. The tensors follow in buckets. Where all ranks' random numbers were in the same state, they are
    in the same state afterwards.

    Args:
        make: makes the module (or anything picklable that holds tensors); called on the source alone, may take its time.
        process_group: None: the default group. Every rank of it calls this.
        source_rank: rank within the group that makes it.
        bucket_bytes: bytes of one bucket, of which the source keeps two and every other rank one.
        what: names the operation in errors.

    Returns:
        On the source what `make` returned; elsewhere its equal, tensors on the same type of device (a CUDA tensor on the
        rank's current one).

    Raises:
        RuntimeError: no process group is initialized, or another rank failed or is gone: within 10 s, with its text; or it
            hangs: within a minute while the source makes the module, within 10 s after that.
        NotImplementedError: the module can't be pickled, or holds a tensor that is not plain (a DTensor); on the source.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"{what}: no process group is initialized; call torch.distributed.init_process_group() first")
        process_group = dist.group.WORLD
    if process_group.size() == 1 or _thread.making:  # inside another one's `make`, which serves the ranks
        return make()
    from halfbyte.checkpoint.sources import TensorSource

    with LoaderGroup(process_group, source_rank, what) as ranks, torch.no_grad():
        module: Any = None
        text, tensors = b"", list[Tensor]()

        def made() -> tuple[bytes, int]:
            nonlocal module, text, tensors
            state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()
            if ranks.is_source:
                module = _made(make)
                text, tensors = _packed(module, what)
            return state, len(text)

        found = ranks.agree(made)
        state, size = found[source_rank]
        body = bytearray(text) if ranks.is_source else bytearray(size)
        ranks.broadcast(torch.frombuffer(body, dtype=torch.uint8))
        if not ranks.is_source:
            module, tensors = _unpacked(body, found[ranks.rank][0] == state)
        entries = [_entry(index, tensor) for index, tensor in enumerate(tensors)]
        spans = [[(0, entry.rows) for entry in entries]] * ranks.world
        buckets = plan_buckets(entries, spans, bucket_bytes)
        if ranks.is_source:
            source = TensorSource({entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)})
            targets = [_Target(entry, None) for entry in entries]
            send(ranks, targets, spans, buckets, lambda fill, still_wanted: fill(source), lambda nbytes: None)
        else:
            receive(ranks, [_Target(entry, tensor) for entry, tensor in zip(entries, tensors, strict=True)], buckets)
    return module


def replicating() -> bool:
    """Whether this thread is inside the `make` of a `replicate`: what it makes is for all ranks already."""
    return _thread.making


class _Target:
    """A whole tensor: the source has it, another rank writes what arrives."""

    def __init__(self, entry: Any, received: Tensor | None) -> None:
        self.entry, self.start, self.stop = entry, 0, entry.rows
        self._bytes = None if received is None else received.detach().view(-1).view(torch.uint8)

    def write(self, first: int, data: Tensor) -> None:
        if self._bytes is not None:
            begin = first * self.entry.row_nbytes
            self._bytes[begin : begin + data.numel()].copy_(data)


def _entry(index: int, tensor: Tensor) -> Any:
    from halfbyte.checkpoint.sources import Entry

    return Entry(str(index), tuple(tensor.shape), tensor.dtype)


def _made(make: Callable[[], Any]) -> Any:
    _thread.making = True
    try:
        with torch.enable_grad():  # as outside: what is made may be trainable
            return make()
    finally:
        _thread.making = False


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors, of which it keeps a list."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._known: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if type(obj) not in (Tensor, nn.Parameter):
            raise NotImplementedError(f"it holds a {type(obj).__name__}, of which each rank has a part")
        index = self._known.setdefault(id(obj), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(obj)
        return index


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        return self._tensors[pid]


def _packed(module: Any, what: str) -> tuple[bytes, list[Tensor]]:
    body = io.BytesIO()
    pickler = _Pickler(body)
    try:
        pickler.dump(module)
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise NotImplementedError(
            f"{what}: {type(module).__name__} can't be handed to the other ranks: {error}; load it on every rank instead"
        ) from error
    kinds = [
        (tuple(t.shape), t.dtype, t.device.type, type(t) is nn.Parameter, t.requires_grad) for t in pickler.tensors
    ]
    # A meta tensor has no bytes to follow.
    sent = [t for t in pickler.tensors if not t.is_meta]
    return pickle.dumps((kinds, torch.get_rng_state(), body.getvalue())), sent


def _unpacked(text: bytes | bytearray, alike: bool) -> tuple[Any, list[Tensor]]:
    kinds, random_state, body = pickle.loads(text)
    tensors: list[Tensor] = []
    for shape, dtype, device, is_parameter, requires_grad in kinds:
        plain = torch.empty(shape, dtype=dtype, device=device)
        tensors.append(nn.Parameter(plain, requires_grad) if is_parameter else plain.requires_grad_(requires_grad))
    module = _Unpickler(io.BytesIO(body), tensors).load()
    if alike:
        torch.set_rng_state(random_state)
    return module, [t for t in tensors if not t.is_meta]
