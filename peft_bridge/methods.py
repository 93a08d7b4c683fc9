"""Which PEFT methods packed layers take: those that would read or write bytes as if they were weights say no, by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers
from torch import nn

from halfbyte.nn.embedding import QuantEmbedding
from halfbyte.nn.experts import QuantExperts
from halfbyte.nn.linear import QuantLinear
from halfbyte.nn.packed import Packed

SUPPORTED = "LoRA (rsLoRA, DoRA, PiSSA, OLoRA, LoftQ too), BOFT, OFT, MiSS, SHiRA, VeRA, prompts, any method on dense layers"


HAS_BACKENDS = importlib.util.find_spec("peft.utils.quantization_utils") is not None
"""Whether this PEFT has quantization backends, which older ones lack: methods that need one are refused by name then."""


def backend() -> Any:
    """`peft_bridge.backend`, which can be imported with such a PEFT only."""
    return importlib.import_module("peft_bridge.backend")


class _Originals:
    inject: Any = None  # PEFT's own BaseTuner.inject_adapter, while ours stands in its place


def refuse_unsupported() -> None:
    """Makes PEFT check what it is about to do with packed rows; `accept_unsupported` undoes it.

    `BaseTuner.inject_adapter` is where every method adds its layers.
    """
    if _Originals.inject is None:
        _Originals.inject = BaseTuner.inject_adapter
        BaseTuner.inject_adapter = _checked(BaseTuner.inject_adapter)  # type: ignore[method-assign]
        if HAS_BACKENDS:
            backend().install()


def accept_unsupported() -> None:
    """The inverse of `refuse_unsupported`."""
    if _Originals.inject is not None:
        BaseTuner.inject_adapter = _Originals.inject  # type: ignore[method-assign]
        if HAS_BACKENDS:
            backend().uninstall()
        _Originals.inject = None


def _checked(original: Any) -> Any:
    @functools.wraps(original)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        if getattr(config, "target_modules", None) == "all-linear" and _has_experts(model):
            # PEFT would add the experts' fused parameters to "all-linear"; packed, they are trained around.
            _maybe_include_all_linear_layers(config, model)
        _check_copies(config, model)
        create = self._create_and_replace

        # Every method has its own; it is called for each target, before anything is changed there.
        def create_and_replace(config: Any, adapter: str, target: nn.Module, *rest: Any, **named: Any) -> Any:
            _check_target(self, config, target, named.get("current_key", ""))
            return create(config, adapter, target, *rest, **named)

        self.__dict__["_create_and_replace"] = create_and_replace
        try:
            original(self, model, adapter_name, *args, **kwargs)
        finally:
            del self.__dict__["_create_and_replace"]

    return inject_adapter


def _has_experts(model: nn.Module) -> bool:
    return any(isinstance(module, QuantExperts) for module in model.modules())


def _check_target(tuner: BaseTuner, config: Any, target: nn.Module, name: str) -> None:
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if not isinstance(base, Packed):
        return
    # AdaLoRA is a LoraModel too, with layers of its own.
    lora = getattr(type(tuner), "_create_new_module", None) is LoraModel._create_new_module
    custom = tuple(getattr(config, "_custom_modules", None) or ())
    if HAS_BACKENDS and isinstance(base, QuantLinear) and type(tuner).__module__ in backend().TUNERS:
        return
    if lora and isinstance(base, (QuantLinear, *custom)):
        return
    method = getattr(config.peft_type, "value", config.peft_type)
    hint = "; 'all-linear' took in experts: name other target_modules" if isinstance(base, QuantExperts) else ""
    raise NotImplementedError(
        f"PEFT's {method} is not supported on packed rows: {name or 'its target'} is a {type(base).__name__} in "
        f"{base.format}, whose bytes it would take for values. Supported: {SUPPORTED} (skip=... keeps some dense{hint})"
    )


def _check_copies(config: Any, model: nn.Module) -> None:
    """`modules_to_save` trains copies of modules and `target_parameters` sums with a parameter: neither works on rows."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
    for wanted in getattr(config, "modules_to_save", None) or ():
        for name, module in packed.items():
            if f".{wanted}." in f".{name}.":  # itself, or what it is a part of
                raise NotImplementedError(
                    f"modules_to_save={wanted!r}: {name} is packed ({module.format}) and packed rows are frozen; load the "
                    f"model with skip=({wanted!r}, ...) to keep it dense, or put LoRA on it"
                )
    tokens = getattr(config, "trainable_token_indices", None)
    if tokens:
        for name, module in packed.items():
            listed = not isinstance(tokens, dict) or any(f".{name}".endswith(f".{key}") for key in tokens)
            if isinstance(module, QuantEmbedding) and listed:
                raise NotImplementedError(
                    f"trainable_token_indices: {name} is packed ({module.format}); load without embedding_format"
                )
    for wanted in getattr(config, "target_parameters", None) or ():
        for name, module in packed.items():
            if any(f".{name}.{own}".endswith(f".{wanted}") for own, _ in module.named_parameters(recurse=False)):
                raise NotImplementedError(
                    f"target_parameters={wanted!r}: {name} is packed ({module.format}), and PEFT would add to its bytes; "
                    f"adapt other layers around it, or keep it dense with skip"
                )
