"""int8_linear: int8 rows times activations quantized to int8, in integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte._library import differentiable, eager, overload, register_autocast, register_fake
from halfbyte.formats import Format
from halfbyte.ops.linear import _backward_by_id
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe

_int8_linear = overload("int8_linear")
_eager_int8_linear = eager("int8_linear")
_INT8 = Format.parse("int8")


def int8_linear(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    r"""Computes :math:`y_{mn} = \frac{a_m}{127}\frac{b_n}{127}\sum_k q_{mk} c_{nk} + \beta_n`, the sum exact in int32.

    Each row of `input` is quantized by the int8 rule of the formats, q = rint(x (127 / a)) with a its largest magnitude;
    c and b are the codes and scales of the packed int8 rows. The result is the same bits on every device and instruction
    set: float(sum) * ((a / 127) * (b / 127)) + bias in float32, rounded once to the input's dtype.

    Differentiable in `input` and `bias`: the quantization of the input counts as the identity ("straight through"), so the
    gradient is that of `linear` on the dequantized rows.

    Args:
        input: shape (..., K), float32, bfloat16 or float16.
        packed: int8 rows, shape (N, row_bytes) uint8, frozen.
        bias: shape (N,), input's dtype, or None.
        in_features: K, at most 2^17.

    Returns:
        Shape (..., N), input's dtype. A row of `input` that holds a NaN or Inf gives NaN.

    Raises:
        TypeError: `input` is not a float tensor of the three dtypes.
        ValueError: sizes, dtypes or devices do not fit together; the text names the argument, the rule and the value.

    Note:
        Against `linear` on the same rows, each activation is off by at most a / 254. Under autocast the input and the bias
        are cast to the autocast dtype.

    Source:
        Vector-wise quantization: Dettmers et al. 2022, arXiv:2208.07339.
    """
    if not isinstance(input, Tensor) or input.dtype not in FLOAT_DTYPES:
        raise TypeError(f"halfbyte.int8_linear: input must be a {FLOAT_NAMES} tensor, got {describe(input)}")
    return int8_linear_by_id(input, packed, bias, in_features)


def int8_linear_by_id(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    """`int8_linear` without the checks of the public wrapper; see `linear_by_id`."""
    if torch.compiler.is_compiling():
        return _int8_linear(input, packed, bias, in_features)
    if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
        return _int8_linear_node(input, packed, bias, in_features)
    return _eager_int8_linear(input, packed, bias, in_features)


class _Int8Linear:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, packed, bias, ctx.in_features = inputs
        ctx.save_for_backward(packed)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        sizes = (_INT8.id, _INT8.block_size, ctx.in_features)
        grad_input = _backward_by_id(grad, packed, *sizes) if ctx.needs_input_grad[0] else None
        grad_bias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_input, None, grad_bias, None


_int8_linear_node = differentiable("int8_linear", _Int8Linear)


@register_fake("int8_linear")
def _(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    torch._check(
        input.shape[-1] == in_features,
        lambda: f"halfbyte::int8_linear: input's last dimension must be in_features={in_features}, got {input.shape}",
    )
    return input.new_empty((*input.shape[:-1], packed.shape[0]))


def _autocast_int8_linear(device_type: str) -> Callable[..., Tensor]:
    def kernel(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        return _int8_linear(input.to(dtype), packed, None if bias is None else bias.to(dtype), in_features)

    return kernel


register_autocast("int8_linear", _autocast_int8_linear)
