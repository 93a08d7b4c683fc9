"""Layers that stay in the checkpoint until they are first used."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.layout import Slot
from halfbyte.checkpoint.sources import CheckpointSource
from halfbyte.nn.linear import LoraBranch, QuantLinear

__all__ = ["DeferredLinear", "defer"]

_lock = threading.RLock()  # sources keep a scratch buffer, and two threads may want the same layer


class DeferredLinear(QuantLinear):
    """A `QuantLinear` whose rows are read (and quantized) when somebody wants them; it then is a plain one again.

    Forward, `.weight`, `state_dict()`, `.to()`, copying and pickling want them; counting parameters does not.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "_halfbyte_deferred" in self.__dict__:
            self.load_rows()
        return nn.Module.__getattr__(self, name)  # self may be of another class by now

    def load_rows(self) -> None:
        """Reads the rows now.

        Raises:
            QuantizationError: the checkpoint was changed, or is damaged.
        """
        with _lock:
            deferred = self.__dict__.get("_halfbyte_deferred")
            if deferred is None:
                return
            slot, source, device = deferred
            source.checkpoint.check_unchanged()
            rows = torch.empty(slot.entry.shape, dtype=torch.uint8)
            with torch.no_grad():
                source.fill(slot.entry, 0, slot.entry.rows, rows.view(-1))
            del self.__dict__["_halfbyte_deferred"]
            self._parameters["weight"] = nn.Parameter(rows.to(device), requires_grad=False)
            self.__class__ = QuantLinear  # type: ignore[assignment]

    def forward(self, input: Tensor, lora: LoraBranch | None = None) -> Tensor:
        """`QuantLinear.forward`, which looks for its rows where they are not yet."""
        self.load_rows()
        return QuantLinear.forward(self, input, lora)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.load_rows()
        QuantLinear._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.load_rows()
        QuantLinear._load_from_state_dict(self, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.load_rows()
        return QuantLinear._apply(self, fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.load_rows()
        return QuantLinear.__reduce_ex__(self, protocol)


def defer(slots: Sequence[Slot], source: CheckpointSource) -> list[Slot]:
    """Leaves the packed linear layers among `slots` in the source; returns the others, which must be filled now."""
    rest = []
    for slot in slots:
        module, attribute = slot.owners[0]
        if type(module) is not QuantLinear or attribute != "weight" or len(slot.owners) > 1:
            rest.append(slot)
            continue
        device = slot.tensor.device
        empty = torch.empty(slot.entry.shape, dtype=torch.uint8, device="meta")
        module._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        module.__dict__["_halfbyte_deferred"] = (slot, source, device)
        module.__class__ = DeferredLinear
    return rest
