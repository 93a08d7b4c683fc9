"""linear: a dense input times packed rows, and the gradient of its input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfbyte._library import differentiable, eager, overload, register_autocast, register_fake
from halfbyte.formats import Format
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe, with_columns

_linear = overload("linear")
_linear_backward_input = overload("linear_backward_input")
_eager_linear, _eager_backward_input = eager("linear"), eager("linear_backward_input")
_clear_workspace = overload("clear_workspace")


def linear(input: Tensor, packed: Tensor, bias: Tensor | None, format: str | Format, in_features: int) -> Tensor:
    r"""Computes :math:`y = x W^T + b` with the rows of W packed; differentiable in `input` and `bias`.

    Only `packed` is saved for backward, and no dense weight outlives the call.

    Args:
        input: shape (..., K), float32, bfloat16 or float16.
        packed: shape (N, row_bytes) uint8, frozen.
        bias: shape (N,), input's dtype, or None.
        format: the format of `packed`.
        in_features: K.

    Returns:
        Shape (..., N), input's dtype; accumulated in float32.

    Raises:
        TypeError: `input` is not a float tensor of the three dtypes.
        ValueError: sizes, dtypes or devices do not fit together; the text names the argument, the rule and the value.

    Note:
        Under autocast the input and the bias are cast to the autocast dtype, as for `torch.nn.functional.linear`.
    """
    fmt = Format.parse(format)
    if not isinstance(input, Tensor) or input.dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.linear: input must be a {FLOAT_NAMES} tensor, got {describe(input)}")
    return linear_by_id(input, packed, bias, fmt.id, fmt.block_size, in_features)


def clear_workspace() -> None:
    """Releases the scratch memory that the CPU kernels keep between calls (at most 4 MiB per thread)."""
    _clear_workspace()


def linear_by_id(
    input: Tensor, packed: Tensor, bias: Tensor | None, format: int, block_size: int, in_features: int
) -> Tensor:
    """`linear` on dispatcher ids, without the checks of the public wrapper: what `QuantLinear.forward` calls.

    Eager calls bypass the registered autograd formula: `Function.apply` costs a third of it per call, and nothing at all
    when no gradient is needed. Compiled graphs trace the registered formula.
    """
    if torch.compiler.is_compiling():
        return _linear(input, packed, bias, format, block_size, in_features)
    if (input.requires_grad or (bias is not None and bias.requires_grad)) and torch.is_grad_enabled():
        return _linear_node(input, packed, bias, format, block_size, in_features)
    return _eager_linear(input, packed, bias, format, block_size, in_features)


def linear_backward_input(grad_output: Tensor, packed: Tensor, format: str | Format, in_features: int) -> Tensor:
    r"""Computes :math:`\partial L / \partial x = g W` with the rows of W packed; differentiable in `grad_output`.

    Args:
        grad_output: shape (..., N), float32, bfloat16 or float16.
        packed: shape (N, row_bytes) uint8.
        format: the format of `packed`.
        in_features: K.

    Returns:
        Shape (..., K), grad_output's dtype; accumulated in float32.

    Raises:
        TypeError: `grad_output` is not a float tensor of the three dtypes.
        ValueError: sizes, dtypes or devices do not fit together.
    """
    fmt = Format.parse(format)
    if not isinstance(grad_output, Tensor) or grad_output.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"halfbyte.linear_backward_input: grad_output must be a {FLOAT_NAMES} tensor, got {describe(grad_output)}"
        )
    return _backward_by_id(grad_output, packed, fmt.id, fmt.block_size, in_features)


def _backward_by_id(grad_output: Tensor, packed: Tensor, format: int, block_size: int, in_features: int) -> Tensor:
    if torch.compiler.is_compiling():
        return _linear_backward_input(grad_output, packed, format, block_size, in_features)
    if torch.is_grad_enabled() and grad_output.requires_grad:
        return _backward_node(grad_output, packed, format, block_size, in_features)
    return _eager_backward_input(grad_output, packed, format, block_size, in_features)


class _Linear:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, packed, bias, *ctx.sizes = inputs
        ctx.save_for_backward(packed)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        if not ctx.has_bias:  # then there is a node only because the input requires grad
            return _backward_by_id(grad, packed, *ctx.sizes), None, None, None, None, None
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        grad_input = _backward_by_id(grad, packed, *ctx.sizes) if needs_input else None
        # -1 would be ambiguous for no row
        grad_bias = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1]).sum(0) if needs_bias else None
        return grad_input, None, grad_bias, None, None, None


class _LinearBackwardInput:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, packed, *ctx.sizes = inputs
        ctx.save_for_backward(packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return linear_by_id(grad, packed, None, *ctx.sizes), None, None, None, None


_linear_node = differentiable("linear", _Linear)
_backward_node = differentiable("linear_backward_input", _LinearBackwardInput)


@register_fake("linear")
def _(input: Tensor, packed: Tensor, bias: Tensor | None, format: int, block_size: int, in_features: int) -> Tensor:
    torch._check(
        input.shape[-1] == in_features,
        lambda: f"halfbyte::linear: input's last dimension must be in_features={in_features}, got {input.shape}",
    )
    return with_columns(input, packed.shape[0])


@register_fake("linear_backward_input")
def _(grad_output: Tensor, packed: Tensor, format: int, block_size: int, in_features: int) -> Tensor:
    return with_columns(grad_output, in_features)


def autocast_linear(
    dtype: torch.dtype, input: Tensor, packed: Tensor, bias: Tensor | None, *sizes: int
) -> tuple[Any, ...]:
    """The arguments of `linear`, or of an op with another product, in the autocast dtype; see `register_autocast`."""
    return input.to(dtype), packed, None if bias is None else bias.to(dtype), *sizes


register_autocast("linear", autocast_linear)
