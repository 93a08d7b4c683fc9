"""Slow, obvious oracles of the products that are more than one matrix product: `lora_linear`, `int8_linear`, `fp8_linear`.

Written from the formats' text and the ops' definitions, never from a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import Format
from halfbyte.reference_optimizer import random_bits

__all__ = ["dropout_kept", "fp8_linear", "int8_linear", "lora_linear"]


def lora_linear(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    format: Format | str,
    in_features: int,
    *,
    splits: Sequence[int] = (),
    kept: Tensor | None = None,
) -> Tensor:
    """``input @ W.T + bias + scaling * (input @ A.T) @ B.T`` in fp64, W dequantized to fp32; differentiable.

    Args:
        input: ``(..., K)`` fp32, bf16, fp16 or fp64.
        packed: ``(N, row_bytes)`` uint8.
        bias: ``(N,)`` or None.
        lora_A: ``(groups * rank, K)``.
        lora_B: ``(N, rank)``.
        scaling: the branch's factor.
        format: what the rows are packed in.
        in_features: K.
        splits: rows of each group; empty for one group. Rows of group g use block g of A.
        kept: ``(..., K)`` bool: where it is False the branch sees 0 in place of ``input``.

    Returns:
        ``(..., N)`` fp64, nothing rounded in between.
    """
    weight = reference.dequantize(packed, format, in_features, torch.float32).double()
    x, rank = input.double(), lora_B.shape[1]
    output = x @ weight.T
    if kept is not None:
        x = torch.where(kept, x, 0.0)
    branches, first = [], 0
    for g, rows in enumerate(splits or (packed.shape[0],)):
        a, b = lora_A[g * rank : (g + 1) * rank].double(), lora_B[first : first + rows].double()
        branches.append((x @ a.T) @ b.T)
        first += rows
    output = output + scaling * torch.cat(branches, dim=-1)
    return output if bias is None else output + bias.double()


def dropout_kept(rows: int, columns: int, seed: int, p: float) -> Tensor:
    """Which elements of a ``(rows, columns)`` matrix ``halfbyte::dropout_mask`` keeps.

    A row takes a multiple of 8 of the 16-bit numbers that Philox gives for step 0, row after row; an element is kept where
    its number is at least ``p * 65536``, rounded.

    Args:
        rows: M.
        columns: K.
        seed: from 0 to 2**64 - 1.
        p: from 0 to 1.

    Returns:
        ``(rows, columns)`` bool.
    """
    stride, dropped = (columns + 7) // 8 * 8, int(p * 65536 + 0.5)
    numbers = [[random_bits(row * stride + column, 0, seed) for column in range(columns)] for row in range(rows)]
    return torch.tensor(numbers, dtype=torch.int64).reshape(rows, columns) >= dropped


def int8_linear(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    """Every bit of ``halfbyte::int8_linear``: integer sums, then a fixed sequence of fp32 roundings.

    Each row of ``input`` is quantized by the int8 rule (absmax a, codes q); W's rows are int8 (absmax b, codes c).
    ``y = round(float(sum q * c) * ((a / 127) * (b / 127)) + bias)``, each operation of it rounded to fp32, the last one to
    the input's dtype.

    Args:
        input: ``(..., K)`` fp32, bf16 or fp16.
        packed: ``(N, row_bytes)`` uint8, format int8.
        bias: ``(N,)`` of input's dtype, or None.
        in_features: K.

    Returns:
        ``(..., N)`` of input's dtype.
    """
    begin = Format.parse("int8").scales_offset(in_features)

    def codes_and_scales(rows: Tensor) -> tuple[Tensor, Tensor]:
        absmax = rows[:, begin : begin + 4].contiguous().view(torch.float32)
        return rows[:, :in_features].view(torch.int8).long(), absmax / 127

    q, token_scales = codes_and_scales(reference.quantize(input.reshape(-1, in_features), "int8"))
    c, row_scales = codes_and_scales(packed)
    sums = (q[:, None, :] * c[None, :, :]).sum(-1).to(torch.int32)
    output = sums.float() * (token_scales * row_scales.T)
    if bias is not None:
        output = output + bias.float()
    return output.to(input.dtype).reshape(*input.shape[:-1], packed.shape[0])


def fp8_linear(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    """``rounded @ W.T + bias`` in fp64: ``rounded`` is input quantized by the fp8 rule and dequantized, W the packed rows.

    Both sides' values are ``code * (absmax / 448)`` with the quotient in fp32, nothing else is rounded.

    Args:
        input: ``(..., K)`` fp32, bf16 or fp16.
        packed: ``(N, row_bytes)`` uint8, format fp8.
        bias: ``(N,)`` of input's dtype, or None.
        in_features: K.

    Returns:
        ``(..., N)`` fp64.
    """
    tokens = reference.quantize(input.reshape(-1, in_features), "fp8")
    rounded, weight = (reference.dequantize(rows, "fp8", in_features, torch.float32).double() for rows in (tokens, packed))
    output = rounded @ weight.T
    if bias is not None:
        output = output + bias.double()
    return output.reshape(*input.shape[:-1], packed.shape[0])
