"""fully_shard: FSDP2 with the units read off the model; packed rows are sharded as the plain uint8 parameters they are."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from halfbyte.distributed.grouping import blocks, candidates, shared_parameters, tables

__all__ = ["fully_shard"]

_Module = TypeVar("_Module", bound=nn.Module)

MINIMUM_TORCH = (2, 12)
"""FSDP2 of older versions makes `nn.Parameter(shard)` of every shard, which asks uint8 for a gradient."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def fully_shard(
    model: _Module,
    *,
    mesh: Any = None,
    checkpointing: bool = True,
    reshard_after_forward: bool = True,
    mp_policy: Any = None,
    offload_policy: Any = None,
) -> _Module:
    """Shards a model in place by torch's FSDP2: each repeated block is a unit, what is left is the root's.

    Units are the classes of `_no_split_modules`, else repeated members of `ModuleList`s; the input and output embeddings of
    a transformers model too, unless they are tied. Packed rows become uint8 DTensors, split by rows: an all-gather carries
    their packed bytes, and a frozen weight takes part in no reduce-scatter. In a LightningModule the `*_step` methods
    gather what forward would.

    Args:
        model: built on any device, meta included (then call `model.to_empty(device=...)` and load its state).
        mesh: a `DeviceMesh` of one dimension, or of two for (replicate, shard); None: all ranks.
        checkpointing: recompute each block in backward instead of keeping its activations: transformers' own switch
            (non-reentrant) where the model has one, else `torch.utils.checkpoint` around each block.
        reshard_after_forward: release a block's gathered parameters between forward and backward. The root keeps its own.
        mp_policy: a `MixedPrecisionPolicy`; it leaves packed rows alone.
        offload_policy: an `OffloadPolicy`, for example `CPUOffloadPolicy()`: shards, gradients and optimizer state stay in
            host memory, and the optimizer steps there. On a mesh of CPUs nothing is pinned, since nothing is transferred.

    Returns:
        The same model.

    Raises:
        RuntimeError: no process group is initialized, or the model has packed rows and torch is older than 2.12.
        ValueError: the model repeats no block, is sharded already, or trainable parameters of one unit differ in dtype.

    Note:
        Deterministic; losses and gradients are those of one process up to the order of the sums over ranks.
    """
    _check_torch(model)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "halfbyte.distributed.fully_shard: no process group is initialized; start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
    from torch.distributed.fsdp import fully_shard as shard

    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            f"halfbyte.distributed.fully_shard: the model is sharded already: {sharded[0] or 'its root'} is an FSDP2 unit"
        )
    found = blocks(model)
    if not found:
        raise ValueError(
            "halfbyte.distributed.fully_shard: found no repeated blocks: no module has _no_split_modules and no ModuleList "
            f"holds two modules of one class, so every rank would gather the whole model. Candidates: {candidates(model)}. "
            "Put the blocks into a ModuleList, or name their class in model._no_split_modules."
        )
    units = {**found, **tables(model, shared_parameters(model))}
    _check_dtypes(model, units)
    if checkpointing:
        _checkpoint_blocks(model, found)
    kwargs: dict[str, Any] = {"mesh": _mesh_of(model) if mesh is None else mesh}
    if getattr(offload_policy, "pin_memory", False) and kwargs["mesh"].device_type == "cpu":
        offload_policy = dataclasses.replace(offload_policy, pin_memory=False)  # torch can't pin without an accelerator
    kwargs.update({k: v for k, v in (("mp_policy", mp_policy), ("offload_policy", offload_policy)) if v is not None})
    for module in reversed(list(units.values())):  # children before their parents
        shard(module, reshard_after_forward=reshard_after_forward, **kwargs)
    shard(model, **kwargs)
    for method in _STEPS:  # Lightning calls these on the root, never its forward
        if callable(getattr(model, method, None)):
            register_fsdp_forward_method(model, method)
    return model


def takes_packed_rows() -> bool:
    """Whether this torch's FSDP2 shards packed (uint8) parameters."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= MINIMUM_TORCH


def _check_torch(model: nn.Module) -> None:
    packed = any(p.dtype == torch.uint8 for p in model.parameters())
    if packed and not takes_packed_rows():
        raise RuntimeError(
            f"halfbyte.distributed.fully_shard: FSDP2 shards packed (uint8) parameters from torch 2.12 on, this is "
            f"{torch.__version__}; install torch>=2.12, or use FSDP1: lightning_plugin.HalfbyteFSDPStrategy"
        )


def _mesh_of(model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    devices = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
    # A model built on the CPU (or on meta) of a job that talks over NCCL is meant for the GPUs.
    device = devices.pop() if devices else "cuda" if "nccl" in dist.get_backend() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))


def _check_dtypes(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """One unit reduces all of its gradients in one buffer of one dtype; torch says so only at the first forward."""
    taken: set[int] = set()
    for name, unit in [*reversed(units.items()), ("the root unit", model)]:
        by_dtype: dict[torch.dtype, str] = {}
        for parameter_name, parameter in unit.named_parameters():
            if id(parameter) not in taken:
                taken.add(id(parameter))
                if parameter.requires_grad:
                    by_dtype.setdefault(parameter.dtype, parameter_name)
        if len(by_dtype) > 1:
            listed = ", ".join(f"{parameter} is {dtype}" for dtype, parameter in by_dtype.items())
            raise ValueError(
                f"halfbyte.distributed.fully_shard: the trainable parameters of one unit must have one dtype, in {name} "
                f"{listed}; cast them alike (HalfbytePrecision(trainable_dtype=...) does)"
            )


def _checkpoint_blocks(model: nn.Module, found: dict[str, nn.Module]) -> None:
    module: Any
    for module in model.modules():
        if getattr(module, "supports_gradient_checkpointing", False) and hasattr(module, "activation_checkpointing_enable"):
            if not module.is_activation_checkpointing:
                module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            return
    from torch.distributed._composable.checkpoint_activation import (
        checkpoint,
    )  # hooks, not a wrapper: names and classes stay as they are

    for block in found.values():
        checkpoint(block)
