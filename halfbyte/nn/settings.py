"""What `init_quantized` contexts are active on this thread: shared by construction, initializers and host bridges."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.formats import Format
from halfbyte.nn.experts import QuantExperts, decode_experts
from halfbyte.nn.linear import checked_activations
from halfbyte.nn.packed import Packed, as_dtype, dense_buffer
from halfbyte.nn.skip import SkipRules
from halfbyte.ops.dequantize import dequantize

__all__ = ["InitSettings", "active_settings", "hosts", "on_dense", "owner_of", "paused", "register_host", "stack"]


class InitSettings:
    """What one `init_quantized` context was asked for; hosts read it (`format`, `skip`, `compute_dtype`)."""

    one_reader = False
    """Whether every rank comes here with the same calls, so that one of them can read checkpoints for all."""

    def __init__(
        self,
        format: str | Format,
        skip: Iterable[str] | None,
        compute_dtype: torch.dtype | str | None,
        activations: str | None = None,
    ) -> None:
        self.format = Format.parse(format)
        self.activations = checked_activations(activations, self.format)
        self.skip = None if skip is None else SkipRules(skip).patterns
        self.compute_dtype = as_dtype("compute_dtype", compute_dtype)
        self.rules = SkipRules(skip)
        self.born: weakref.WeakSet[Packed] = weakref.WeakSet()
        self.built = 0  # layers quantized inside and not turned back; hosts add those that they load
        self.hosts = ExitStack()


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[InitSettings] = []
        self.pauses = 0


_thread = _ThreadState()
_Host = Callable[[InitSettings], AbstractContextManager[None]]
hosts: list[_Host] = []


def active_settings() -> InitSettings | None:
    """Settings of the innermost context of this thread, or None outside one or while it is paused."""
    return _thread.stack[-1] if _thread.stack and not _thread.pauses else None


@contextmanager
def paused() -> Iterator[None]:
    """Suspends the context on this thread: for hosts that build adapters, or load a model with their own quantizer."""
    _thread.pauses += 1
    try:
        yield
    finally:
        _thread.pauses -= 1


def register_host(host: _Host) -> None:
    """Adds a context manager that every `init_quantized` context enters, given its settings.

    Called by the bridge to a host library when it is imported; contexts that are already active on this thread enter it
    at once, so a host imported inside the context is served as well.
    """
    hosts.append(host)
    for settings in _thread.stack:
        settings.hosts.enter_context(host(settings))


def stack() -> list[InitSettings]:
    """The contexts of this thread, outermost first."""
    return _thread.stack


class Owner(NamedTuple):
    """Which packed rows an initializer was given.

    Attributes:
        module: a `QuantLinear` or `QuantExperts`.
        name: of the parameter.
    """

    module: Any
    name: str

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """Shape of the dense weight that models would initialize there."""
        module = self.module
        shape: tuple[int, ...] = (
            module.dense_shape(self.name) if isinstance(module, QuantExperts) else module.weight_shape
        )
        return shape


def owner_of(tensor: Any) -> Owner | None:
    """Whose packed rows `tensor` is or aliases, among what was born in active contexts of this thread, or None."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.uint8 or tensor.is_meta:
        return None
    pointer = tensor.untyped_storage().data_ptr()
    for settings in _thread.stack:
        for module in settings.born:
            for name, rows in module.named_parameters(recurse=False):
                if rows.dtype == torch.uint8 and rows.untyped_storage().data_ptr() == pointer:
                    return Owner(module, name)
    return None


_DECODE_ELEMENTS = 1 << 20  # old values are decoded in slices, so that one dense weight is all that ever exists


def on_dense(owner: Owner, initialize: Callable[[Tensor], Any]) -> None:
    """Lets `initialize` fill a temporary dense weight of `owner.dense_shape`, then packs it."""
    module = owner.module
    dense = dense_buffer(owner.dense_shape, module.dense_dtype, module.get_parameter(owner.name).device)
    with torch.no_grad():
        if isinstance(module, QuantExperts):
            decode_experts(module, owner.name, dense)
            initialize(dense)
            module.quantize_(owner.name, dense)
            return
        step = max(1, _DECODE_ELEMENTS // module.in_features)
        for start in range(0, module.out_features, step):
            rows = slice(start, start + step)
            dense[rows] = dequantize(module.packed[rows], module.format, module.in_features, module.dense_dtype)
        initialize(dense)
    module.quantize_(dense)
