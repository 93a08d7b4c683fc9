"""PEFT's quantization backend for packed layers: what BOFT, OFT, MiSS, SHiRA and VeRA read and write weights through."""

from __future__ import annotations

import functools
from typing import Any

from peft.tuners import boft, miss, oft, shira, vera
from peft.utils import quantization_utils
from peft.utils.quantization_utils import QuantizationBackend
from torch import Tensor, nn

from halfbyte.nn.linear import QuantLinear

_METHODS: tuple[Any, ...] = tuple(
    method for method in (boft, miss, oft, shira, vera) if hasattr(method.layer, "resolve_quantization_backend")
)
TUNERS = frozenset(f"{method.__name__}.model" for method in _METHODS)
"""The modules of the tuners whose layers ask for a backend."""


class HalfbyteBackend(QuantizationBackend):
    """What PEFT's BOFT, OFT, MiSS, SHiRA and VeRA ask for a dense weight, and give a merged one to.

    Merging rounds to the format, once more with `unmerge`, as for PEFT's other backends; LoRA layers do both exactly.
    """

    supports_merge = True
    backend_name = "halfbyte"
    layer_type = "linear"

    def get_base_weight(self, base_layer: Any) -> Tensor:
        """The dense weight of a packed layer, shape (N, K), in the dtype it was built with."""
        weight: Tensor = base_layer.dequantize(base_layer.dense_dtype)
        return weight

    def set_base_weight(self, peft_layer: Any, weight_data: Tensor) -> None:
        """Packs `weight_data`, shape (N, K) of any float dtype, into the base of `peft_layer`."""
        peft_layer.get_base_layer().quantize_(weight_data.detach())


def install() -> None:
    """Lets the layers of these methods, which have imported the function by name, resolve packed layers to our backend."""
    for method in _METHODS:
        method.layer.resolve_quantization_backend = _resolving(quantization_utils.resolve_quantization_backend)


def uninstall() -> None:
    """Gives the layers PEFT's own function back."""
    for method in _METHODS:
        method.layer.resolve_quantization_backend = quantization_utils.resolve_quantization_backend


def _resolving(original: Any) -> Any:
    @functools.wraps(original)
    def resolve_quantization_backend(base_layer: nn.Module, **kwargs: Any) -> Any:
        return HalfbyteBackend() if isinstance(base_layer, QuantLinear) else original(base_layer, **kwargs)

    return resolve_quantization_backend
