"""float32 steps of parameters too small for 8-bit state, for the rules that torch has no fused form of."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.ops.optimizer import sgd8bit_step_
from halfbyte.optim.dynamic_map import row_blocks
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


def round_stochastically(work: Work, params: list[Tensor], members: list[int], seed: int) -> None:
    """Rounds float32 `work.params[i]` to 16-bit `params[i]`, i of `members`, up or down by the odds of the distance.

    A step of SGD without momentum along what they differ by: the random numbers are those of the 8-bit steps.
    """
    members = [i for i in members if params[i].numel() > 0]
    if not members:
        return
    rounded = [params[i].contiguous().view(1, -1) for i in members]
    differences = torch._foreach_sub([p.float() for p in rounded], [work.params[i].view(1, -1) for i in members])
    codes = [torch.zeros_like(p, dtype=torch.uint8) for p in rounded]
    scales = [torch.zeros(1, row_blocks(p.shape)[2], device=p.device) for p in rounded]
    steps, offsets = [work.steps[i] for i in members], [work.offsets[i] for i in members]
    sgd8bit_step_(
        rounded,
        list(differences),
        codes,
        scales,
        steps,
        lr=1.0,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        element_offsets=offsets,
        seed=seed,
    )
    for i, p in zip(members, rounded, strict=True):
        if not params[i].is_contiguous():
            params[i].copy_(p.view(params[i].shape))
