"""HalfbyteConfig: the quantization_config of a transformers model, in a call and in config.json."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers import auto
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.formats import Format
from halfbyte.nn.packed import as_dtype
from halfbyte.nn.skip import SkipRules

METHOD = "halfbyte"
"""What config.json calls the quantization method."""
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
"""Arguments of `from_pretrained` that decide which config.json is read."""


@register_quantization_config(METHOD)
class HalfbyteConfig(QuantizationConfigMixin):
    """Asks `from_pretrained` for packed weights: `from_pretrained(path, quantization_config=HalfbyteConfig("nf4"))`.

    A model that was saved packed needs no config on loading: its config.json holds this one.

    Args:
        format: a `halfbyte.Format` or its name, for the linear layers.
        skip: names that stay dense, as dotted runs ("lm_head", "layers.1"); None: the output embedding and what
            transformers itself leaves alone. Tied modules, `_keep_in_fp32_modules` and layers that the checkpoint does
            not contain (fresh heads) always stay dense.
        compute_dtype: dtype (or its name) that packed layers and the attention around them compute in; None: the dtype of
            their input. What they return has the dtype that the model was loaded in.
        embedding_format: a format for embedding tables that are not tied; None leaves them dense.
        one_reader: in a distributed run of accelerate's, every rank of which loads the model, one reads and quantizes a
            dense checkpoint and the others receive the result, as in `load_model(process_group=)`; not for a `device_map`
            over several devices. False: each reads for itself. It is not saved.
        **saved: what an earlier save added (`quant_method`, `modules`: the names of the packed modules, numbers as "*").

    Raises:
        ValueError: unknown format or compute dtype.
        TypeError: `skip` is a single string, or an argument is unknown.

    Example:
        >>> HalfbyteConfig("nf4:32", compute_dtype="bfloat16").format
        'nf4:32'
    """

    def __init__(
        self,
        format: str | Format = "nf4",
        *,
        skip: Iterable[str] | None = None,
        compute_dtype: torch.dtype | str | None = None,
        embedding_format: str | Format | None = None,
        one_reader: bool = True,
        **saved: Any,
    ) -> None:
        unknown = sorted(set(saved) - {"quant_method", "modules"})
        if unknown:
            raise TypeError(
                f"HalfbyteConfig: unknown argument {', '.join(unknown)}; it takes format, skip, compute_dtype, "
                f"embedding_format and one_reader (if this comes from a config.json, a newer halfbyte wrote it)"
            )
        # Attributes hold what JSON can: `to_dict` of transformers is a copy of them.
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format = str(Format.parse(format))
        self.skip = None if skip is None else list(SkipRules(skip).patterns)
        dtype = as_dtype("compute_dtype", compute_dtype)
        self.compute_dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        self.embedding_format = None if embedding_format is None else str(Format.parse(embedding_format))
        self.one_reader = bool(one_reader)
        self.modules: list[str] | None = saved.get("modules")

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: all but how this load was to read."""
        return {name: value for name, value in super().to_dict().items() if name != "one_reader"}

    def __eq__(self, other: object) -> bool:
        # The dataclass above compares its own fields only, and it has one.
        return isinstance(other, HalfbyteConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def get(self, name: str, default: Any = None) -> Any:
        """Called by transformers, which takes the quantization_config of a config object it is given for a dict."""
        return getattr(self, name, default)

    def get_loading_attributes(self) -> dict[str, Any]:
        """Called by transformers on the user's config when the checkpoint has one; the result is set on the checkpoint's.

        It would otherwise drop the user's config with a warning; `resolved` checks it instead.
        """
        return {"requested": self}

    def resolved(self) -> HalfbyteConfig:
        """A copy of a checkpoint's config in which the user's wishes for this load, if any, are checked and applied.

        Raises:
            ValueError: the user asked for another format, embedding format or other skipped layers than were saved.
        """
        config = copy.copy(self)
        requested: HalfbyteConfig | None = config.__dict__.pop("requested", None)
        if requested is None:
            return config
        wrong = [f"format={self.format!r}, got {requested.format!r}"] if requested.format != self.format else []
        for name in ("skip", "embedding_format"):
            wish, saved = getattr(requested, name), getattr(self, name)
            if wish is not None and wish != saved:
                wrong.append(f"{name}={saved!r}, got {wish!r}")
        if wrong:
            raise ValueError(
                f"HalfbyteConfig contradicts the checkpoint, which was saved with {'; '.join(wrong)}: packed rows can't "
                f"change on loading; pass no quantization_config, or quantize the dense checkpoint anew"
            )
        config.compute_dtype = requested.compute_dtype or self.compute_dtype
        return config


def own_quantization(path: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    """The quantization that the checkpoint's config names, of whatever method: it then rules; None if there is none.

    Args:
        path: as for `from_pretrained`.
        config: the same.
        kwargs: its other arguments, of which some decide which config.json is read.
    """
    if isinstance(config, PreTrainedConfig):
        text = config.get_text_config(decoder=True)
        found = (getattr(each, "quantization_config", None) for each in (config, text))
        return next((each for each in found if each is not None), None)
    source = config if isinstance(config, (str, os.PathLike)) else path
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    try:
        contents, _ = PreTrainedConfig.get_config_dict(source, **hub)
    except OSError:  # a folder with an adapter only: transformers goes on to its base model
        return None
    return contents.get("quantization_config")


# `merge_quantization_configs` hands over loading attributes for these types only (pinned by a test).
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, HalfbyteConfig)  # type: ignore[assignment]
