"""Loads the two op libraries once and keeps a load error to raise at the first use of an op.

Importing halfbyte must never fail or print because of a missing or foreign binary: `halfbyte info`, documentation builds
and error reporting have to work then, too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = [
    "CPU_ISAS",
    "LIBRARY_DIR",
    "build_info",
    "cpu_isa",
    "differentiable",
    "eager",
    "load_error",
    "overload",
    "register_autocast",
    "register_fake",
    "register_kernel",
]

LIBRARY_DIR = Path(__file__).parent / "lib"
CPU_ISAS = ("scalar", "avx2", "avx2_vnni", "avx512_base", "avx512_vnni", "avx512", "amx")  # the ints of halfbyte::cpu_isa
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


def overload(name: str, which: str = "default") -> Callable[..., Any]:
    """The dispatcher op `halfbyte::<name>`, or a function that raises the load error when called."""
    if load_error is None:
        operator: Callable[..., Any] = getattr(getattr(torch.ops.halfbyte, name), which)
        return operator

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"halfbyte::{name}: {load_error}")

    return missing


def cpu_isa() -> str:
    """The instruction set whose CPU kernels run, one of CPU_ISAS.

    Raises:
        ValueError: HALFBYTE_CPU_ISA names none, or one that this CPU does not have.
    """
    return CPU_ISAS[overload("cpu_isa")()]


def register_fake(name: str) -> Callable[[_F], _F]:
    """`torch.library.register_fake` for a halfbyte op; does nothing if the libraries are not loaded.

    The dispatcher takes the same function for tensors on meta, also where only some are (a layer that was never loaded):
    the result would be memory that nothing was written to. That raises a ValueError.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            if "meta" in devices and len(devices) > 1:
                others = ", ".join(sorted(devices - {"meta"}))
                raise ValueError(
                    f"halfbyte::{name}: all tensors must have data, got some on meta and some on {others}; was a layer "
                    f"built on meta and never loaded?"
                )
            return function(*args, **kwargs)

        if load_error is None:
            for op in _overloads(name):
                torch.library.register_fake(op)(checked)
        return function

    return decorate


def register_kernel(name: str, function: Callable[..., Any]) -> None:
    """Makes a Python function the kernel of an op on every device; does nothing if the libraries are not loaded."""
    if load_error is None:
        _registrations.impl(name, function, "CompositeExplicitAutograd")


def _overloads(name: str) -> list[Any]:
    """The op, and its overload `eager` if it has one."""
    packet = getattr(torch.ops.halfbyte, name)
    return [getattr(packet, which) for which in packet.overloads()]


@functools.cache
def eager(name: str) -> Callable[..., Any]:
    """`halfbyte::<name>` without recording autograd, at the least cost per call: its overload of that name.

    The dispatcher does not ask that one's autograd keys, as the formula that `differentiable` registers is Python and would
    be called even where nothing requires grad, and a guard that leaves autograd out of a call costs a fifth of `ops.linear`
    (csrc/README.md, "Host"). Dispatch modes (fake tensors, tracing, selective checkpointing) are shown the op itself.
    Without `OpOverload.__call__`, which only adds a Python frame to its `_op`.
    """
    fast, op = overload(name, "eager"), overload(name)
    if load_error is not None:
        return fast

    def shown(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _registrations.impl(fast, torch.library.fallthrough_kernel, "Autograd")
    _registrations.impl(fast, shown, "Python")
    return fast._op  # type: ignore[attr-defined]


def differentiable(name: str, formula: Any) -> Callable[..., Any]:
    """Makes `formula` the derivative of `halfbyte::<name>`; returns the op as one node of the autograd graph.

    Compiled graphs and direct calls of the op take the formula that is registered with the dispatcher. The returned function
    costs half of that, and a third of `Function.apply`, which binds the signature of `forward` at every call of a Function
    with a `setup_context`. Only functorch's transforms (`torch.func.grad`, `vmap`) need such a one.

    Args:
        name: of the op.
        formula: a class with the static methods `setup_context(ctx, inputs, output)` and `backward(ctx, *grads)`.
    """
    call = eager(name)
    setup_context, backward = staticmethod(formula.setup_context), staticmethod(formula.backward)

    def forward(ctx: Any, *args: Any) -> Any:
        output = call(*args)
        formula.setup_context(ctx, args, output)
        return output

    def product(*args: Any) -> Any:  # `Function.apply` looks for the signature, which `call` itself has not
        return call(*args)

    bases, common = (torch.autograd.Function,), {"backward": backward}
    methods = {**common, "forward": staticmethod(product), "setup_context": setup_context}
    transformable: Any = type(formula.__name__, bases, methods)
    plain: Any = type(formula.__name__, bases, {**common, "forward": staticmethod(forward)})
    # What `Function.apply` ends in. It only unwraps tensors that escaped from a functorch transform before, in Python.
    record: Callable[..., Any] = super(torch.autograd.Function, plain).apply
    transforms_active, unwrap = torch._C._are_functorch_transforms_active, torch._C._functorch.unwrap_if_dead

    def apply(input: Tensor, *args: Any) -> Any:
        if transforms_active():
            return transformable.apply(input, *args)
        return record(unwrap(input), *args)

    if load_error is None:
        torch.library.register_autograd(f"halfbyte::{name}", formula.backward, setup_context=formula.setup_context)
    return apply


def register_autocast(name: str, cast: Callable[..., tuple[Any, ...]]) -> None:
    """Gives an op the arguments `cast(dtype, *args)` under autocast, `dtype` being the autocast dtype.

    By hand, because `torch.library.register_autocast` casts every float argument. The op runs with the autocast key
    excluded, so it does not come back here.
    """
    if load_error is not None:
        return
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        for op in _overloads(name):
            _registrations.impl(op, _casting(op, device_type, key, cast), key)


def _casting(op: Callable[..., Any], device_type: str, key: str, cast: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*cast(torch.get_autocast_dtype(device_type), *args))

    return kernel
