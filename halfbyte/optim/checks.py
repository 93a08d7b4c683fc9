"""Checks of hyper-parameters: a bad one is a ValueError that names the class, the argument and the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def check_nonnegative(name: str, **values: float | Tensor) -> None:
    """Every value must be a number of at least 0; a tensor must have one element (and is not read)."""
    for argument, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name}: {argument} must have one element, got shape {tuple(value.shape)}")
        elif not value >= 0:
            raise ValueError(f"{name}: {argument} must not be negative, got {value}")


def check_betas(name: str, betas: Sequence[float]) -> None:
    """Two numbers in [0, 1)."""
    if len(betas) != 2:
        raise ValueError(f"{name}: betas must be two numbers, got {len(betas)}")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: betas[{i}] must be from 0 to below 1, got {beta}")


def check_extras(name: str, extras: dict[str, Any]) -> None:
    """The keyword-only arguments all optimizers share."""
    if extras["quantize_state"] not in (None, True, False):
        raise ValueError(f"{name}: quantize_state must be None, True or False, got {extras['quantize_state']!r}")
    seed = extras["seed"]
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"{name}: seed must be an integer of 64 bits, got {seed!r}")
