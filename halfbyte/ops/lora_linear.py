"""lora_linear: a product with packed rows and a low-rank branch beside it, as one autograd node."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte._library import differentiable, eager, overload, register_autocast, register_fake
from halfbyte.formats import Format
from halfbyte.ops.linear import autocast_linear, linear_by_id
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe, with_columns

_lora_linear = overload("lora_linear")
_backward_input, _backward_adapter = overload("lora_linear_backward_input"), overload("lora_linear_backward_adapter")
_eager_lora_linear, _eager_backward_input = eager("lora_linear"), eager("lora_linear_backward_input")
_eager_backward_adapter = eager("lora_linear_backward_adapter")
_dropout_mask, _eager_dropout_mask = overload("dropout_mask"), eager("dropout_mask")


def lora_linear(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    format: str | Format,
    in_features: int,
    *,
    splits: Sequence[int] = (),
    dropout: float = 0.0,
) -> Tensor:
    r"""Computes :math:`y = x W^T + b + s\,(d(x) A^T) B^T` with the rows of W packed; differentiable in x, b, A and B.

    One node of the autograd graph. It keeps `input`, :math:`d(x) A^T`, `packed`, A and B for the backward pass, and with
    dropout a bit for each element of x: neither a dense weight nor the base product, nor d(x). The branch is `rank` more
    terms of every sum of the base product: it makes no pass over the output of its own, and y is rounded once.

    Several linears that share an input can be one call: their packed rows concatenated (rows are self-contained), their A
    stacked, their B concatenated like the rows, and `splits` saying how many rows each has.

    Args:
        input: x, shape (..., K), float32, bfloat16 or float16.
        packed: shape (N, row_bytes) uint8, frozen.
        bias: b, shape (N,), input's dtype, or None.
        lora_A: A, shape (rank, K), or (len(splits) * rank, K).
        lora_B: B, shape (N, rank), A's dtype.
        scaling: s.
        format: the format of `packed`.
        in_features: K.
        splits: rows of `packed` that belong to each block of A, adding up to N; empty: all to one.
        dropout: probability p, in steps of 1/65536, with which an element of the branch's input d(x) is 0; the others are
            divided by 1 - p. Drawn anew by each call, from the default generator of x's device. All blocks of A see the same
            d(x).

    Returns:
        Shape (..., N), input's dtype; accumulated in float32.

    Raises:
        TypeError: `input` or `lora_A` is not a float tensor of the three dtypes.
        ValueError: sizes, dtypes or devices do not fit together, or `dropout` is not from 0 to 1; the text names the
            argument, the rule and the value.

    Note:
        :math:`x A^T` and the gradients of A and B are computed in the adapter's dtype or the input's, whichever holds the
        other (float32 adapters keep float32 gradients under bfloat16 activations). In y and in the gradient of x the branch
        is multiplied as the base is: on CPUs with bfloat16 units, bfloat16 activations round A, B and :math:`x A^T` to it.
        With dropout its part of the gradient of x is a float32 sum, added to the base's part as that was rounded.
        Which elements are dropped follows from one number of the generator by Philox: the same on CPUs and GPUs, but not
        what `torch.nn.functional.dropout` drops after the same `manual_seed`. Under autocast every argument but `packed` is
        cast to the autocast dtype, as for `torch.nn.functional.linear`.

    Source:
        LoRA, Hu et al. 2021, arXiv:2106.09685; on packed rows: QLoRA, Dettmers et al. 2023, arXiv:2305.14314.
    """
    fmt = Format.parse(format)
    for name, value in (("input", input), ("lora_A", lora_A)):
        if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES:
            raise TypeError(f"halfbyte.lora_linear: {name} must be a {FLOAT_NAMES} tensor, got {describe(value)}")
    sizes = (fmt.id, fmt.block_size, in_features)
    return lora_linear_by_id(input, packed, bias, lora_A, lora_B, scaling, dropout, list(splits), *sizes)


def lora_linear_by_id(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    dropout: float,
    *rest: Any,
) -> Tensor:
    """`lora_linear` on dispatcher ids, without the checks of the public wrapper; see `linear_by_id`.

    `rest`: splits, format, block_size, in_features.
    """
    mask = None
    if dropout != 0.0:
        mask = draw_mask(input, dropout)
        scaling = scaling / (1.0 - dropout) if dropout < 1.0 else 0.0
    arguments: tuple[Any, ...] = (input, packed, bias, lora_A, lora_B, scaling, *rest, mask)
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):  # before the node, so that it keeps and multiplies what was cast
        arguments = _cast(torch.get_autocast_dtype(device_type), *arguments)
    if torch.compiler.is_compiling():
        return _lora_linear(*arguments)[0]
    differentiable = (input, bias, lora_A, lora_B)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        return _lora_linear_node(*arguments)[0]
    return _eager_lora_linear(*arguments)[0]


class _LoraLinear:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        input, packed, bias, lora_A, lora_B, ctx.scaling, ctx.splits, *ctx.sizes, mask = inputs
        ctx.save_for_backward(input, packed, lora_A, lora_B, output[1], mask)
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_projected: Tensor | None) -> tuple[Tensor | None, ...]:
        input, packed, lora_A, lora_B, projected, mask = ctx.saved_tensors
        if grad is None:
            grad = input.new_zeros((*input.shape[:-1], packed.shape[0]))
        needs_input, _, needs_bias, needs_A, needs_B, *_ = ctx.needs_input_grad
        grad_input = grad_A = grad_B = grad_bias = None
        if needs_input or needs_A or needs_B:
            arguments = (grad, input, projected, lora_B, grad_projected, ctx.scaling, ctx.splits, needs_A, needs_B, mask)
            low, grad_A, grad_B = _adapter_gradients()(*arguments)
            if needs_input:
                grad_input = _backward_input_by_id(grad, packed, low, lora_A, *ctx.sizes, mask)
        if ctx.has_bias and needs_bias:
            grad_bias = _matrix(grad).sum(0)
        grad_A, grad_B = (g if needed else None for g, needed in ((grad_A, needs_A), (grad_B, needs_B)))
        return grad_input, None, grad_bias, grad_A, grad_B, None, None, None, None, None, None


def draw_mask(input: Tensor, p: float) -> Tensor:
    """What dropout keeps of `input` (..., K), by its device's default generator: uint8 (..., ceil(K / 8)), a bit each."""
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=input.device)
    return (_dropout_mask if torch.compiler.is_compiling() else _eager_dropout_mask)(input, seed, p)


def _kept(t: Tensor, mask: Tensor | None) -> Tensor:
    """`t` (..., K) with zeros where `mask` drops it."""
    if mask is None:
        return t
    bits = torch.arange(8, dtype=torch.uint8, device=mask.device)
    kept = (mask.unsqueeze(-1) >> bits & 1).flatten(-2)[..., : t.shape[-1]]
    return torch.where(kept.bool(), t, 0.0)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t.to(dtype)`, which takes 1 us to find that there is nothing to do."""
    return t if t.dtype == dtype else t.to(dtype)


def _matrix(t: Tensor) -> Tensor:
    """Leading dimensions as one."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _adapter_gradients() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The op, or what can be differentiated again."""
    if torch.is_grad_enabled():
        return _differentiable_gradients
    return _backward_adapter if torch.compiler.is_compiling() else _eager_backward_adapter


def _differentiable_gradients(
    grad_output: Tensor,
    input: Tensor,
    projected: Tensor,
    lora_B: Tensor,
    grad_projected: Tensor | None,
    scaling: float,
    splits: Sequence[int],
    needs_A: bool,
    needs_B: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lora_linear_backward_adapter` in products of aten."""
    dtype, rank = projected.dtype, lora_B.shape[1]
    input = _kept(input, mask)
    rows, x, t = _as(_matrix(grad_output), dtype), _matrix(input), _matrix(projected)
    groups, first = [], 0  # (grad, x A^T, B) of each group of rows
    for i, size in enumerate(splits):
        of = slice(first, first + size)
        groups.append((rows[:, of], t[:, i * rank : (i + 1) * rank], lora_B[of]))
        first += size
    groups = groups or [(rows, t, lora_B)]
    grad_A = grad_B = lora_B.new_empty(0)
    if needs_B:
        grad_B = _as(_joined([g.t().mm(low) for g, low, _ in groups], 0).mul_(scaling), lora_B.dtype)
    low = _joined([g.mm(_as(b, dtype)) for g, _, b in groups], 1).mul_(scaling)
    if grad_projected is not None:
        low = low + _matrix(grad_projected)
    if needs_A:
        grad_A = _as(low.t().mm(_as(x, dtype)), lora_B.dtype)
    return low.reshape(projected.shape), grad_A, grad_B


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _backward_input_by_id(
    grad_output: Tensor,
    packed: Tensor,
    grad_projected: Tensor,
    lora_A: Tensor,
    *rest: Any,
) -> Tensor:
    """`rest`: format, block_size, in_features, mask."""
    arguments = (grad_output, packed, grad_projected, lora_A, *rest)
    if torch.compiler.is_compiling():
        return _backward_input(*arguments)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (grad_output, grad_projected, lora_A)):
        return _backward_input_node(*arguments)
    return _eager_backward_input(*arguments)


class _BackwardInput:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, packed, grad_projected, lora_A, *ctx.sizes, mask = inputs
        ctx.save_for_backward(packed, grad_projected, lora_A, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, grad_projected, lora_A, mask = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, grad_projected.dtype)
        rows, low = _as(_matrix(_kept(grad, mask)), wide), _matrix(grad_projected)
        grad_low = (rows @ lora_A.to(wide).t()).to(low.dtype).reshape(grad_projected.shape)
        grad_A = (low.to(wide).t() @ rows).to(lora_A.dtype)
        return linear_by_id(grad, packed, None, *ctx.sizes), None, grad_low, grad_A, None, None, None, None


_lora_linear_node = differentiable("lora_linear", _LoraLinear)
_backward_input_node = differentiable("lora_linear_backward_input", _BackwardInput)


@register_fake("lora_linear")
def _(input: Tensor, packed: Tensor, bias: Tensor | None, lora_A: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    in_features = rest[5]
    torch._check(
        input.shape[-1] == in_features,
        lambda: f"halfbyte::lora_linear: input's last dimension must be in_features={in_features}, got {input.shape}",
    )
    dtype = input.dtype if input.dtype == lora_A.dtype else torch.float32
    return with_columns(input, packed.shape[0]), with_columns(input, lora_A.shape[0], dtype)


@register_fake("lora_linear_backward_input")
def _(grad_output: Tensor, *rest: Any) -> Tensor:
    return with_columns(grad_output, rest[5])


@register_fake("lora_linear_backward_adapter")
def _(grad_output: Tensor, input: Tensor, projected: Tensor, lora_B: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs_A, needs_B = rest[3:5]
    grad_A = (projected.shape[-1], input.shape[-1]) if needs_A else (0,)
    return torch.empty_like(projected), lora_B.new_empty(grad_A), lora_B.new_empty(lora_B.shape if needs_B else (0,))


@register_fake("dropout_mask")
def _(input: Tensor, seed: Tensor, p: float) -> Tensor:
    return with_columns(input, (input.shape[-1] + 7) // 8, torch.uint8)


def _cast(
    dtype: torch.dtype,
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    *rest: Any,
) -> tuple[Any, ...]:
    return *autocast_linear(dtype, input, packed, bias), lora_A.to(dtype), lora_B.to(dtype), *rest


register_autocast("lora_linear", _cast)
