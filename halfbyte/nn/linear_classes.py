"""Which classes are linear layers that packed rows can stand for: `nn.Linear`, and two of transformers' own.

`Conv1D` (GPT-2) stores its weight as (K, N). `FalconLinear` is an `nn.Linear` whose forward is `input @ weight.T + bias`.
Any other subclass has a forward of its own and stays dense. transformers isn't imported for the answer.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

__all__ = ["is_conv1d", "is_linear", "is_stored_transposed", "linear_shape", "linear_weight"]


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is a dense `transformers.pytorch_utils.Conv1D`."""
    return _is(module, "transformers.pytorch_utils", "Conv1D")


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a dense layer that a `QuantLinear` can replace: it multiplies with its weight and nothing else."""
    falcon = _is(module, "transformers.models.falcon.modeling_falcon", "FalconLinear")
    return type(module) is nn.Linear or is_conv1d(module) or falcon


def _is(module: nn.Module, host: str, name: str) -> bool:
    return host in sys.modules and type(module) is getattr(sys.modules[host], name)


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(N, K) of an `nn.Linear` or a `Conv1D`, packed or not; None for any other module."""
    layer: Any = module
    if isinstance(module, nn.Linear):
        return layer.out_features, layer.in_features
    return (layer.nf, layer.nx) if is_conv1d(module) else None


def is_stored_transposed(packed: nn.Module) -> bool:
    """Whether the packed linear layer was, and becomes again, a `Conv1D`, whose checkpoints hold (K, N)."""
    return not issubclass(packed.__dict__.get("dense_class", nn.Linear), nn.Linear)


def linear_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """`weight` between the layout of the dense `module` and (N, K), in either direction: transposed for a `Conv1D`."""
    return weight.t().contiguous() if is_conv1d(module) else weight
