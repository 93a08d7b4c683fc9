"""bitsandbytes checkpoints in transformers: loaded as packed models, and written for bitsandbytes to load.

Reading starts wherever halfbyte was asked for: `load_model`, an `init_quantized` context or an explicit `HalfbyteConfig`.
Without such a request transformers' own bitsandbytes path runs as it always did.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from halfbyte.checkpoint.bitsandbytes import KEYS, StoredLayer, export_state_dict, read_layer
from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.linear import QuantLinear
from halfbyte.nn.linear_classes import linear_shape, linear_weight
from halfbyte.nn.packed import Packed
from halfbyte.ops.dequantize import dequantize
from peft_bridge.config import HalfbyteConfig

BITSANDBYTES = "bitsandbytes"
"""What config.json calls the method of bitsandbytes checkpoints."""


def method_of(quantization: Any) -> Any:
    """The `quant_method` of a quantization config, which may be an object or what config.json holds."""
    found = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return getattr(found, "value", found)


def config_of(quantization: Any) -> HalfbyteConfig:
    """The `HalfbyteConfig` of a bitsandbytes checkpoint; the block size is known once a layer has been read.

    Layers that the checkpoint holds dense stay dense whatever their names. `bnb_4bit_compute_dtype` is not taken over:
    bitsandbytes casts back to the dtype of the input, packed layers compute in it.
    """
    saved = quantization if isinstance(quantization, dict) else quantization.to_dict()
    config = HalfbyteConfig("int8" if saved.get("load_in_8bit") else saved.get("bnb_4bit_quant_type", "fp4"))
    config.__dict__["bitsandbytes"] = True  # taken off by the quantizer: it is no part of what is saved
    return config


def _accepting_packed(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def merge_quantization_configs(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        requested = quantization_config_from_args
        if not isinstance(requested, HalfbyteConfig) or method_of(quantization_config) != BITSANDBYTES:
            return original.__func__(cls, quantization_config, requested)
        config = config_of(quantization_config)
        if "bitsandbytes" not in requested.__dict__:
            config.__dict__["wanted"] = requested.format
        requested = copy.copy(requested)
        requested.format = config.format  # compared layer by layer, block size included
        config.__dict__["requested"] = requested
        return config

    return classmethod(merge_quantization_configs)


# transformers refuses a config of another class than the checkpoint's; for ours over bitsandbytes' it now says what to
# read it with. Every other pair goes to the original (pinned by a test).
AutoHfQuantizer.merge_quantization_configs = _accepting_packed(  # type: ignore[method-assign]
    AutoHfQuantizer.__dict__["merge_quantization_configs"]
)


class ReadBitsandbytes(ConversionOps):
    """Makes packed rows of the tensors that transformers' loader has collected for one weight.

    Args:
        wanted: the format that the user asked for, or None.

    Attributes:
        formats: of each layer that arrived packed.
        reasons: why a layer that the checkpoint holds quantized became dense.
        problems: what is wrong with a layer; the loader would bury an exception, so the quantizer raises them at the end.
        dense: reasons for which layers can't be packed whatever the checkpoint holds.
    """

    hf_quantizer = True  # transformers then leaves the tensors in the dtypes of the file

    def __init__(self, wanted: str | None) -> None:
        self.wanted = None if wanted is None else Format.parse(wanted)
        self.formats: dict[str, Format] = {}
        self.reasons: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.dense: dict[str, str] = {}

    def __deepcopy__(self, memo: Any) -> ReadBitsandbytes:
        """The loader copies its converters per weight; what was found belongs to the load."""
        return self

    @property
    def source_patterns(self) -> list[str]:
        """Names after the layer's, of which the loader collects the tensors."""
        return list(KEYS)

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: PreTrainedModel, full_layer_name: str, **_: Any
    ) -> dict[str, Tensor]:
        """Called by the loader per weight, with its tensors by `KEYS`."""
        owner = full_layer_name.removesuffix(".weight")
        parameter = model.get_parameter_or_buffer(full_layer_name)
        tensors = {f"{owner}.{key}": value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        weight = tensors.get(f"{owner}.weight")
        module = model.get_submodule(owner) if owner != full_layer_name else None
        try:
            shape = None if module is None else linear_shape(module)
            if module is None or shape is None:
                if len(tensors) > 1 or weight is None:
                    kind = type(module).__name__
                    raise QuantizationError(f"{owner} is quantized in the checkpoint, but packed rows can't be in a {kind}")
                return {full_layer_name: _as_built(model, full_layer_name, parameter, weight)}
            # Dense as the module has it, which a Conv1D stores transposed: no layer of bitsandbytes.
            alone = weight if len(tensors) == 1 and weight is not None and weight.is_floating_point() else None
            dense = alone is not None and alone.shape == parameter.shape
            stored = None if dense else read_layer(tensors, owner, shape)
            value = weight if stored is None else self._placed(owner, module, stored)
        except QuantizationError as error:
            self.problems[owner] = str(error)
            return {}
        assert value is not None
        if value.dtype != torch.uint8:
            value = _as_built(model, full_layer_name, parameter, value)
        return {full_layer_name: value}

    def _placed(self, name: str, module: nn.Module, stored: StoredLayer) -> Tensor:
        """The rows if the module can hold them, else the dense weight, (N, K) float32."""
        if self.wanted is not None and stored.format not in (None, self.wanted):
            raise QuantizationError(
                f"{name} is {stored.format} in the bitsandbytes checkpoint, but format={str(self.wanted)!r} was asked for: "
                f"packed rows can't change on loading"
            )
        reason = stored.reason or self.dense.get(name)
        if reason is None:
            assert stored.format is not None
            self.formats[name] = stored.format
            return stored.weight
        self.reasons[name] = f"dequantized on loading: {reason}"
        dense = stored.weight
        if stored.format is not None:
            shape = linear_shape(module)
            assert shape is not None
            dense = dequantize(stored.weight, stored.format, shape[1], torch.float32)
        return linear_weight(module, dense)

    @property
    def reverse_op(self) -> ConversionOps:
        """Never asked for: the quantizer takes the converter off the model after the load."""
        raise NotImplementedError("packed rows are saved as they are; see export_bitsandbytes")


def _as_built(model: PreTrainedModel, name: str, parameter: Tensor, value: Tensor) -> Tensor:
    """Casts a dense tensor as the loader would have: to its parameter's dtype, or float32 if transformers keeps it so."""
    if not value.is_floating_point():
        return value
    for pattern, dtype in model._get_dtype_plan(parameter.dtype).items():
        if re.search(pattern.replace("*", ".*"), name):
            return value.to(dtype)
    return value.to(parameter.dtype)


class _Exported(HfQuantizer):
    """Hands `save_pretrained` the state dict that it is to write."""

    requires_calibration = False
    is_trainable = True

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._state = state

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        return self._state, {}

    def is_serializable(self) -> bool:
        return True


def export_bitsandbytes(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    quant_storage: torch.dtype = torch.uint8,
    **save_pretrained_kwargs: Any,
) -> None:
    """Saves a packed model as a folder that transformers loads with bitsandbytes, with the same codes and scales.

    A model that was loaded from an un-nested bitsandbytes folder is written back byte for byte. The model itself, and
    what `save_pretrained` makes of it, don't change.

    Args:
        model: a transformers model whose packed layers are all nf4 and fp4, or all int8.
        directory: where to save; made if it does not exist.
        quant_storage: dtype that the bytes of 4-bit codes are viewed as, such as bfloat16 for FSDP.
        **save_pretrained_kwargs: handed to `save_pretrained`, such as `max_shard_size`.

    Raises:
        TypeError: not a transformers model (merge adapters first).
        NotImplementedError: bitsandbytes has no form for a packed layer, or for the mixture.
        QuantizationError: no layer is packed.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        raise TypeError(
            f"export_bitsandbytes: model must be a transformers model without adapters, got {type(model).__name__}; "
            f"merge_and_unload() or unload() them first"
        )
    layers = {name: module for name, module in model.named_modules() if linear_shape(module)}
    packed = {name: module.format for name, module in layers.items() if isinstance(module, QuantLinear)}
    if not packed:
        raise QuantizationError("export_bitsandbytes: no layer is packed; save_pretrained saves a dense model")
    if len({format.bits for format in packed.values()}) > 1:
        raise NotImplementedError("export_bitsandbytes: bitsandbytes loads 4-bit or 8-bit layers, the model has both")
    state = export_state_dict(model, quant_storage=quant_storage)
    first = next(iter(packed.values()))
    # A pattern there matches all names that it begins: "mlp.gate" would take "mlp.gate_proj" along.
    dense = [
        f"{name}$" if any(other.startswith(name) for other in packed) else name
        for name, module in layers.items()
        if not isinstance(module, Packed)
    ]
    quantization = {
        "quant_method": BITSANDBYTES,
        "load_in_4bit": first.bits == 4,
        "load_in_8bit": first.bits == 8,
        "_load_in_4bit": first.bits == 4,
        "_load_in_8bit": first.bits == 8,
        "bnb_4bit_quant_type": first.name if first.bits == 4 else "fp4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": str(model.dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": str(quant_storage).removeprefix("torch."),
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": dense,  # none at all: an empty list, None would be their defaults
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }
    absent = object()
    owners: tuple[tuple[Any, str, Any], ...] = (
        (model, "hf_quantizer", _Exported(state)),
        (model.config, "quantization_config", quantization),
    )
    before = [owner.__dict__.get(name, absent) for owner, name, _ in owners]
    try:
        for owner, name, value in owners:
            setattr(owner, name, value)
        model.save_pretrained(directory, **save_pretrained_kwargs)
    finally:
        for (owner, name, _), value in zip(owners, before, strict=True):
            if value is absent:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
