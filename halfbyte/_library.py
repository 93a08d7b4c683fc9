"""Loads the two op libraries once and keeps a load error to raise at the first use of an op.

Importing halfbyte must never fail or print because of a missing or foreign binary: `halfbyte info`, documentation builds
and error reporting have to work then, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = [
    "LIBRARY_DIR",
    "build_info",
    "load_error",
    "node_of",
    "overload",
    "register_autocast",
    "register_fake",
    "register_kernel",
]

LIBRARY_DIR = Path(__file__).parent / "lib"
_F = TypeVar("_F", bound=Callable[..., Any])


def _load() -> str | None:
    """Loads both libraries; returns what went wrong, or None."""
    cpu = LIBRARY_DIR / "libhalfbyte_cpu.so"
    if torch._C._dispatch_has_kernel("halfbyte::quantize"):
        # A second copy would silently replace the kernels of the first.
        return f"the halfbyte ops are already registered by another copy of the library; {cpu} was not loaded"
    if not cpu.is_file():
        return f"{cpu} does not exist; build it with: pip install --no-build-isolation -e ."
    cuda = LIBRARY_DIR / "libhalfbyte_cuda.so"
    for path in (cpu, cuda) if cuda.is_file() else (cpu,):
        try:
            torch.ops.load_library(path)
        except OSError as error:
            built = build_info().get("torch_version", "unknown")
            return f"{path.name} could not be loaded into torch {torch.__version__} (built against torch {built}): {error}"
    return None


def build_info() -> dict[str, Any]:
    """What the libraries were built from and for (`_build_info.json` beside them); empty if not built."""
    path = LIBRARY_DIR / "_build_info.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


load_error: str | None = _load()
_registrations: Any = torch.library.Library("halfbyte", "FRAGMENT") if load_error is None else None


def overload(name: str) -> Callable[..., Any]:
    """The dispatcher op `halfbyte::<name>`, or a function that raises the load error when called."""
    if load_error is None:
        return getattr(torch.ops.halfbyte, name).default

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"halfbyte::{name}: {load_error}")

    return missing


def register_fake(name: str) -> Callable[[_F], _F]:
    """`torch.library.register_fake` for a halfbyte op; does nothing if the libraries are not loaded."""

    def decorate(function: _F) -> _F:
        if load_error is None:
            torch.library.register_fake(f"halfbyte::{name}")(function)
        return function

    return decorate


def register_kernel(name: str, function: Callable[..., Any]) -> None:
    """Makes a Python function the kernel of an op on every device; does nothing if the libraries are not loaded."""
    if load_error is None:
        _registrations.impl(name, function, "CompositeExplicitAutograd")


def node_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, at a third of its cost where no functorch transform (`torch.func.grad`, `vmap`) is active.

    `apply` of a Function with a `setup_context`, which the transforms need, binds the signature of `forward` at every call.
    The same formula without one does not: 47 us against 22 for a small layer.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    plain: Any = type(function.__name__, (torch.autograd.Function,), methods)

    def apply(*args: Any) -> Any:
        transformed = torch._C._are_functorch_transforms_active()
        return (function if transformed else plain).apply(*args)

    return apply


def register_autocast(name: str, function: Callable[[str], Callable[..., Any]]) -> None:
    """Installs `function(device_type)` under the autocast keys of an op.

    By hand, because `torch.library.register_autocast` casts every float argument. The kernel runs with the autocast key
    excluded, so calling the op inside it does not come back here.
    """
    if load_error is not None:
        return
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        kernel = function(device_type)

        def guarded(*args: Any, _kernel: Callable[..., Any] = kernel, _keys: Any = keys) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_keys):
                return _kernel(*args)

        _registrations.impl(name, guarded, key)
