"""Equal blocks, simulated three times instead of thirty: the first, one in the middle that stands for all others, the last.

A model repeats its blocks, and a simulated step costs a fixed time per op. `fold_` takes the blocks out that the middle one
can stand for; `Fold` tells a `StorageTracker` when the middle one runs, so that what it leaves behind is counted as often as
there are blocks like it. The answer is that of the whole model, byte for byte (tests/memory/test_fold.py).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfbyte.distributed.grouping import shared_parameters
from halfbyte.formats import Format
from halfbyte.memory.tracker import StorageTracker, in_backward

__all__ = ["Fold", "NotFoldableError", "fold_"]

_POSITIONS = ("layer_idx", "layer_id", "layer_number", "block_idx")  # what may differ between blocks that are alike
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_STATE = ("_parameters", "_buffers", "_modules")
_PERIODS = range(1, 9)  # blocks after which the pattern starts again: gemma 3 has five local layers and a global one


class NotFoldableError(RuntimeError):
    """The model does not run its blocks one after the other; simulate the whole one."""


@dataclass(eq=False)
class Fold:
    """A run of equal blocks of which three are left.

    Attributes:
        middle: the blocks that stand for the ones taken out, in order; more than one where a pattern of blocks repeats.
        after: the block that runs next.
        extra: how many more of them there are in the whole model.
    """

    middle: tuple[nn.Module, ...]
    after: nn.Module
    extra: int

    def watch(self, tracker: StorageTracker) -> Iterator[Any]:
        """Hooks that tell the tracker when the middle blocks begin and end, in forward and in backward."""

        def begins(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not in_backward():  # in backward: its recomputation
                inputs = _tensors(args, kwargs)
                tracker.enter(self)
                for tensor in inputs:  # each block keeps its own input
                    tracker.own(tensor, self)
                _on_gradient(inputs, lambda: tracker.leave(self))

        def ends(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not in_backward():
                inputs = _tensors(args, kwargs)
                for tensor in inputs:
                    tracker.own(tensor, None)
                tracker.leave(self)
                _on_gradient(inputs, lambda: tracker.enter(self, backward=True))

        yield self.middle[0].register_forward_pre_hook(begins, with_kwargs=True)
        yield self.after.register_forward_pre_hook(ends, with_kwargs=True)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _on_gradient(inputs: Sequence[Tensor], call: Any) -> None:
    """Calls when the gradient of a block's input is complete; there is none to wait for where nothing before trains."""
    for tensor in inputs:
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            tensor.register_hook(lambda _: call())
            return


def fold_(model: nn.Module) -> list[Fold]:
    """Takes out of a model's lists what a middle block can stand for.

    Args:
        model: changed in place: members of `ModuleList` and `Sequential` are removed.

    Returns:
        What was folded; empty if no list holds four equal blocks in a row.
    """
    shared = {id(p) for p in shared_parameters(model)}
    folds: list[Fold] = []
    done: set[nn.Module] = set()
    for module in list(model.modules()):
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 3 and module not in done:
            found = _fold_list(module, shared)
            folds += found
            if found:
                done.update(module.modules())
    return folds


def _fold_list(container: Any, shared: set[int]) -> list[Fold]:
    members = list(container)
    signatures = [_signature(member, shared) for member in members]
    kept: list[int] = []
    folds: list[Fold] = []
    at = 0
    while at < len(members):
        period, repeats = _run(signatures, at)
        if repeats > 3:
            last = at + period * (repeats - 1)
            folds.append(Fold(tuple(members[at + period : at + 2 * period]), members[last], repeats - 3))
            kept += [*range(at, at + 2 * period), *range(last, last + period)]
            at = last + period
        else:
            kept.append(at)
            at += 1
    # A model may say by number what a block is (`config.layer_types[i]`): the numbers that are left must still be right.
    if not folds or [signatures[index] for index in kept] != signatures[: len(kept)]:
        return []
    container._modules = OrderedDict((str(number), members[index]) for number, index in enumerate(kept))
    return folds


def _run(signatures: list[Any], at: int) -> tuple[int, int]:
    """The period and the repeats, from `at` on, that leave the fewest blocks; (1, 1) if none saves any."""
    best, saved = (1, 1), 0
    for period in _PERIODS:
        repeats = 1
        while signatures[at : at + period] == signatures[at + repeats * period : at + (repeats + 1) * period]:
            repeats += 1
        if period * (repeats - 3) > saved and signatures[at : at + period]:
            best, saved = (period, repeats), period * (repeats - 3)
    return best


def _signature(block: nn.Module, shared: set[int]) -> Any:
    """Equal for blocks that take the same memory: classes, settings, and every tensor's shape, dtype and trainability."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = {k: v for k, v in vars(module).items() if k not in _STATE and k not in _POSITIONS}
        parts.append((name, type(module), _value(settings)))
    for tensors in (block.named_parameters(), block.named_buffers()):
        parts += [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]
    # A tensor that another module holds too is counted once, whatever this block would count as.
    return [*parts, id(block)] if any(id(p) in shared for p in block.parameters()) else parts


def _value(value: Any) -> Any:
    """What can be compared: plain values by value, anything else by identity."""
    if isinstance(value, dict):  # numbers as keys are those of hooks, which differ everywhere
        return [(key if isinstance(key, str) else "", _value(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_value(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, str):  # a module's own name, which PEFT keeps in it, says its number
        return _NUMBER.sub("*", value)
    if value is None or isinstance(value, (bool, int, float, torch.dtype)):
        return value
    if isinstance(value, partial):
        return _value([value.func, value.args, value.keywords])
    if isinstance(value, MethodType):
        return id(value.__func__)
    return value if isinstance(value, Format) else id(value)
