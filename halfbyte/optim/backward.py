"""fused_backward: a parameter is stepped as soon as its gradient is ready, and the gradient is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.optim.sharding import is_dtensor

if TYPE_CHECKING:
    from halfbyte.optim.base import Optimizer8bit


def attach(optimizer: Optimizer8bit, group_index: int, params: Iterable[Tensor]) -> None:
    """Registers the hook of every parameter of a group; a parameter outlives its optimizer without being stepped.

    FSDP2 calls the same hooks with the sharded parameter, after the reduce-scatter of its gradient.
    """
    reference = weakref.ref(optimizer)

    def step_now(param: Tensor) -> None:
        owner = reference()
        if owner is None or param.grad is None:
            return
        if getattr(param, "_halfbyte_stepped_by_ddp", False):
            return  # attach_ddp steps it, with the averaged gradient
        refuse_unreduced(owner, param)
        owner.step_parameter(group_index, param)
        param.grad = None

    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(step_now)


def refuse_unreduced(optimizer: Optimizer8bit, param: Tensor) -> None:
    """Raises where this hook would see a rank's own gradient instead of the average over ranks."""
    name = type(optimizer).__name__
    if getattr(param, "_fsdp_flattened", False):
        raise NotImplementedError(
            f"{name}: fused_backward does not work under FSDP1 (FullyShardedDataParallel), which reduces gradients "
            "after the parameter's hook; supported are one device, FSDP2 (fully_shard) and DDP with attach_ddp"
        )
    if is_dtensor(param) or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    raise NotImplementedError(
        f"{name}: fused_backward with {dist.get_world_size()} ranks steps before DistributedDataParallel averages the "
        "gradients; call optimizer.attach_ddp(ddp_model) before the first backward, or use FSDP2 (fully_shard)"
    )


def attach_ddp(optimizer: Optimizer8bit, ddp: Any) -> None:
    """Steps the parameters of a DistributedDataParallel module as their buckets arrive, averaged."""
    groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    mine = [p for p in ddp.parameters() if p in groups]
    if not mine:
        raise ValueError(f"{type(optimizer).__name__}.attach_ddp: the module has none of the optimizer's parameters")
    for param in mine:
        param._halfbyte_stepped_by_ddp = True
    reference = weakref.ref(optimizer)

    def free_gradients() -> None:
        for param in mine:
            param.grad = None

    def average_and_step(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size(group))
        dist.all_reduce(buffer, group=group)
        owner = reference()
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if owner is not None and param in groups:
                param.grad = grad
                owner.step_parameter(groups[param], param)
        if bucket.is_last():  # DDP writes the buckets back to .grad when backward ends
            torch.autograd.Variable._execution_engine.queue_callback(free_gradients)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    # DDP compares the annotations themselves; here they are strings (annotations from __future__).
    bucket_type = dist.GradBucket  # type: ignore[attr-defined]
    average_and_step.__annotations__ = {"bucket": bucket_type, "return": torch.futures.Future[Tensor]}
    ddp.register_comm_hook(ddp.process_group, average_and_step)
