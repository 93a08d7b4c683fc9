"""What one optimizer step works on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfbyte.optim.sharding import local

Group = dict[str, Any]
State = dict[str, Any]
Members = tuple[list[Tensor], list[Tensor], list[State], list[Tensor]]
"""Parameters, their gradients and states, and step counts: one for all or one each."""


@dataclass(frozen=True)
class Moment:
    """One moment of a rule: the state's key prefix (torch.optim's name of it) and which map codes it."""

    name: str
    signed: bool

    @property
    def codes(self) -> str:
        """State key of the codes; interned, as literals are: dictionaries find the same string faster than an equal one."""
        return sys.intern(f"{self.name}_codes")

    @property
    def scales(self) -> str:
        """State key of the scales."""
        return sys.intern(f"{self.name}_scales")


@dataclass
class Work:
    """Parameters of one group on one device that are stepped together, as this rank's parts.

    Attributes:
        params: contiguous local parameters.
        grads: contiguous local gradients of the same shapes.
        states: the optimizer's state of each.
        steps: step counts, one shared by all or one each, already increased.
        offsets: index of each parameter's first element in the optimizer, or empty without stochastic rounding.
        grad_scale: GradScaler's scale on this device, or None.
        found_inf: GradScaler's flag on this device, or None.
        sharded: whether states hold DTensors.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]
    steps: list[Tensor]
    offsets: list[int]
    grad_scale: Tensor | None
    found_inf: Tensor | None
    sharded: bool = False

    def state(self, key: str) -> list[Tensor]:
        """This rank's part of one entry of every state."""
        values = [state[key] for state in self.states]
        return [local(value) for value in values] if self.sharded else values
