"""float32 steps of parameters too small for 8-bit state, for the rules that torch has no fused form of."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.optim.work import Work


def gradients(work: Work, maximize: bool) -> list[Tensor]:
    """Gradients divided by GradScaler's scale, negated when maximizing; new tensors where either applies."""
    grads = work.grads
    if work.grad_scale is not None:
        factor = work.grad_scale.double().reciprocal().float()
        grads = list(torch._foreach_mul(grads, factor))
    return list(torch._foreach_neg(grads)) if maximize else grads


def commit(work: Work, targets: list[Tensor], values: list[Tensor]) -> None:
    """Writes `values` to `targets` unless GradScaler found an Inf; decided on the device."""
    if work.found_inf is not None:
        skip = work.found_inf != 0
        values = [torch.where(skip, old, new) for old, new in zip(targets, values, strict=True)]
    torch._foreach_copy_(targets, values)


def count_step(work: Work) -> None:
    """Increases the step counts, unless GradScaler found an Inf."""
    torch._foreach_add_(work.steps, 1)
    if work.found_inf is not None:
        torch._foreach_sub_(work.steps, [work.found_inf] * len(work.steps))


def step_along(params: list[Tensor], directions: list[Tensor], lr: float | Tensor) -> list[Tensor]:
    """`params - lr * directions`, new tensors."""
    return list(torch._foreach_sub(params, torch._foreach_mul(directions, lr)))


def by_dtype(tensors: list[Tensor]) -> list[list[int]]:
    """Indices of the tensors of each dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(i)
    return list(found.values())


def in_one(tensors: list[Tensor]) -> Tensor:
    """The elements of contiguous tensors of one dtype as a vector: hundreds of norms cost one call of each op."""
    return torch.cat([t.view(-1) for t in tensors]) if len(tensors) > 1 else tensors[0].view(-1)


def apart(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of such a vector, in the tensors' shapes."""
    return [part.view_as(t) for part, t in zip(vector.split([t.numel() for t in like]), like, strict=True)]
