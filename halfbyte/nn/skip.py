"""Which layers stay dense, and why: the one set of rules for every way of quantizing a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from halfbyte.nn.experts import expert_weights
from halfbyte.nn.linear_classes import is_linear, linear_shape
from halfbyte.nn.weight_readers import weights_read_by
from halfbyte.ops.quantize import FLOAT_DTYPES

DEFAULT_SKIP = ("lm_head", "score", "classifier", "embed_out")
"""Names of output embeddings: one wrong logit costs more than the bytes save."""


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` is a contiguous run of the dotted components of `name`.

    Example:
        >>> matches("lm_head", "model.lm_head"), matches("layers.1", "model.layers.1.mlp"), matches("layers.1", "layers.10")
        (True, True, False)
    """
    return f".{pattern}." in f".{name}."


class SkipRules:
    """Decides for a name, or for a whole model, what stays dense.

    Args:
        skip: None for the defaults (output embeddings); a tuple of patterns replaces them, `()` skips nothing by name.

    Raises:
        TypeError: `skip` is a single string, or holds something else than strings.
    """

    def __init__(self, skip: Iterable[str] | None = None) -> None:
        if isinstance(skip, str):
            raise TypeError(f"skip must be a tuple of patterns, got the single string {skip!r}; write ({skip!r},)")
        self.by_default = skip is None
        self.patterns = DEFAULT_SKIP if skip is None else tuple(skip)
        for pattern in self.patterns:
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"skip must hold non-empty strings, got {pattern!r}")

    def by_name(self, name: str) -> str | None:
        """Why the module of this (possibly partial) dotted name stays dense, or None."""
        for pattern in self.patterns:
            if matches(pattern, name):
                return f"skip={pattern!r}" if not self.by_default else f"output embedding ({pattern})"
        return None

    @staticmethod
    def by_owner(parent: nn.Module, name: str) -> str | None:
        """Why a child that `parent` registers under `name` stays dense, or None."""
        if name in weights_read_by(type(parent)):
            return f"{type(parent).__name__} reads its weight directly"
        for pattern in _kept_in_float32(parent):
            if matches(pattern, name):
                return f"{type(parent).__name__} keeps it in float32 ({pattern})"
        return None

    def of_model(self, model: nn.Module) -> dict[nn.Module, str]:
        """Every linear or embedding of `model` that must stay dense, with the reason."""
        reasons: dict[nn.Module, str] = {}
        owners: dict[int, list[nn.Module]] = {}
        layers: dict[str, Any] = {
            n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) or linear_shape(m)
        }
        for name, module in layers.items():
            owners.setdefault(id(module.weight), []).append(module)
            reason = self.by_name(name) if linear_shape(module) else None
            if type(module) is not nn.Embedding and not is_linear(module):
                reason = reason or f"{type(module).__name__} is a subclass with a forward of its own"
            elif module.weight.dtype not in FLOAT_DTYPES:
                reason = reason or f"dtype {module.weight.dtype} has no packed form"
            if reason:
                reasons[module] = reason
        for name, module in model.named_modules():
            if expert_weights(module) and (named := self.by_name(name)):
                reasons[module] = named
        for path, parent in model.named_modules():
            if not (weights_read_by(type(parent)) or _kept_in_float32(parent)):
                continue
            prefix = f"{path}." if path else ""
            for name, module in layers.items():
                owned = self.by_owner(parent, name[len(prefix) :]) if name.startswith(prefix) else None
                if owned:
                    reasons.setdefault(module, owned)
        for shared in owners.values():
            if len(shared) > 1:
                reasons.update({module: "tied to another module" for module in shared if module not in reasons})
        for part in model.modules():
            for child in getattr(part, "adapter_layer_names", None) or ():  # PEFT's layers name what they train
                adapter = getattr(part, child, None)
                inside = set(adapter.modules()) if isinstance(adapter, nn.Module) else set()
                reasons.update((layer, f"adapter ({child})") for layer in layers.values() if layer in inside)
        if self.by_default:
            for part in model.modules():  # the model may be a part of a LightningModule
                if (output := output_embedding(part)) is not None:
                    reasons.setdefault(output, "output embedding (named by the model)")
        return reasons


def _kept_in_float32(parent: nn.Module) -> list[str]:
    """Patterns of layers that transformers keeps in float32: from float16 only, or (strict) from bfloat16 as well."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return sorted({pattern for name in names for pattern in getattr(parent, name, None) or ()})


def output_embedding(model: nn.Module) -> nn.Module | None:
    """What the model itself names as its output embedding (transformers' `get_output_embeddings`), or None."""
    getter = getattr(model, "get_output_embeddings", None)
    if not callable(getter):
        return None
    try:
        found = getter()
    except (AttributeError, NotImplementedError):  # a wrapper around a model without one
        return None
    return found if isinstance(found, nn.Module) else None


def tell_config(module: nn.Module) -> None:
    """Records in the module's transformers config that its layers are packed.

    Attention layers of transformers otherwise take the dtype of the first `nn.Linear`'s weight for the model's and cast
    float32 queries to it, uint8 here. The mark is transformers' own and is not saved.
    """
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "dtype"):
        config._is_quantized = True


def mark_dense(module: nn.Module, reason: str) -> None:
    """Records on the module why it stays dense; `halfbyte.report` shows it and `halfbyte.verify` accepts it."""
    module._halfbyte_dense = reason  # type: ignore[assignment]


def dense_reason(module: nn.Module) -> str | None:
    """What `mark_dense` recorded, or None."""
    return module.__dict__.get("_halfbyte_dense")
