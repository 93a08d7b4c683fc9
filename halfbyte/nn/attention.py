"""Attention modules of transformers around packed projections: queries, keys and values arrive in one dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nn.linear import QuantLinear
from halfbyte.nn.linear_classes import linear_shape

__all__ = ["adapt_attention"]

_STREAMS = ("hidden_states", "position_embeddings", "key_value_states", "encoder_hidden_states")


def adapt_attention(module: nn.Module) -> None:
    """Makes an attention module compute in the compute dtype of its packed projections; any other module is left alone.

    Rotary tables and q/k norms in float32 would otherwise promote queries and keys, but not values: flash attention refuses
    that, and so does `scaled_dot_product_attention`. Inside the module everything is the autocast dtype where autocast is
    active, else the projections' `compute_dtype`, else the dtype of the hidden states; what it returns has the dtype of the
    hidden states again. Hooks do it, so every attention implementation is served; calling this twice changes nothing.
    """
    if "Attention" not in type(module).__name__ or "_halfbyte_compute" in module.__dict__ or not hasattr(module, "config"):
        return
    children = list(module.children())
    layers = [getattr(child, "base_layer", child) for child in children]
    packed = [layer for layer in layers if isinstance(layer, QuantLinear)]
    if not packed:
        return
    module.__dict__["_halfbyte_compute"] = packed[0].compute_dtype
    module.register_forward_pre_hook(_enter, with_kwargs=True)
    module.register_forward_hook(_leave)
    for child, layer in zip(children, layers, strict=True):
        if linear_shape(layer) is None and child._parameters and not child._modules:  # q_norm, k_norm
            child.register_forward_hook(_as_input)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    module.__dict__["_halfbyte_stream"] = None
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        return None
    kind = hidden.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    dtype = autocast or module.__dict__["_halfbyte_compute"] or hidden.dtype
    module.__dict__["_halfbyte_stream"] = None if autocast else hidden.dtype
    named = {name: _cast(value, dtype) if name in _STREAMS else value for name, value in kwargs.items()}
    return (_cast(args[0], dtype), *args[1:]) if args else args, named


def _leave(module: nn.Module, args: Any, output: Any) -> Any:
    dtype = module.__dict__.pop("_halfbyte_stream", None)
    if dtype is None:  # autocast casts at every layer
        return output
    if isinstance(output, tuple):
        return (_cast(output[0], dtype), *output[1:])
    return _cast(output, dtype)


def _as_input(module: nn.Module, args: Any, output: Any) -> Any:
    floating = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()  # a table of biases takes indices
    return _cast(output, args[0].dtype) if floating else output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
