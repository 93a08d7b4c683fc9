"""error_feedback: what to quantize instead of a weight, so that the layer's output changes least."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte._library import overload, register_fake
from halfbyte.formats import Format
from halfbyte.ops.quantize import describe

_error_feedback = overload("error_feedback")


def error_feedback(
    weight: Tensor,
    factor: Tensor | None,
    importance: Tensor,
    candidates: Tensor,
    format: str | Format = "nf4",
    *,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rounds a weight one column after another and carries each column's error into the columns to come.

    Block by block, in the order of columns: the block's scale is the candidate multiple c of its absmax (as it is by then)
    with the least sum of importance_k * (w_k - round(w_k))^2; then for each column j of it, with U the factor and in fp32
    with one rounding per operation::

        step = (round(w_j) - w_j) / U_jj
        w_k  = fma(step, U_jk, w_k)        for all k > j

    `quantize(targets, format, scales=scales)` of the two results gives exactly the codes that were rounded to.

    Args:
        weight: shape (N, K) float32.
        factor: shape (K, K) float32; its upper triangle is the upper Cholesky factor of the inverse of the inputs' second
            moment. None: errors are not carried, only scales are searched.
        importance: shape (K,) float32, weights of the squared errors in the search, such as mean squared activations.
        candidates: shape (C,) float32, multiples of a block's absmax to try in this order; the first of equals wins.
        format: a `Format` or its name; "-dq" is rounded under the float32 scales (snap them and pass them as `scales`).
        scales: shape (N, num_blocks) float32 to use instead of searching. Where one is not positive and finite, its block
            rounds to 0.

    Returns:
        targets, shape (N, K) float32: each element as it was when it was rounded; and scales, shape (N, num_blocks) float32.

    Raises:
        TypeError: an argument is not a float32 tensor.
        ValueError: unknown format, or a tensor of another shape; no candidates and no scales.

    Note:
        The same bits on every device, instruction set and number of threads. Takes N * K^2 / 2 multiply-adds.

    Source:
        GPTQ: Frantar et al. 2022, arXiv:2210.17323.
    """
    fmt = Format.parse(format)
    given = {"weight": weight, "factor": factor, "importance": importance, "candidates": candidates, "scales": scales}
    for name, value in given.items():
        if value is None and name in ("factor", "scales"):
            continue
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            raise TypeError(f"halfbyte.error_feedback: {name} must be a float32 tensor, got {describe(value)}")
    targets, chosen = _error_feedback(weight, factor, importance, scales, candidates, fmt.id, fmt.block_size)
    return targets, chosen


@register_fake("error_feedback")
def _(
    weight: Tensor,
    factor: Tensor | None,
    importance: Tensor,
    scales: Tensor | None,
    candidates: Tensor,
    format: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    blocks = Format.from_id(format, block_size).num_blocks(columns)
    return weight.new_empty((rows, columns)), weight.new_empty((rows, blocks))
