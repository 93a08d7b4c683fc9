"""Resuming: the layers must be packed before the checkpoint's rows arrive, and be the ones the checkpoint has packed.

SingleDevice and DDP load checkpoint weights before they call `convert_module`, and no other hook of a precision plugin
runs in between. So the one public method through which the Trainer loads weights, `Strategy.load_model_state_dict`, is
wrapped once a HalfbytePrecision exists; for strategies without one it does what it did.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.errors import QuantizationError
from halfbyte.nn.packed import PackedRows
from lightning_plugin.distribution import Strategy

__all__ = ["Layout", "convert_before_loading", "layout_of", "packed_formats"]


@dataclass(frozen=True)
class Layout:
    """Where a model and a state dict disagree about what is packed.

    Attributes:
        packed_in_checkpoint: names of layers that are dense in the model and packed in the state dict.
        dense_in_checkpoint: names of layers that are packed in the model and dense in the state dict.
    """

    packed_in_checkpoint: tuple[str, ...]
    dense_in_checkpoint: tuple[str, ...]


def layout_of(module: nn.Module, state_dict: Mapping[str, Any]) -> Layout:
    """Compares the layers of `module` with the weights of the same names in `state_dict`."""
    packed, dense = [], []
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Linear, nn.Embedding, PackedRows)):
            continue
        value = state_dict.get(f"{name}.weight" if name else "weight")
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype == torch.uint8 and not isinstance(layer, PackedRows):
            packed.append(name)
        elif value.dtype != torch.uint8 and isinstance(layer, PackedRows):
            dense.append(name)
    return Layout(tuple(packed), tuple(dense))


def packed_formats(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Format of every packed layer of a state dict, by the layer's name, from the metadata that travels with it."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    return {
        name: entry["format"]
        for name, entry in metadata.items()
        if "format" in entry and f"{name}.weight".lstrip(".") in state_dict
    }


def convert_before_loading() -> None:
    """Makes every strategy whose precision plugin is ours convert the module before it loads weights into it."""
    original = Strategy.load_model_state_dict
    if getattr(original, "_halfbyte", False):
        return

    @functools.wraps(original)
    def load_model_state_dict(self: Strategy, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        from lightning_plugin.precision import HalfbytePrecision

        plugin, module = self.precision_plugin, self.lightning_module
        if isinstance(plugin, HalfbytePrecision) and module is not None:
            plugin.convert_module(module)
            _refuse_other_layout(module, checkpoint["state_dict"])
        original(self, checkpoint, *args, **kwargs)

    load_model_state_dict._halfbyte = True  # type: ignore[attr-defined]
    Strategy.load_model_state_dict = load_model_state_dict  # type: ignore[method-assign]


def _refuse_other_layout(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    if not any(isinstance(value, torch.Tensor) and value.dtype == torch.uint8 for value in state_dict.values()):
        return  # a dense checkpoint: its weights are quantized while they are loaded
    layout = layout_of(module, state_dict)
    names = (*layout.packed_in_checkpoint, *layout.dense_in_checkpoint)
    if names:
        raise QuantizationError(
            f"resume: the checkpoint and the model disagree about what is packed: packed in the checkpoint but dense in "
            f"the model: {', '.join(layout.packed_in_checkpoint[:5]) or 'none'}; dense in the checkpoint but packed in the "
            f"model: {', '.join(layout.dense_in_checkpoint[:5]) or 'none'}. Resume with the skip= it was made with.",
            names=names,
        )
