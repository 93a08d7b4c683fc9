"""Samples and hostile arguments of the 8-bit optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte.testing.calls import Call, Hostile, OpSpec, Samples

_OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {  # moments, hyper-parameters
    "adamw8bit_step_": (2, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}),
    "adam8bit_step_": (2, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}),
    "lion8bit_step_": (1, {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01}),
    "sgd8bit_step_": (1, {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": True}),
}


def _optimizer_call(name: str, device: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, **changes: Any) -> Call:
    moments, hyper = _OPTIMIZERS[name]
    params = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    lists: list[list[Tensor]] = [params, [torch.randn_like(p) for p in params]]
    for moment in range(moments):
        zero = 127 if moment == 0 else 0  # the codes of 0.0 in the signed and in the unsigned map
        lists.append([torch.full(p.shape, zero, dtype=torch.uint8, device=device) for p in params])
        rows = [(1, p.numel()) if p.dim() == 1 else (p.shape[0], p[0].numel()) for p in params]
        lists.append([torch.zeros(n, -(-k // 256), device=device) for n, k in rows])
    steps = [torch.ones((), device=device)] if params else []
    return Call.of(*lists, steps, **{"lr": 1e-3, **hyper, **changes})


def _optimizer_samples(name: str) -> Callable[[str], Samples]:
    def samples(device: str) -> Samples:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield _optimizer_call(name, device, ((300,), (17, 33), (2, 3, 300)), dtype)
        yield _optimizer_call(name, device, ((4, 256),), torch.bfloat16, maximize=True, seed=7, element_offsets=[11])
        one = torch.ones((), device=device)
        yield _optimizer_call(name, device, ((4, 256),), torch.float32, lr_tensor=one, grad_scale=one, found_inf=one)

    return samples


def _optimizer_hostile(name: str) -> Callable[[str], Hostile]:
    def changed(device: str, **changes: Any) -> Call:
        return _optimizer_call(name, device, ((4, 300),), torch.float32, **changes)

    def with_list(device: str, position: int, value: list[Tensor]) -> Call:
        call = changed(device)
        return Call.of(*call[:position], value, *call[position + 1 :], **call.keywords)

    def hostile(device: str) -> Hostile:
        p = torch.randn(4, 300, device=device)
        yield with_list(device, 1, []), ValueError, "must have one entry per parameter"
        yield with_list(device, 1, [p[:3]]), ValueError, r"grads\[0\] must have params\[0\]'s shape"
        yield with_list(device, 0, [p.double()]), ValueError, "must be float32, bfloat16 or float16"
        yield with_list(device, 0, [torch.randn(300, 4, device=device).t()]), ValueError, "must be contiguous"
        yield with_list(device, 2, [torch.zeros(4, 300, device=device)]), ValueError, r"codes\[0\] must be uint8"
        yield with_list(device, 3, [torch.zeros(4, 1, device=device)]), ValueError, r"scales\[0\] must have shape \(4, 2\)"
        yield changed(device, weight_decay=-0.1), ValueError, "weight_decay must not be negative"
        yield changed(device, element_offsets=[1, 2]), ValueError, "element_offsets must be empty or have one entry"

    return hostile


SPECS = {name: OpSpec(_optimizer_samples(name), _optimizer_hostile(name)) for name in _OPTIMIZERS}
