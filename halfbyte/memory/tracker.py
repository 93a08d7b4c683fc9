"""StorageTracker: follows every storage that a (fake) training step makes, from the op that makes it to its release."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfbyte.memory.cpu_kernels import cpu_memory
from halfbyte.memory.cuda_kernels import backward_bytes, linear_bytes

if TYPE_CHECKING:
    from halfbyte.memory.fold import Fold

__all__ = ["StorageTracker", "in_backward"]

_CUDA_BLOCK = 512  # torch's allocator on CUDA hands out multiples of it, and `memory_allocated` counts those


@dataclass
class _Entry:
    """A counted storage: what it is, its bytes, the fold that it belongs to, as how many it counts now, and who ends it."""

    kind: str
    size: int
    owner: Fold | None
    times: int
    released: weakref.finalize[Any, Any]


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of live storages by kind, and keeps the moment at which they were most.

    Enter it inside a `FakeTensorMode`: ops then make no data, but their results are storages with a size and a lifetime,
    which is all that is needed. What the step asks of values is answered by `Answers`.

    Storages may belong to a `Fold`: between the runs of its middle block they count as often as the whole model has such
    blocks. While it runs they count once, and the other blocks as what they hold then: in forward and in backward, that is
    what the middle block held before it ran, for some of them, and what it holds after, for the others. Sums over blocks are
    largest with all of one or all of the other, and both are compared with the peak.

    Args:
        host: whether tensors on the CPU count; not where the memory of another device is planned.

    Attributes:
        kind: what new storages are counted as.
        live: bytes by kind now.
        peak: largest sum so far.
        at_peak: bytes by kind at that moment.
        sums: the sum at every moment that was compared with the peak, in order.
        owners: the fold that a parameter belongs to, by its id.
        kept: what a thread of a CPU keeps of the products with packed rows, at most.
    """

    def __init__(self, host: bool = True) -> None:
        super().__init__()
        self.host = host
        self.kind = "temporaries"
        self.live: defaultdict[str, int] = defaultdict(int)
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.sums: list[int] = []
        self.owners: dict[int, Fold] = {}
        self.kept = 0
        self.ignored: set[int] = set()
        self._entries: dict[int, _Entry] = {}
        self._inside: Fold | None = None
        self._making: Fold | None = None  # the fold that new storages belong to
        self._others: dict[str, int] = {}  # what the other blocks of the fold that runs are counted as
        self._ran: set[Fold] = set()
        self._began = 0
        self._inner: tuple[int, dict[str, int]] = (0, {})  # the largest sum since then

    def __exit__(self, *exception: object) -> None:
        """Follows nothing any more: storages whose end it waits for would keep it, and it the blocks that own them."""
        super().__exit__(*exception)
        for entry in self._entries.values():
            entry.released.detach()
        self._entries.clear()
        self.owners.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every op."""
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.__name__.startswith("_foreach") and isinstance(out, (list, tuple)):
            given = next(arg for arg in args if isinstance(arg, (list, tuple)))
            for made, each in zip(out, given, strict=False):  # a temporary per parameter
                self.track(made, owner=self._owner_of(each))
        else:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.track(leaf)
        if func.namespace == "halfbyte":
            self._product(str(func), args)
        return out

    def _product(self, name: str, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        if args[0].device.type != "cpu":
            if name in _TEMPORARIES:
                self.moment(_TEMPORARIES[name](args))
        elif memory := cpu_memory(name, args):
            kept, temporary = memory
            self.kept = max(self.kept, kept)
            self.moment(temporary)

    def track(self, tensor: Tensor, kind: str | None = None, owner: Fold | None = None) -> None:
        """Counts a tensor's storage from now on; an explicit `kind` or `owner` also changes one that is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.ignored or (not self.host and tensor.device.type == "cpu"):
            return
        known = self._entries.get(key)
        if known is not None:
            self._rename(known, kind or known.kind)
            if owner is not None:
                self.own(tensor, owner)
            return
        kind, owner = kind or self.kind, owner or self._making
        released = weakref.finalize(storage, self._released, key)
        size = storage.nbytes()
        if tensor.device.type == "cuda":  # a fake tensor's storage is on meta
            size = -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
        entry = self._entries[key] = _Entry(kind, size, owner, self._times(owner), released)
        self.add(kind, entry.size * entry.times)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never counts these tensors' storages: someone else accounts for them. Keep them alive."""
        self.ignored.update(t.untyped_storage()._cdata for t in tensors)

    def owner(self, parameter: Tensor) -> Fold | None:
        """The fold that a parameter belongs to."""
        return self.owners.get(id(parameter))

    def count(self, parameter: Tensor) -> int:
        """How many parameters of the whole model this one stands for."""
        owner = self.owner(parameter)
        return 1 if owner is None else 1 + owner.extra

    def own(self, tensor: Tensor, owner: Fold | None) -> None:
        """Makes a counted storage that of a fold, or of none."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.owner is not owner:
            before, entry.owner, entry.times = entry.times, owner, self._times(owner)
            self.add(entry.kind, entry.size * (entry.times - before))

    @property
    def balanced(self) -> bool:
        """Whether every fold that was entered was left, and each that a step watches ran at least once."""
        return self._inside is None and {*self.owners.values()} <= self._ran

    def enter(self, fold: Fold, backward: bool = False) -> None:
        """A fold's middle block begins: what it holds and makes counts once from here on, the others as it stands now."""
        if self._inside is not None:
            raise RuntimeError("a block runs inside of another one")
        self._others = self._held(fold)
        self._inside, self._making = fold, None if backward else fold
        self._recount(fold)
        self._began, self._inner = len(self.sums), (0, {})

    def leave(self, fold: Fold) -> None:
        """It ends: the others are as it is now."""
        if self._inside is not fold:
            raise RuntimeError("blocks do not run one after the other")
        self._ran.add(fold)
        others = self._held(fold)
        change = {kind: others.get(kind, 0) - self._others.get(kind, 0) for kind in {*others, *self._others}}
        more, (inner, at_inner) = sum(change.values()), self._inner
        self.sums += [sum + more for sum in self.sums[self._began :]]
        if inner + more > self.peak:
            self.peak = inner + more
            kinds = {*at_inner, *change}
            self.at_peak = {kind: size for kind in kinds if (size := at_inner.get(kind, 0) + change.get(kind, 0))}
        for kind, size in change.items():
            self.live[kind] += size
        self.total += more
        self._inside = self._making = None
        self._recount(fold)
        self.moment()

    def add(self, kind: str, size: int) -> None:
        """Counts `size` bytes (negative: releases them) that no tensor stands for."""
        self.live[kind] += size
        self.total += size
        if size > 0:
            self.moment()

    def moment(self, inside: int = 0) -> None:
        """Compares this moment with the peak; `inside`: bytes that a kernel takes and gives back during its call."""
        sum = self.total + inside
        self.sums.append(sum)
        if sum > self.peak:
            self.peak, self.at_peak = sum, self._kinds(inside)
        if self._inside is not None and sum > self._inner[0]:
            self._inner = (sum, self._kinds(inside))

    def _kinds(self, inside: int) -> dict[str, int]:
        kinds = {kind: size for kind, size in self.live.items() if size}
        if inside:
            kinds[self.kind] = kinds.get(self.kind, 0) + inside
        return kinds

    def _rename(self, entry: _Entry, kind: str) -> None:
        if entry.kind == kind:
            return
        self.live[entry.kind] -= entry.size * entry.times
        self.live[kind] += entry.size * entry.times
        entry.kind = kind
        if self.total == self.peak:  # a gradient gets its name right after it is made
            self.at_peak = self._kinds(0)
        if self._inside is not None and self.total == self._inner[0]:
            self._inner = (self.total, self._kinds(0))

    def _times(self, owner: Fold | None) -> int:
        return 1 if owner is None or owner is self._inside else 1 + owner.extra

    def _owner_of(self, tensor: Tensor) -> Fold | None:
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry.owner

    def _held(self, fold: Fold) -> dict[str, int]:
        """What the other blocks take if each holds what the middle one does."""
        held: defaultdict[str, int] = defaultdict(int)
        for entry in self._entries.values():
            if entry.owner is fold:
                held[entry.kind] += entry.size * fold.extra
        return held

    def _recount(self, fold: Fold) -> None:
        for entry in self._entries.values():
            if entry.owner is fold:
                entry.times = self._times(fold)

    def _released(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.live[entry.kind] -= entry.size * entry.times
        self.total -= entry.size * entry.times


def in_backward() -> bool:
    """Whether autograd runs: a module's forward is a recomputation then."""
    return torch._C._current_graph_task_id() != -1


def _linear(args: tuple[Any, ...]) -> int:
    input, packed, format, block_size, in_features = args[0], args[1], *args[3:6]
    return linear_bytes(input.numel() // in_features, packed.shape[0], in_features, format, block_size, input.dtype)


def _backward(args: tuple[Any, ...]) -> int:
    grad, packed, format, _, in_features = args
    return backward_bytes(grad.numel() // packed.shape[0], packed.shape[0], in_features, format, grad.dtype)


def _given(args: tuple[Any, ...], index: int) -> bool:
    """Whether there is a last argument that defaults to None."""
    return len(args) > index and args[index] is not None


def _copies(t: Tensor, dtype: torch.dtype, masked: bool = False) -> int:
    """`t` without what dropout drops, and that in `dtype`."""
    return t.numel() * (t.element_size() * masked + dtype.itemsize * (t.dtype != dtype))


def _lora(args: tuple[Any, ...]) -> int:
    """What x A^T multiplies; after it what the product takes, which starts from the branch in the output's memory."""
    input, packed, lora_A, sizes = args[0], args[1], args[3], args[7:10]
    wide = input.dtype if input.dtype == lora_A.dtype else torch.float32
    return max(_copies(input, wide, _given(args, 10)), _linear((input, packed, None, *sizes)))


def _lora_adapter(args: tuple[Any, ...]) -> int:
    """What the gradients of x A^T, A and B multiply."""
    grad, input, projected, needs_A = args[0], args[1], args[2], args[7]
    copies = _copies(input, projected.dtype, _given(args, 9)) if needs_A else 0
    return _copies(grad, projected.dtype) + copies


def _lora_backward(args: tuple[Any, ...]) -> int:
    grad, packed, sizes = args[0], args[1], args[4:7]
    return _backward((grad, packed, *sizes))


_TEMPORARIES: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "halfbyte.linear.default": _linear,
    "halfbyte.linear_backward_input.default": _backward,
    "halfbyte.lora_linear.default": _lora,
    "halfbyte.lora_linear_backward_adapter.default": _lora_adapter,
    "halfbyte.lora_linear_backward_input.default": _lora_backward,
}
"""What a call takes on CUDA and gives back."""
