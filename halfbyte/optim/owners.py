"""A second owner of each state tensor, so that ops borrow it without asking Python's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

MOST_BYTES = 256 << 20
"""Largest state with second owners: what is taken out of `Optimizer.state` by hand stays in memory until the next step."""


class SecondOwners:
    """Views of an optimizer's state tensors. Nobody reads them: they are there because a view owns its base, in LibTorch.

    A tensor that only Python owns changes owners whenever an op borrows it and gives it back, which takes and releases the
    interpreter's lock. Small tensors pay more for that than for their update. No result depends on the views.

    Gradients have a second owner, their parameter. Parameters get none here: their hooks may refer to the optimizer, and a
    cycle of references that goes through LibTorch is never collected.
    """

    def __init__(self) -> None:
        self._views: list[Tensor] = []
        self._seen: tuple[Any, ...] = ()

    def drop(self) -> None:
        """Forgets every tensor; called where state is replaced."""
        self._views, self._seen = [], ()

    def follow(self, state: dict[Any, Any]) -> None:
        """Makes the views anew if the number of states, or the first state's last tensor or its memory, has changed.

        Args:
            state: the optimizer's.
        """
        if torch.compiler.is_compiling():
            return
        first = next(iter(state.values()), None)
        last = next(reversed(first.values()), None) if isinstance(first, dict) else None
        if type(last) is not Tensor:
            self.drop()
            return
        seen = (len(state), id(last), last.data_ptr())
        if seen == self._seen or is_in_torch_dispatch_mode():
            return
        entries = [entry for entry in state.values() if isinstance(entry, dict)]
        tensors = [t for entry in entries for t in entry.values() if type(t) is Tensor]
        fits = sum(t.numel() * t.element_size() for t in tensors) <= MOST_BYTES
        self._views, self._seen = [t.view_as(t) for t in tensors] if fits else [], seen
