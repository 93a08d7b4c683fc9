"""What an optimizer must know about a parameter that is one rank's piece of a larger one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ELIGIBLE_NUMEL = 4096
"""Smallest *global* number of elements whose state is kept in 8 bits."""

_GLOBAL_PIECE = "_halfbyte_global_piece"


@dataclass(frozen=True)
class GlobalPiece:
    """Where a flat local piece lies in its parameter: set by `annotate_fsdp1` on FSDP1's 1-D views.

    Attributes:
        shape: the whole parameter's shape.
        offset: index of the piece's first element in the flattened parameter.
    """

    shape: torch.Size
    offset: int


def is_dtensor(tensor: Any) -> bool:
    """True for a `DTensor`; never imports `torch.distributed.tensor` (nobody can hold one before it is imported)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp1(model: nn.Module) -> bool:
    """True if a model has FSDP1 units; never imports FSDP."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and any(isinstance(m, module.FullyShardedDataParallel) for m in model.modules())


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor: the tensor itself unless it is a DTensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_grad(param: Any) -> Tensor | None:
    """This rank's part of a parameter's gradient, placed like the parameter."""
    grad = param.grad
    if grad is None or not is_dtensor(grad):
        return grad
    if is_dtensor(param) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def like_param(param: Any, piece: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`piece` as state of `param`: a DTensor of global `shape` with the parameter's placements if it is one."""
    if not is_dtensor(param):
        return piece
    stride = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        stride[d] = stride[d + 1] * shape[d + 1]
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(
        piece,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def global_shape(param: Tensor) -> torch.Size:
    """Shape of the whole parameter.

    Args:
        param: a parameter, a DTensor, or an FSDP1 view that `annotate_fsdp1` has seen.

    Returns:
        Its global shape.

    Raises:
        ValueError: an FSDP1 view of a parameter whose whole shape is unknown: the state's precision would then depend
            on the world size.
    """
    piece: GlobalPiece | None = getattr(param, _GLOBAL_PIECE, None)
    if piece is not None:
        return piece.shape
    if getattr(param, "_fsdp_flattened", False) and not hasattr(param, "_param_infos"):
        raise ValueError(
            f"halfbyte.optim: a parameter of local shape {tuple(param.shape)} is FSDP1's view into a flat parameter; "
            "call halfbyte.optim.annotate_fsdp1(model) before the first step: otherwise the state would depend on the "
            "world size (and before halfbyte.report of a module inside the wrapped model)"
        )
    return param.shape


def rows_are_whole(param: Any) -> bool:
    """False where rows of a DTensor are cut (`Shard(1)`): row blocks would then straddle ranks."""
    if not is_dtensor(param):
        return True
    return all(p.is_replicate() or getattr(p, "dim", None) == 0 for p in param.placements)


def first_element(param: Any) -> int:
    """Index of this rank's first element in the flattened whole parameter."""
    piece: GlobalPiece | None = getattr(param, _GLOBAL_PIECE, None)
    if piece is not None:
        return piece.offset
    if not is_dtensor(param) or param.dim() == 0:
        return 0
    row = param.numel() // param.shape[0] if param.shape[0] else 0
    return first_row(param) * row


def first_row(tensor: Any) -> int:
    """Index of this rank's first row in a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offset[0])


def is_eligible(param: Tensor, override: bool | None = None) -> bool:
    """Whether a parameter's state is kept in 8 bits: two dimensions or more and 4096 elements or more, globally.

    Args:
        param: the parameter (or DTensor, or annotated FSDP1 view).
        override: a group's `quantize_state`: False never, True for any size and number of dimensions, None the rule.

    Returns:
        The decision; always False for dtypes other than float32, bfloat16, float16 and for DTensors cut inside rows.

    Raises:
        ValueError: `override` asks for 8 bits and the parameter is a DTensor of one dimension that is sharded.
    """
    if override and param.dim() == 1 and is_dtensor(param) and any(p.is_shard() for p in param.placements):  # type: ignore[attr-defined]
        # One dimension is one row: every rank would keep a row of scales where a checkpoint holds one for all.
        raise ValueError(
            f"halfbyte.optim: quantize_state=True for a sharded parameter of one dimension, shape {tuple(param.shape)}: its "
            "state is one row, which ranks can't share; leave quantize_state out for it (its state is float32 then)"
        )
    if override is False or param.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not rows_are_whole(param):
        return False
    if override:
        return param.dim() > 0
    shape = global_shape(param)
    return len(shape) >= 2 and shape.numel() >= ELIGIBLE_NUMEL


def annotate_fsdp1(model: nn.Module) -> int:
    """Tells the optimizers the whole shapes of parameters that FSDP1 (`use_orig_params=True`) shows as 1-D pieces.

    Call it after wrapping and before the optimizer's first step; again after re-wrapping.

    Args:
        model: a module with `torch.distributed.fsdp.FullyShardedDataParallel` units.

    Returns:
        The number of parameters annotated.

    Raises:
        ValueError: the model has no FSDP1 unit.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    units: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    if not units:
        raise ValueError("halfbyte.optim.annotate_fsdp1: the model has no FullyShardedDataParallel unit")
    count = 0
    for unit in units:
        flat = unit._handle.flat_param if unit._handle is not None else None
        for param, shape, info in zip(*_pieces(flat), strict=True):
            setattr(param, _GLOBAL_PIECE, GlobalPiece(shape, info.intra_param_start_idx or 0))
            count += 1
    return count


def _pieces(flat: Any) -> tuple[Any, Any, Any]:
    if flat is None or getattr(flat, "_params", None) is None:
        return (), (), ()
    return flat._params, flat._shapes, flat._shard_param_infos
