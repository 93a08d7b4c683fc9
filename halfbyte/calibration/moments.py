"""Second moments of layer inputs, and the factor that error feedback needs of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DAMPING = 0.01
"""What is added to the diagonal, in multiples of its mean (GPTQ, arXiv:2210.17323)."""


class Moment:
    """Sum of x x^T over the tokens that reached a layer; layers that share their input share it.

    Args:
        in_features: K.
        device: where to sum.
    """

    def __init__(self, in_features: int, device: torch.device) -> None:
        self.sum = torch.zeros(in_features, in_features, device=device)
        self.tokens = 0
        self.dropped = 0

    def add(self, input: Tensor) -> None:
        """Adds the rows of `input` (..., K); a row that holds a NaN or an infinity is counted instead."""
        x = input.detach().reshape(-1, input.shape[-1]).float()
        finite = torch.isfinite(x).all(1)
        if not bool(finite.all()):
            self.dropped += int((~finite).sum())
            x = x[finite]
        self.tokens += len(x)
        self.sum.addmm_(x.T, x)

    def solve(self, block_size: int) -> Solved | None:
        """What rounding in blocks of `block_size` columns needs; None if every input was 0 or overflowed.

        The sum is given up.
        """
        mean = self.sum.div_(max(1, self.tokens))
        diagonal = mean.diagonal()
        average = float(diagonal.mean())
        if not (0.0 < average < float("inf")) or not bool(torch.isfinite(mean).all()):
            return None
        dead = int((diagonal == 0).sum())
        order = column_order(diagonal, block_size)
        importance = diagonal[order]
        damping = DAMPING
        while True:
            factor = _factor(mean, order, damping * average)
            if factor is not None:
                return Solved(mean, order, factor, importance + damping * average, dead, damping)
            damping *= 10.0  # singular to working precision


def _factor(mean: Tensor, order: Tensor, added: float) -> Tensor | None:
    """Upper Cholesky factor of the inverse of the damped moment in an order; None if that fails.

    In float64, of which no more than two K x K matrices exist at a time (K = 14336: 1.6 GB each).
    """
    matrix = mean[order][:, order].double()
    matrix.diagonal().add_(added)
    for step in (torch.linalg.cholesky_ex, torch.cholesky_inverse, lambda m: torch.linalg.cholesky_ex(m, upper=True)):
        result: Any = step(matrix)
        if isinstance(result, Tensor):
            matrix = result
        elif int(result.info):
            return None
        else:
            matrix = result.L
    factor = matrix.float().contiguous()
    return factor if bool(torch.isfinite(factor).all()) and bool((factor.diagonal() > 0).all()) else None


@dataclass(frozen=True)
class Solved:
    """A second moment, ready for use.

    Attributes:
        moment: (K, K) float32, mean of x x^T, not damped.
        order: (K,) int64, the columns in the order they are rounded in.
        factor: (K, K) float32, upper Cholesky factor of the inverse of the damped moment, in that order.
        importance: (K,) float32, diagonal of the damped moment, in that order.
        dead: input channels that were always 0.
        damping: what it took to invert it, in multiples of the diagonal's mean.
    """

    moment: Tensor
    order: Tensor
    factor: Tensor
    importance: Tensor
    dead: int
    damping: float


def column_order(mean_squares: Tensor, block_size: int) -> Tensor:
    """Columns by falling mean square, inside their blocks, and blocks by their sum; a short last block stays last.

    What is rounded first can be made good by everything that follows, so what matters most goes first. Columns keep their
    places in the row: only the order of rounding changes (a quarter less output error on SmolLM2).
    """
    K = len(mean_squares)
    full = K // block_size
    blocks = mean_squares[: full * block_size].view(full, block_size)
    inside = (
        blocks.argsort(dim=1, descending=True, stable=True) + torch.arange(full, device=blocks.device)[:, None] * block_size
    )
    first = inside[blocks.sum(1).argsort(descending=True, stable=True)].flatten()
    last = mean_squares[full * block_size :].argsort(descending=True, stable=True) + full * block_size
    return torch.cat((first, last))
