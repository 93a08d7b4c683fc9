"""What `Optimizer8bit.load_state_dict` has in the place of torch.optim's way: tensors keep their dtypes, and are checked."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.optim.dynamic_map import row_blocks
from halfbyte.optim.offload import to_host
from halfbyte.optim.sharding import is_eligible, like_param, local
from halfbyte.optim.work import Group, State

if TYPE_CHECKING:
    from halfbyte.optim.base import Optimizer8bit


def put_state(optimizer: Optimizer8bit, saved: dict[Any, State], saved_groups: list[Group]) -> None:
    """Saved state, by the ids of the saved groups' parameters, becomes the optimizer's.

    Raises:
        ValueError: a parameter's state has other keys, dtypes or shapes.
    """
    ids = chain.from_iterable(g["params"] for g in saved_groups)
    params = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
    by_id = dict(zip(ids, params, strict=True))
    shared: dict[int, Tensor] = {}
    for key, value in saved.items():
        if key not in by_id:
            optimizer.state[key] = value
            continue
        param = by_id[key]
        _check(optimizer, param, value, key)
        optimizer.state[param] = {k: _placed(optimizer, param, k, v, shared) for k, v in value.items()}


def _placed(optimizer: Optimizer8bit, param: Tensor, key: str, value: Any, shared: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step":  # increased in place: never the caller's tensor; counts that were shared stay shared
        if id(value) not in shared:
            shared[id(value)] = value.detach().clone().to(device=param.device, dtype=torch.float32)
        return shared[id(value)]
    if optimizer.offload and key in {k for moment in optimizer.moments for k in (moment.codes, moment.scales)}:
        return like_param(param, to_host(local(value), param.device), tuple(value.shape))
    value = value.to(device=param.device)
    return value if local(value).is_contiguous() else value.contiguous()


def _check(optimizer: Optimizer8bit, param: Tensor, state: State, key: Any) -> None:
    where = f"{type(optimizer).__name__}.load_state_dict: state of parameter {key!r}"
    first = optimizer.moments[0]
    quantized = first.codes in state
    if not quantized and first.name in state and is_eligible(param):
        raise ValueError(
            f"{where} is float32 ({first.name}); load state of torch.optim or bitsandbytes with load_torch_state_dict or "
            "load_bitsandbytes_state_dict"
        )
    for moment in optimizer.moments if quantized else ():
        _, _, blocks = row_blocks(local(param).shape)
        rows = param.shape[0] if param.dim() > 1 else 1
        for name, dtype, shape in (
            (moment.codes, torch.uint8, tuple(param.shape)),
            (moment.scales, torch.float32, (rows, blocks)),
        ):
            value = state.get(name)
            if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != shape:
                got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{where}: {name} must be {dtype} of shape {shape}, got {got}")
