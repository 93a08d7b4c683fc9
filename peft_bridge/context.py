"""What an `init_quantized` context does to transformers: `from_pretrained` inside it quantizes what it reads."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from halfbyte.distributed.replicate import replicate
from halfbyte.nn.packed import Packed
from halfbyte.nn.settings import InitSettings, active_settings, paused
from peft_bridge.bitsandbytes import BITSANDBYTES, config_of, method_of
from peft_bridge.config import HalfbyteConfig
from peft_bridge.patch import WhileActive

# What decides which config.json is read.
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def quantize_from_pretrained(settings: InitSettings) -> AbstractContextManager[None]:
    """Registered with the core; entered by every context. Wraps one classmethod, to which all Auto classes come."""
    return _FROM_PRETRAINED.entered()


def _wrapped(method: Any) -> Any:
    original = method.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        settings = active_settings()  # of this thread: the wrapper itself is process-wide
        if settings is None:
            return original(cls, path, *args, config=config, **kwargs)
        own = _its_own(path, config, kwargs) if kwargs.get("quantization_config") is None else None
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
            if settings.one_reader and own is None and dist.is_available() and dist.is_initialized():
                result = replicate(read, what=f"{cls.__name__}.from_pretrained")
            else:
                result = read()
        model = result[0] if isinstance(result, tuple) else result
        settings.built += sum(isinstance(module, Packed) for module in model.modules())
        return result

    return classmethod(from_pretrained)  # type: ignore[arg-type]


_FROM_PRETRAINED = WhileActive(_wrapped, [(PreTrainedModel, "from_pretrained")])


def _its_own(path: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    """The quantization that the checkpoint's config names, of whatever method: it then rules; None if there is none."""
    if isinstance(config, PreTrainedConfig):
        text = config.get_text_config(decoder=True)
        found = (getattr(each, "quantization_config", None) for each in (config, text))
        return next((each for each in found if each is not None), None)
    source = config if isinstance(config, (str, os.PathLike)) else path
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    try:
        contents, _ = PreTrainedConfig.get_config_dict(source, **hub)
    except OSError:  # a folder with an adapter only: transformers goes on to its base model
        return None
    return contents.get("quantization_config")
