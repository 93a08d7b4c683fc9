"""What `int8_linear` and `fp8_linear` share: gradient, fake and autocast of a linear that quantizes its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte._library import differentiable, eager, overload, register_autocast, register_fake
from halfbyte.formats import Format
from halfbyte.ops.linear import _backward_by_id, autocast_linear
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe, with_columns


def register_linear(name: str, format: str) -> Callable[[Tensor, Tensor, Tensor | None, int], Tensor]:
    """Registers all but the kernels of `halfbyte::<name>`: linear on rows of `format`, its input quantized likewise.

    The quantization of the input counts as the identity in backward ("straight through").

    Args:
        name: the op, schema (input, packed, bias, in_features).
        format: name of the rows' format, one scale per row.

    Returns:
        The op without the checks of its public wrapper; see `linear_by_id`.
    """
    op, call = overload(name), eager(name)
    sizes = Format.parse(format).id, 0

    class Linear:
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, packed, bias, ctx.in_features = inputs
            ctx.save_for_backward(packed)
            ctx.has_bias = bias is not None

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            (packed,) = ctx.saved_tensors
            grad_input = _backward_by_id(grad, packed, *sizes, ctx.in_features) if ctx.needs_input_grad[0] else None
            grad_bias = None
            if ctx.has_bias and ctx.needs_input_grad[2]:
                grad_bias = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1]).sum(0)
            return grad_input, None, grad_bias, None

    node = differentiable(name, Linear)

    def fake(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
        torch._check(
            input.shape[-1] == in_features,
            lambda: f"halfbyte::{name}: input's last dimension must be in_features={in_features}, got {input.shape}",
        )
        return with_columns(input, packed.shape[0])

    register_fake(name)(fake)
    register_autocast(name, autocast_linear)

    def by_id(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
        if torch.compiler.is_compiling():
            compiled: Tensor = op(input, packed, bias, in_features)
            return compiled
        if (input.requires_grad or (bias is not None and bias.requires_grad)) and torch.is_grad_enabled():
            recorded: Tensor = node(input, packed, bias, in_features)
            return recorded
        output: Tensor = call(input, packed, bias, in_features)
        return output

    return by_id


def check_input(name: str, input: Tensor) -> None:
    """Raises TypeError unless `input` is a tensor of one of the three float dtypes."""
    if not isinstance(input, Tensor) or input.dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.{name}: input must be a {FLOAT_NAMES} tensor, got {describe(input)}")
