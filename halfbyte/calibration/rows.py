"""One weight to calibrated rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.calibration.moments import Solved
from halfbyte.formats import Format
from halfbyte.ops.dequantize import dequantize
from halfbyte.ops.error_feedback import error_feedback
from halfbyte.ops.quantize import quantize

CANDIDATES = tuple(1.1 - 0.025 * i for i in range(17))
"""Multiples of a block's absmax that the search tries as its scale."""

METHODS = ("feedback", "scales")


@dataclass(frozen=True)
class Rows:
    """Packed rows of one weight and the relative output errors of plain and of these rows."""

    packed: Tensor
    plain_error: float
    error: float
    note: str | None = None


def calibrated_rows(weight: Tensor, solved: Solved, format: Format, method: str) -> Rows:
    """Packs a weight (N, K) so that its output on the calibration tokens changes least.

    The rows are plain ones, with a note, where those measure better or the weight is not finite.
    """
    dense = weight.detach().float()
    plain = quantize(weight.detach(), format)
    if not bool(torch.isfinite(dense).all()):
        return Rows(plain, float("nan"), float("nan"), "the weight holds NaN or infinity")
    scale = _output(dense, solved.moment)
    before = _output(dequantize(plain, format, dense.shape[1], torch.float32).sub_(dense), solved.moment)
    candidates = torch.tensor(CANDIDATES, device=dense.device)
    factor = solved.factor if method == "feedback" else None
    ordered = dense[:, solved.order]
    targets, scales = error_feedback(ordered, factor, solved.importance, candidates, format)
    if format.scales == "dq":  # the scales a row can hold, known once all are; then the errors under those
        targets, scales = error_feedback(ordered, factor, solved.importance, candidates, format, scales=snapped(scales))
    blocks = solved.order[:: format.block_size or len(solved.order)] // (format.block_size or len(solved.order))
    packed = quantize(targets[:, solved.order.argsort()], format, scales=scales[:, blocks.argsort()])
    after = _output(dequantize(packed, format, dense.shape[1], torch.float32).sub_(dense), solved.moment)
    plain_error, error = ((value / scale) ** 0.5 if scale > 0 else 0.0 for value in (before, after))
    if not after <= before:
        return Rows(plain, plain_error, plain_error, f"plain rows measured better ({plain_error:.4f} against {error:.4f})")
    return Rows(packed, plain_error, error)


def snapped(scales: Tensor) -> Tensor:
    """Scales (N, B) as a -dq row decodes them (docs/formats.md): uint8 steps between the row's smallest and largest."""
    low, high = scales.amin(1, keepdim=True), scales.amax(1, keepdim=True)
    step = (high - low) / 255
    u = torch.where(step > 0, ((scales - low) / step).round(), 0).clamp_(max=255)
    return (u.double() * step.double() + low.double()).float()


def _output(weight: Tensor, moment: Tensor) -> float:
    """Mean over tokens of ||W x||^2."""
    return max(0.0, float((weight @ moment).mul_(weight).sum(dtype=torch.float64)))
