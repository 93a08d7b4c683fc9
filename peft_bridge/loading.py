"""load_model: a packed model, with adapters if asked, from a path in one call."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.distributed.replicate import replicate
from halfbyte.formats import Format
from peft_bridge.bitsandbytes import BITSANDBYTES, config_of, method_of
from peft_bridge.config import HUB_ARGUMENTS, METHOD, HalfbyteConfig


def load_model(
    path_or_id: Any,
    format: str | Format | None = None,
    *,
    lora: Any = None,
    process_group: Any = None,
    source_rank: int = 0,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Loads a checkpoint packed, into the class that its config.json names, and puts LoRA adapters on it.

    Args:
        path_or_id: what `from_pretrained` takes: a folder or a model id; one saved by bitsandbytes too, whose weights are
            carried over exactly.
        format: a `halfbyte.Format` or its name; None: the checkpoint's own, else nf4.
        lora: a `peft.LoraConfig`, or its arguments as a dict (`target_modules` is "all-linear" unless given);
            None: no adapters.
        process_group: of several ranks, all of which call this: one reads and quantizes, the others receive the model
            (`halfbyte.distributed.replicate`). None: the default group if torch.distributed is initialized.
        source_rank: rank within the group that reads.
        **from_pretrained_kwargs: handed to `from_pretrained`; `quantization_config=HalfbyteConfig(...)` instead of `format`
            if more than the format is to be said.

    Returns:
        The model, or the `PeftModel` around it.

    Raises:
        TypeError: `format` and `quantization_config` are both given.
        ValueError: unknown format, or another one than the checkpoint was saved with.
        QuantizationError: nothing could be packed, or a packed checkpoint is damaged.
        RuntimeError: another rank failed or is gone.
    """

    def load() -> Any:
        return _load(path_or_id, format, lora, from_pretrained_kwargs)

    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return load()
    return replicate(load, process_group=process_group, source_rank=source_rank, what="load_model")


def _load(path_or_id: Any, format: str | Format | None, lora: Any, from_pretrained_kwargs: dict[str, Any]) -> Any:
    if format is not None and "quantization_config" in from_pretrained_kwargs:
        raise TypeError("load_model: give format or quantization_config, not both")
    names = (*HUB_ARGUMENTS, "trust_remote_code")
    hub = {name: from_pretrained_kwargs[name] for name in names if name in from_pretrained_kwargs}
    config = from_pretrained_kwargs.pop("config", None) or AutoConfig.from_pretrained(path_or_id, **hub)
    quantization: Any = from_pretrained_kwargs.pop("quantization_config", None)
    own = getattr(config, "quantization_config", None)
    method = None if own is None else method_of(own)
    if quantization is None and (own is None or (format is not None and method in (METHOD, BITSANDBYTES))):
        quantization = HalfbyteConfig(format or "nf4")
    elif quantization is None and method == BITSANDBYTES:
        quantization = config_of(own)
    elif own is not None and format is not None:
        raise ValueError(f"load_model: the checkpoint is quantized by {method} already, format can't be given")
    architectures = list(config.architectures or ()) or [""]
    loader = getattr(transformers, architectures[0], AutoModelForCausalLM)
    if quantization is not None:
        from_pretrained_kwargs["quantization_config"] = quantization
    model = loader.from_pretrained(path_or_id, config=config, **from_pretrained_kwargs)
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    if isinstance(lora, dict):
        lora = LoraConfig(**{"target_modules": "all-linear", **lora})
    return get_peft_model(model, lora)
