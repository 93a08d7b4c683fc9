"""Which children of a module have their weight read by the module itself, where packed rows would reach its arithmetic.

Hosts do so in many places: torch's `MultiheadAttention`, T5's feed-forward (casts activations to the weight's dtype),
Mamba's fused kernels, Gemma3n's AltUp (clamps a weight in place: packed bytes would be damaged silently), WavLM's
attention. So the answer is read off the code: `self.<child>.weight` in the bytecode of the methods.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

__all__ = ["weights_read_by"]

# Of these every method counts: they are called from other modules' forward. Elsewhere only `forward` does; a layer that
# merges adapters into `self.linear.weight` on request still multiplies through `self.linear`. Nor does asking for a dtype
# count there: it may be a mere comparison, and a cast to it raises and can be changed.
_HOSTS = ("torch.nn.", "transformers.", "transformers_modules.")
# Methods that build, initialize, tie or hand out.
_BUILDERS = ("init", "tie", "output_embeddings", "input_embeddings")
# Names that tell that a method knows of packed weights, or reads them only under an option that is off unless asked for.
_AWARE = ("uint8", "slow_but_exact")


_FOUND: dict[type, frozenset[str]] = {}  # not functools.cache: mypy finds types of modules unhashable


def weights_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Names of attributes whose `.weight` the class reads itself.

    Args:
        kind: any module class; nothing of it is run.

    Example:
        >>> from torch import nn
        >>> sorted(weights_read_by(nn.MultiheadAttention) & {"out_proj", "q_proj"})
        ['out_proj']
    """
    if kind not in _FOUND:
        _FOUND[kind] = frozenset(_find(kind))
    return _FOUND[kind]


def _find(kind: type) -> Iterator[str]:
    seen: set[str] = set()
    for owner in kind.__mro__:
        if owner is nn.Module:
            break
        for name, method in vars(owner).items():
            function = inspect.unwrap(method) if callable(method) else method
            if name in seen or not isinstance(function, FunctionType):
                continue
            seen.add(name)
            host = owner.__module__.startswith(_HOSTS) and not any(part in name for part in _BUILDERS)
            if name == "forward" or host:
                yield from _read(function.__code__, ("device",) if host else ("device", "dtype"))


def _read(code: CodeType, harmless: tuple[str, ...]) -> Iterator[str]:
    """Attributes x of `self.x.weight` in a function and the functions inside it, except of `self.x.weight.<harmless>`."""
    if any(name in _AWARE for name in _names(code)):
        return
    steps = list(dis.get_instructions(code))  # the last returns
    for owner, child, weight, then in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
        attributes = child.opname.startswith("LOAD_ATTR") and weight.opname.startswith("LOAD_ATTR")
        if then.opname.startswith("LOAD_ATTR") and then.argval in harmless:
            continue
        if attributes and weight.argval == "weight" and owner.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            last = owner.argval[-1] if isinstance(owner.argval, tuple) else owner.argval
            if last == "self":
                yield child.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant, harmless)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
