"""What the products with packed rows take on CPUs, as the library plans them itself: threads' scratch, and temporaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import Format

__all__ = ["cpu_memory"]

_LINEAR_TOKENS = 512  # kLinearTokens of csrc/cpu: fp8_linear rounds so many tokens at a time


def cpu_memory(name: str, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Bytes of a call of op `name` on the CPU beside its operands and results; None if it is no product with packed rows.

    Returns:
        What one thread keeps of scratch, at most, and temporaries. Those of a low-rank part, little beside the activations,
        are left out.
    """
    plan = _PLANS.get(name)
    return None if plan is None else plan(args)


def _forward(input: Tensor, packed: Tensor, *sizes: int) -> tuple[int, int]:
    kept, temporary = torch.ops.halfbyte.linear_memory(_tokens(input), packed.shape[0], *sizes, input.dtype)
    return kept, temporary


def _backward(grad: Tensor, packed: Tensor, rank: int, *sizes: int) -> tuple[int, int]:
    kept, temporary = torch.ops.halfbyte.linear_backward_memory(_tokens(grad), packed.shape[0], rank, *sizes, grad.dtype)
    return kept, temporary


def _lora_backward(args: tuple[Any, ...]) -> tuple[int, int]:
    grad, packed, _, lora_A, *sizes = args[:7]
    masked = len(args) > 7 and args[7] is not None  # the branch is added afterwards then
    return _backward(grad, packed, 0 if masked else lora_A.shape[0], *sizes)


def _int8(args: tuple[Any, ...]) -> tuple[int, int]:
    input, packed, _, in_features = args
    kept, temporary = torch.ops.halfbyte.int8_linear_memory(_tokens(input), packed.shape[0], in_features)
    return kept, temporary


def _fp8(args: tuple[Any, ...]) -> tuple[int, int]:
    """Block by block, tokens as fp8 rows, and what those stand for in float32, which is multiplied as float32."""
    input, packed, _, in_features = args
    format, tokens = Format.parse("fp8"), _tokens(input)
    blocks = {min(tokens, _LINEAR_TOKENS), tokens % _LINEAR_TOKENS}  # the last one may take another way
    sizes = packed.shape[0], format.id, format.block_size, in_features
    products = [torch.ops.halfbyte.linear_memory(block, *sizes, torch.float32) for block in blocks]
    kept, temporary = (max(each) for each in zip(*products, strict=True))
    return kept, temporary + max(blocks) * (format.row_bytes(in_features) + 4 * in_features)


def _tokens(matrix: Tensor) -> int:
    return matrix.numel() // max(matrix.shape[-1], 1)


_PLANS: dict[str, Callable[[tuple[Any, ...]], tuple[int, int]]] = {
    "halfbyte.linear.default": lambda args: _forward(*args[:2], *args[3:6]),
    "halfbyte.lora_linear.default": lambda args: _forward(*args[:2], *args[7:10]),
    "halfbyte.linear_backward_input.default": lambda args: _backward(*args[:2], 0, *args[2:5]),
    "halfbyte.lora_linear_backward_input.default": _lora_backward,
    "halfbyte.int8_linear.default": _int8,
    "halfbyte.fp8_linear.default": _fp8,
}
