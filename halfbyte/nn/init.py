"""init_quantized: linear layers that are quantized from birth, so that the dense model never exists.

Inside the context an exact `nn.Linear` becomes a `QuantLinear` while it is constructed. Its name is known only when it is
registered with a parent; a layer that the rules then want dense is turned back (it holds random numbers only).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.attention import adapt_attention
from halfbyte.nn.experts import QuantExperts, dequantize_experts_, expert_weights, quantize_experts_
from halfbyte.nn.hosts import import_bridges
from halfbyte.nn.initializers import Initializers
from halfbyte.nn.linear import QuantLinear, dequantize_linear_, quantize_linear_
from halfbyte.nn.linear_classes import is_linear
from halfbyte.nn.packed import Packed, reusing_dense_buffer
from halfbyte.nn.settings import InitSettings, active_settings, hosts, on_dense, owner_of, paused, stack
from halfbyte.nn.skip import dense_reason, mark_dense, tell_config
from halfbyte.ops.quantize import FLOAT_DTYPES

__all__ = ["entered", "init_quantized"]


@contextmanager
def init_quantized(
    format: str | Format = "nf4",
    *,
    skip: Iterable[str] | None = None,
    compute_dtype: torch.dtype | str | None = None,
    activations: str | None = None,
) -> Iterator[None]:
    """Builds models quantized: every `nn.Linear` constructed inside is packed from birth, fused experts as well.

    No dense model exists at any time: each layer draws its initial weight, packs it and releases it. On meta nothing is
    computed. Initializers that models run afterwards (`nn.init.*`, `weight.data.normal_()`) work on packed rows. Inside
    it, transformers' `from_pretrained` quantizes what it reads unless the call or the checkpoint names a quantization
    (this needs `peft_bridge`), and PEFT's adapters stay dense. Contexts nest; the innermost rules, per thread.

    Args:
        format: a `Format` or its name.
        skip: names that stay dense, see `quantize_model`; a partial name is matched when the layer is registered.
        compute_dtype: see `QuantLinear`.
        activations: see `QuantLinear`.

    Raises:
        QuantizationError: on leaving, if nothing was quantized inside.
        ValueError: unknown format, compute dtype or `activations`.
        NotImplementedError: `activations` with a format that it does not go with.

    Example:
        >>> import torch, halfbyte
        >>> with halfbyte.init_quantized("nf4"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> type(model[0]).__name__
        'QuantLinear'
    """
    settings = InitSettings(format, skip, compute_dtype, activations)
    with entered(settings):
        yield
    if settings.built == 0:
        raise QuantizationError(
            "init_quantized: nothing was quantized: no nn.Linear was built inside the context that its rules want packed"
        )


@contextmanager
def entered(settings: InitSettings) -> Iterator[None]:
    """`init_quantized` without its check on leaving: for hosts in whose context a model may or may not be built."""
    import_bridges()
    with settings.hosts:
        stack().append(settings)
        try:
            for host in hosts:
                settings.hosts.enter_context(host(settings))
            with _patched(), Initializers(), reusing_dense_buffer():
                yield
        finally:
            stack().remove(settings)


# ---- construction and registration ----------------------------------------------------------------------------------



class _Patches:
    """Process-wide hooks, counted: they stand while any thread is in a context, and act on its own threads only."""

    lock = threading.Lock()
    depth = 0
    undo: Callable[[], None]


@contextmanager
def _patched() -> Iterator[None]:
    """Installs the process-wide hooks with the first context and removes them with the last; they act per thread."""
    with _Patches.lock:
        _Patches.depth += 1
        if _Patches.depth == 1:
            _Patches.undo = staticmethod(_install())
    try:
        yield
    finally:
        with _Patches.lock:
            _Patches.depth -= 1
            if _Patches.depth == 0:
                _Patches.undo()


def _install() -> Callable[[], None]:
    original_init = nn.Linear.__init__
    init_module: Any = nn.init
    original_fan = init_module._calculate_fan_in_and_fan_out
    original_trunc = init_module._no_grad_trunc_normal_

    def linear_init(
        self: nn.Linear, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        settings = active_settings()
        if settings is None or type(self) is not nn.Linear or (dtype or torch.get_default_dtype()) not in FLOAT_DTYPES:
            original_init(self, in_features, out_features, bias, device, dtype)
            return
        self.__class__ = QuantLinear
        QuantLinear.__init__(
            self,  # type: ignore[arg-type]
            in_features,
            out_features,
            bias,
            format=settings.format,
            compute_dtype=settings.compute_dtype,
            activations=settings.activations,
            device=device,
            dtype=dtype,
        )
        settings.born.add(self)  # type: ignore[arg-type]
        settings.built += 1

    # xavier and kaiming read the fans off the tensor, trunc_normal_ samples out of place: both need the dense shape.
    def fan(tensor: Tensor) -> tuple[int, int]:
        owner = owner_of(tensor)
        found: tuple[int, int] = original_fan(
            tensor if owner is None else torch.empty(owner.dense_shape, device="meta")
        )
        return found

    def trunc_normal(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        owner = owner_of(tensor)
        if owner is None:
            return original_trunc(tensor, *args, **kwargs)
        on_dense(owner, lambda dense: original_trunc(dense, *args, **kwargs))
        return tensor

    nn.Linear.__init__ = linear_init  # type: ignore[method-assign]
    init_module._calculate_fan_in_and_fan_out = fan
    init_module._no_grad_trunc_normal_ = trunc_normal
    handle = register_module_module_registration_hook(_on_registration)

    def undo() -> None:
        nn.Linear.__init__ = original_init  # type: ignore[method-assign]
        init_module._calculate_fan_in_and_fan_out = original_fan
        init_module._no_grad_trunc_normal_ = original_trunc
        handle.remove()

    return undo


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Called by `nn.Module.register_module` and `__setattr__` for every child, at every level of the tree."""
    settings = active_settings()
    if settings is None or child is None:
        return
    built = False
    for path, module in child.named_modules():
        partial = f"{name}.{path}" if path else name
        # Not known before they are complete: their weights were drawn, or are still to be initialized.
        late = (is_linear(module) and type(module) is not nn.Linear) or bool(expert_weights(module))
        if late and not isinstance(module, Packed) and not settings.rules.by_name(partial) and not dense_reason(module):
            convert = quantize_linear_ if is_linear(module) else quantize_experts_
            settings.born.add(convert(module, settings.format, settings.compute_dtype))
            settings.built += 1
        if not isinstance(module, Packed) or module not in settings.born:
            continue
        reason = settings.rules.by_name(partial) or settings.rules.by_owner(parent, partial)
        if not reason:
            tell_config(parent)
            built = True
        if reason:
            _make_dense(module, reason, fresh=not path)
            settings.built -= 1
    if built:  # the child is complete when it is registered
        for module in child.modules():
            adapt_attention(module)


def _make_dense(layer: Any, reason: str, fresh: bool) -> None:
    if isinstance(layer, QuantExperts):
        mark_dense(dequantize_experts_(layer, layer.dense_dtype), reason)
        return
    # Straight after construction nobody has initialized the layer yet, so it is drawn anew in full precision; a name
    # that matches further up may concern a layer its builder has filled in the meantime, so its values are kept.
    shape, device, dtype = layer.weight_shape, layer.weight.device, layer.dense_dtype
    fresh = fresh and "dense_class" not in layer.__dict__  # a Conv1D has drawn its values already
    if layer.weight.is_meta or fresh:
        values = torch.empty(shape, device=device, dtype=dtype)
    else:
        values = layer.dequantize(dtype)
    dense = dequantize_linear_(layer, nn.Parameter(values))
    if fresh and not values.is_meta:
        with paused():
            dense.reset_parameters()
    mark_dense(dense, reason)
