"""Optimizer state from and to torch.optim, and from bitsandbytes; `Optimizer8bit` has the methods users call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.optim.dynamic_map import STATE_BLOCK, decode_state, encode_state, map_values, row_blocks
from halfbyte.optim.sharding import is_dtensor, is_eligible, like_param, local
from halfbyte.optim.work import Group, Moment, State

if TYPE_CHECKING:
    from halfbyte.optim.base import Optimizer8bit

BITSANDBYTES_WRAPPER = "__bnb_optimizer_quant_state__"
_MAP_TOLERANCE = 2e-6  # relative; the closed form and bitsandbytes' table differ by 8 ulp at most, 1e-6


def local_value(param: Tensor, value: Tensor) -> Tensor:
    """This rank's part of a state tensor that is a DTensor, the whole tensor, or this rank's part already."""
    if is_dtensor(value) or not is_dtensor(param) or value.shape != param.shape or value.shape == local(param).shape:
        return local(value)
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(value, param.device_mesh, param.placements))  # type: ignore[attr-defined]


def moment_from_torch(param: Tensor, value: Any, moment: Moment, where: str) -> Tensor:
    """A moment of torch.optim as float32 of the local parameter's shape.

    Args:
        param: the parameter.
        value: torch.optim's state tensor.
        moment: which moment.
        where: who asks, for the error.

    Returns:
        float32, the local parameter's shape.

    Raises:
        ValueError: not a tensor of the parameter's shape.
    """
    piece = local_value(param, value) if isinstance(value, Tensor) else None
    if piece is None or piece.shape != local(param).shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{where}: {moment.name} must be a tensor of the parameter's shape {tuple(param.shape)}, got {got}")
    return piece.to(device=param.device, dtype=torch.float32)


def unwrap_bitsandbytes(state: dict[str, Any]) -> dict[str, Any]:
    """State of a parameter from bitsandbytes, its FSDP wrapper opened if it has one."""
    inner = state.get(BITSANDBYTES_WRAPPER)
    return {**state, **inner} if isinstance(inner, dict) else state


def bitsandbytes_block(numel: int, num_scales: int, block_size: int | None, where: str) -> int:
    """The block size of a state with `num_scales` scales.

    Args:
        numel: elements of the parameter.
        num_scales: scales in the state.
        block_size: what the caller says, or None.
        where: who asks, for the error.

    Returns:
        Elements per scale.

    Raises:
        ValueError: the block size is ambiguous, or the given one does not fit.
    """
    if block_size is not None:
        if block_size < 1 or -(-numel // block_size) != num_scales:
            raise ValueError(f"{where}: block_size={block_size} does not give {num_scales} scales for {numel} elements")
        return block_size
    if num_scales == 1:
        return numel  # one block, whatever its nominal size
    fitting = [size for size in (2**i for i in range(6, 31)) if -(-numel // size) == num_scales]
    if len(fitting) != 1:
        raise ValueError(f"{where}: {num_scales} scales for {numel} elements fit no single power of two; pass block_size=")
    return fitting[0]


def moment_from_bitsandbytes(
    param: Tensor, state: dict[str, Any], index: int, moment: Moment, block_size: int | None, where: str
) -> tuple[Tensor, Tensor] | Tensor:
    """One moment of bitsandbytes' state.

    Args:
        param: the parameter, not sharded.
        state: bitsandbytes' state of it, unwrapped.
        index: 1 or 2, of `state1` and `state2`.
        moment: which moment that is.
        block_size: as given by the caller, or None.
        where: who asks, for errors.

    Returns:
        Codes and scales: byte for byte where its flat blocks are ours (K % 256 == 0, or a 1-D parameter, with its
        dynamic map), coded anew otherwise. float32 state comes back as one float32 tensor.

    Raises:
        ValueError: an entry is missing or does not fit.
    """
    values = state.get(f"state{index}")
    if not isinstance(values, Tensor) or values.shape != param.shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{where}: state{index} must be a tensor of the parameter's shape {tuple(param.shape)}, got {got}")
    values = values.to(param.device)
    if values.dtype != torch.uint8:
        return values.float()
    scales, table = state.get(f"absmax{index}"), state.get(f"qmap{index}")
    if not isinstance(scales, Tensor) or not isinstance(table, Tensor) or table.numel() != 256:
        raise ValueError(f"{where}: absmax{index} and qmap{index} are needed beside an 8-bit state{index}")
    scales, table = scales.to(param.device).float().flatten(), table.to(param.device).float().flatten()
    block = bitsandbytes_block(values.numel(), scales.numel(), block_size, where)
    rows, length, blocks = row_blocks(param.shape)
    ours = map_values(moment.signed).to(param.device)
    same_map = bool(((table - ours).abs() <= _MAP_TOLERANCE * ours.abs()).all())
    same_blocks = block == STATE_BLOCK and (length % STATE_BLOCK == 0 or rows == 1)
    same_blocks = same_blocks or (scales.numel() == 1 and rows * blocks == 1)
    if same_map and same_blocks:
        return values.clone(), scales.clone().view(rows, blocks)
    dense = (table[values.flatten().int()] * scales.repeat_interleave(block)[: values.numel()]).view(param.shape)
    return encode_state(dense, moment.signed)


def to_torch(optimizer: Optimizer8bit) -> dict[str, Any]:
    """`Optimizer8bit.torch_state_dict`."""
    packed = optimizer.state_dict()
    params = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
    has_step = "betas" in optimizer.torch_defaults  # torch's SGD keeps no step count
    state: dict[int, State] = {}
    for key, value in packed["state"].items():
        state[key] = {"step": value["step"].clone()} if has_step else {}
        for moment in optimizer.moments:
            if moment.codes in value:
                codes, scales = local(value[moment.codes]), local(value[moment.scales])
                dense = decode_state(codes, scales, moment.signed, exact_inverse=True)
                state[key][moment.name] = like_param(params[key], dense, tuple(params[key].shape))
            elif moment.name in value:
                state[key][moment.name] = value[moment.name].clone()
    groups = [
        {
            **{name: group.get(name, default) for name, default in optimizer.torch_defaults.items()},
            **{name: group[name] for name in ("initial_lr", "param_names") if name in group},
            "params": group["params"],
        }
        for group in packed["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def from_torch(optimizer: Optimizer8bit, state_dict: dict[str, Any]) -> None:
    """`Optimizer8bit.load_torch_state_dict`."""
    for param, group, value, where in _pairs(optimizer, state_dict, "load_torch_state_dict"):
        if "max_exp_avg_sq" in value:
            raise ValueError(f"{where}: amsgrad state (max_exp_avg_sq) has no 8-bit form")
        if "betas" not in optimizer.torch_defaults and value.get("momentum_buffer") is None:
            continue  # SGD before its first step with momentum
        moments = [moment_from_torch(param, value.get(moment.name), moment, where) for moment in optimizer.moments]
        _replace(optimizer, param, group, value.get("step", 1), moments)


def from_bitsandbytes(optimizer: Optimizer8bit, state_dict: dict[str, Any], block_size: int | None) -> None:
    """`Optimizer8bit.load_bitsandbytes_state_dict`."""
    for param, group, value, where in _pairs(optimizer, state_dict, "load_bitsandbytes_state_dict"):
        if is_dtensor(param):
            raise NotImplementedError(f"{where}: flat blocks straddle the shards of a DTensor; load before sharding")
        opened = unwrap_bitsandbytes(value)
        moments = [
            moment_from_bitsandbytes(param, opened, i + 1, moment, block_size, where)
            for i, moment in enumerate(optimizer.moments)
        ]
        _replace(optimizer, param, group, opened.get("step", 1), moments)


def _pairs(optimizer: Optimizer8bit, state_dict: dict[str, Any], method: str) -> Iterator[tuple[Tensor, Group, State, str]]:
    """Checks a foreign state dict's groups, takes over their hyper-parameters, pairs states with parameters."""
    name = f"{type(optimizer).__name__}.{method}"
    saved, groups = state_dict["param_groups"], optimizer.param_groups
    sizes, foreign_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if foreign_sizes != sizes:
        raise ValueError(f"{name}: the groups must have {sizes} parameters, got {foreign_sizes}")
    for group, foreign in zip(groups, saved, strict=True):
        if foreign.get("amsgrad"):
            raise ValueError(f"{name}: amsgrad=True has no 8-bit form")
        group.update(own_group(foreign, group))
        for param, key in zip(group["params"], foreign["params"], strict=True):
            if key in state_dict["state"]:
                yield param, group, state_dict["state"][key], f"{name}: state of parameter {key!r}"


def _replace(
    optimizer: Optimizer8bit, param: Tensor, group: Group, step: Any, moments: Sequence[Tensor | tuple[Tensor, Tensor]]
) -> None:
    """New state of one parameter; each moment is float32 or already (codes, scales)."""
    state: State = {"step": step_tensor(step, param.device)}
    quantize = is_eligible(param, group["quantize_state"])
    for moment, value in zip(optimizer.moments, moments, strict=True):
        if quantize:
            codes, scales = value if isinstance(value, tuple) else encode_state(value, moment.signed)
            optimizer.set_moment(param, state, moment, codes, scales)
        else:
            dense = decode_state(value[0], value[1], moment.signed) if isinstance(value, tuple) else value
            dense = dense.to(torch.float64 if param.dtype == torch.float64 else torch.float32, copy=True).contiguous()
            state[moment.name] = like_param(param, dense, tuple(param.shape))
    optimizer.state[param] = state


def own_group(saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a saved foreign group that the group has as well (and a scheduler's `initial_lr`)."""
    keys = (set(group) | {"initial_lr"}) - {"params", "quantize_state", "stochastic_rounding", "seed"}
    return {key: saved[key] for key in keys if key in saved}


def step_tensor(value: Any, device: torch.device) -> Tensor:
    """A step count of any library as our float32 scalar."""
    count = float(value)
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"halfbyte.optim: step must be a count, got {value!r}")
    return torch.tensor(count, dtype=torch.float32, device=device)
