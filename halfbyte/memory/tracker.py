"""StorageTracker: follows every storage that a (fake) training step makes, from the op that makes it to its release."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StorageTracker"]

_READ = torch.ops.aten._local_scalar_dense.default
_LINEAR_TOKENS = 512  # kLinearTokens of csrc/cpu: rows of activations that the tiled product converts at a time


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of live storages by kind, and keeps the moment at which they were most.

    Enter it inside a `FakeTensorMode`: ops then make no data, but their results are storages with a size and a lifetime,
    which is all that is needed. Numbers that the step reads back (`.item()`, as torch's own optimizers do with the step
    count) are taken as 1, since no data exists.

    Attributes:
        kind: what new storages are counted as.
        live: bytes by kind now.
        peak: largest sum so far.
        at_peak: bytes by kind at that moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "temporaries"
        self.live: defaultdict[str, int] = defaultdict(int)
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.ignored: set[int] = set()
        self._kinds: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every op."""
        if func is _READ and isinstance(args[0], torch._subclasses.FakeTensor):
            return _one(args[0].dtype)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        inside = _TEMPORARIES.get(str(func))
        if inside is not None:
            self.moment(inside(args))
        return out

    def track(self, tensor: Tensor, kind: str | None = None) -> None:
        """Counts a tensor's storage from now on; an explicit `kind` also renames one that is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.ignored:
            return
        known = self._kinds.get(key)
        if known is not None:
            if kind is not None and known[0] != kind:
                self.live[known[0]] -= known[1]
                self.live[kind] += known[1]
                self._kinds[key] = (kind, known[1])
                if self.total == self.peak:  # a gradient gets its name right after it is made
                    self.at_peak = {each: size for each, size in self.live.items() if size}
            return
        size = storage.nbytes()
        kind = kind or self.kind
        self._kinds[key] = (kind, size)
        weakref.finalize(storage, self._released, key)
        self.add(kind, size)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never counts these tensors' storages: someone else accounts for them. Keep them alive."""
        self.ignored.update(t.untyped_storage()._cdata for t in tensors)

    def add(self, kind: str, size: int) -> None:
        """Counts `size` bytes (negative: releases them) that no tensor stands for."""
        self.live[kind] += size
        self.total += size
        if size > 0:
            self.moment()

    def moment(self, inside: int = 0) -> None:
        """Compares this moment with the peak; `inside`: bytes that a kernel takes and gives back during its call."""
        if self.total + inside > self.peak:
            self.peak = self.total + inside
            self.at_peak = {kind: size for kind, size in self.live.items() if size}
            if inside:
                self.at_peak[self.kind] = self.at_peak.get(self.kind, 0) + inside

    def _released(self, key: int) -> None:
        kind, size = self._kinds.pop(key)
        self.live[kind] -= size
        self.total -= size


def _one(dtype: torch.dtype) -> float | bool:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _linear(args: tuple[Any, ...]) -> int:
    """The activations in the product's own order: at most 512 tokens at a time."""
    input, in_features = args[0], args[5]
    if input.device.type != "cpu":
        return 0
    tokens = input.numel() // in_features
    return min(tokens, _LINEAR_TOKENS) * in_features * input.element_size()


_TEMPORARIES: dict[str, Callable[[tuple[Any, ...]], int]] = {"halfbyte.linear.default": _linear}
