"""transformers' `Conv1D` (GPT-2): a linear layer that stores its weight as (K, N); packed, it is a `QuantLinear`."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

__all__ = ["is_conv1d", "linear_shape", "linear_weight"]


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is a dense `transformers.pytorch_utils.Conv1D`; transformers isn't imported for the answer."""
    host = sys.modules.get("transformers.pytorch_utils")
    return host is not None and type(module) is host.Conv1D


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(N, K) of an `nn.Linear` or a `Conv1D`, packed or not; None for any other module."""
    layer: Any = module
    if isinstance(module, nn.Linear):
        return layer.out_features, layer.in_features
    return (layer.nf, layer.nx) if is_conv1d(module) else None


def linear_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """`weight` between the layout of the dense `module` and (N, K), in either direction: transposed for a `Conv1D`."""
    return weight.t().contiguous() if is_conv1d(module) else weight
