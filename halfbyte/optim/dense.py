"""Steps of parameters with float32 state: copies for torch's fused steps, and the rules that it has no fused form of."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.ops.optimizer import sgd8bit_step_
from halfbyte.optim.dynamic_map import row_blocks
from halfbyte.optim.work import Work


def steppable(param: Tensor) -> Tensor:
    """The parameter itself, or a copy: float32 of a 16-bit one, contiguous of any other."""
    return (param.float() if param.dtype in (torch.bfloat16, torch.float16) else param).contiguous()


def write_back(work: Work, params: list[Tensor], seed: int | None) -> None:
    """Copies the stepped `work.params` to those of `params` that are not the same tensors.

    With a seed 16-bit ones are rounded up or down with the probability of the distance, else to nearest.
    """
    copies = [i for i, p in enumerate(params) if p is not work.params[i] and p.numel() > 0]
    if seed is not None:
        _round_stochastically(work, params, [i for i in copies if params[i].dtype != work.params[i].dtype], seed)
        copies = [i for i in copies if params[i].dtype == work.params[i].dtype]
    if copies:
        torch._foreach_copy_([params[i] for i in copies], [work.params[i] for i in copies])


def _round_stochastically(work: Work, params: list[Tensor], members: list[int], seed: int) -> None:
    # A step of SGD without momentum along what they differ by: the random numbers are those of the 8-bit steps.
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
