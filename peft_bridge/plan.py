"""Which layers of a transformers model get packed, decided on the meta model before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from halfbyte.formats import Format
from halfbyte.nn.embedding import quantize_embedding_
from halfbyte.nn.experts import expert_weights, quantize_experts_
from halfbyte.nn.linear import quantize_linear_
from halfbyte.nn.linear_classes import is_linear, linear_shape
from halfbyte.nn.packed import Packed, as_dtype
from halfbyte.nn.skip import SkipRules
from peft_bridge.config import HalfbyteConfig


@dataclass
class Plan:
    """What a load is to produce.

    Attributes:
        formats: for each dense linear layer, `nn.Embedding` or mixture of experts that is to be packed, by module name.
        reasons: for each that is to stay dense, by module name.
    """

    formats: dict[str, Format] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def plan_layers(model: PreTrainedModel, config: HalfbyteConfig) -> Plan:
    """Applies halfbyte's own rules and, with `skip=None`, what transformers leaves alone by default."""
    plan = Plan()
    own = SkipRules(config.skip).of_model(model)
    ties = model.all_tied_weights_keys or {}
    tied = {key.rpartition(".")[0] for pair in ties.items() for key in pair}
    defaults = set(get_keys_to_not_convert(model)) if config.skip is None else set()
    table_format = None if config.embedding_format is None else Format.parse(config.embedding_format)
    for name, module in model.named_modules():
        linear = linear_shape(module) is not None or bool(expert_weights(module))
        if not (linear or isinstance(module, nn.Embedding)) or isinstance(module, Packed):
            continue
        format = Format.parse(config.format) if linear else table_format
        reason = own.get(module)
        if name in tied:
            reason = reason or "tied to another module"
        if linear and name in defaults:
            reason = reason or "transformers leaves it alone (its last layer or output embedding)"
        if not linear and getattr(module, "max_norm", None) is not None:
            reason = reason or "max_norm rewrites its rows during forward"
        if reason is None and format is not None:
            plan.formats[name] = format
        elif reason is not None and format is not None:
            plan.reasons[name] = reason
    return plan


def pack_module_(module: nn.Module, format: Format, compute_dtype: str | None) -> None:
    """Turns a dense module into its packed class where it stands; on meta only shapes change."""
    dtype = as_dtype("compute_dtype", compute_dtype)
    if expert_weights(module):
        quantize_experts_(module, format, dtype)
    elif linear_shape(module):
        quantize_linear_(module, format, dtype)
    else:
        assert isinstance(module, nn.Embedding)
        quantize_embedding_(module, format, None)  # it computes nothing


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights that a checkpoint may hold packed; a subclass of a layer has a forward of its own."""
    if type(module) is nn.Embedding or is_linear(module):
        return ("weight",)
    return expert_weights(module)


def describe_modules(packed: Iterable[str], dense: Iterable[str]) -> list[str]:
    """Names of the packed modules for config.json: with "*" for numbers (7 entries for any Llama) where none is dense.

    Example:
        >>> describe_modules(["layers.0.up", "layers.1.up", "layers.0.down"], dense=["layers.1.down"])
        ['layers.*.up', 'layers.0.down']
    """
    mixed = {_globbed(name) for name in dense}
    return list(dict.fromkeys(name if _globbed(name) in mixed else _globbed(name) for name in packed))


def is_described(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module is among `describe_modules`, with or without a prefix: "model." comes and goes with the head.

    Example:
        >>> is_described("layers.3.mlp.up", ["model.layers.*.mlp.up"])
        True
    """
    return any(
        f".{long}".endswith(f".{short}")
        for pattern in patterns
        for spelling in (name, _globbed(name))
        for long, short in ((pattern, spelling), (spelling, pattern))
    )


def _globbed(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
