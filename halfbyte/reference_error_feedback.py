"""The slow oracle of ``error_feedback``, written from its rule: numpy fp32, one rounding per written operation.

Rounding an element is the oracle's ``quantize_with_scales`` and ``dequantize``, so codes are ordinary codes by definition.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import Format
from halfbyte.reference_optimizer import Array, ieee_fma

__all__ = ["error_feedback"]


def error_feedback(
    weight: Tensor,
    factor: Tensor | None,
    importance: Tensor,
    candidates: Tensor,
    format: Format | str,
    *,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``halfbyte.ops.error_feedback``: the same arguments (shapes, fp32) and the same two results, bit for bit."""
    format = Format.parse(format)
    plain = Format(format.codebook, format.block_size)  # -dq rounds under the fp32 scales
    w: Array = weight.numpy().copy()
    rows, K = w.shape
    block_size = format.block_size or K
    chosen = np.empty((rows, format.num_blocks(K)), np.float32)
    with np.errstate(all="ignore"):
        for b, begin in enumerate(range(0, K, block_size)):
            end = min(begin + block_size, K)
            if scales is None:
                chosen[:, b] = _search(w[:, begin:end], importance.numpy()[begin:end], candidates.numpy(), plain)
            else:
                chosen[:, b] = scales.numpy()[:, b]
            if factor is None:
                continue
            U = factor.numpy()
            for j in range(begin, end):
                step = (_rounded(w[:, j : j + 1], chosen[:, b], plain)[:, 0] - w[:, j]) / U[j, j]
                w[:, j + 1 :] = ieee_fma(step[:, None], U[j, j + 1 :], w[:, j + 1 :])
    return torch.from_numpy(w), torch.from_numpy(chosen)


def _rounded(x: Array, scale: Array, format: Format) -> Array:
    """What the elements (N, n <= block_size) of one block decode to under the scales (N,); 0 where a scale is not valid."""
    packed = reference.quantize_with_scales(torch.from_numpy(x.copy()), torch.from_numpy(scale.copy())[:, None], format)
    values = reference.dequantize(packed, format, x.shape[1], torch.float32).numpy()
    return np.where(((scale > 0) & np.isfinite(scale))[:, None], values, np.float32(0))


def _search(x: Array, importance: Array, candidates: Array, format: Format) -> Array:
    absmax = np.abs(x).max(1)
    best, least = absmax.copy(), np.full(len(x), np.inf, np.float32)
    for candidate in candidates:
        scale = absmax * candidate
        off = x - _rounded(x, scale, format)
        error = np.zeros(len(x), np.float32)
        for k in range(x.shape[1]):
            error = ieee_fma(off[:, k] * off[:, k], importance[k], error)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best
