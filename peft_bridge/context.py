"""What an `init_quantized` context does to transformers: `from_pretrained` inside it quantizes what it reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from halfbyte.nn.experts import QuantExperts
from halfbyte.nn.packed import Packed
from halfbyte.nn.settings import InitSettings, active_settings, paused
from peft_bridge.bitsandbytes import BITSANDBYTES, config_of, method_of
from peft_bridge.config import HalfbyteConfig, own_quantization
from peft_bridge.one_reader import read_once
from peft_bridge.patch import WhileActive


@contextmanager
def quantize_from_pretrained(settings: InitSettings) -> Iterator[None]:
    """Registered with the core; entered by every context. Wraps one classmethod, to which all Auto classes come.

    And, for models that are built from a config, the method that initializes one of their modules.
    """
    with _FROM_PRETRAINED.entered(), _INITIALIZE.entered():
        yield


def _wrapped(method: Any) -> Any:
    original = method.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        settings = active_settings()  # of this thread: the wrapper itself is process-wide
        if settings is None:
            return original(cls, path, *args, config=config, **kwargs)
        own = own_quantization(path, config, kwargs) if kwargs.get("quantization_config") is None else None
        if own is not None and method_of(own) == BITSANDBYTES:
            kwargs["quantization_config"] = config_of(own)
            kwargs["quantization_config"].compute_dtype = HalfbyteConfig(compute_dtype=settings.compute_dtype).compute_dtype
        elif kwargs.get("quantization_config") is None and own is None:
            if kwargs.get("gguf_file") is not None:
                raise NotImplementedError(
                    "init_quantized: from_pretrained can't pack while it reads a GGUF file (transformers refuses); load it "
                    "outside the context with GgufConfig(dequantize=True) and save_pretrained it, or call quantize_model"
                )
            kwargs["quantization_config"] = HalfbyteConfig(
                settings.format, skip=settings.skip, compute_dtype=settings.compute_dtype
            )

        def read() -> Any:
            return original(cls, path, *args, config=config, **kwargs)

        with paused():
            # Rows that are packed already are mapped from the file, which costs no rank any memory of its own.
            if settings.one_reader and own is None:
                name = cls.__name__
                result = read_once(read, what=f"{name}.from_pretrained", asked=f"{name} in {settings.format}")
            else:
                result = read()
        model = result[0] if isinstance(result, tuple) else result
        settings.built += sum(isinstance(module, Packed) for module in model.modules())
        return result

    return classmethod(from_pretrained)  # type: ignore[arg-type]


def _as_dense_class(original: Any) -> Any:
    """Models look for their experts by class to initialize them; values then go through the rows, as for any initializer."""

    @functools.wraps(original)
    def initialize_weights(self: PreTrainedModel, module: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, QuantExperts):
            dense = module.dense_class.__new__(module.dense_class)
            dense.__dict__ = module.__dict__  # shared: the same parameters, the same marks
            module = dense
        original(self, module, *args, **kwargs)

    return initialize_weights


_FROM_PRETRAINED = WhileActive(_wrapped, [(PreTrainedModel, "from_pretrained")])
_INITIALIZE = WhileActive(_as_dense_class, [(PreTrainedModel, "_initialize_weights")])
