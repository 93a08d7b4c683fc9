"""The transformers quantizer: packs weights while they stream in, and loads and saves packed checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.attention import adapt_attention
from halfbyte.nn.batches import dense_weights
from halfbyte.nn.convert import nothing_quantized
from halfbyte.nn.embedding import QuantEmbedding, dequantize_embedding_
from halfbyte.nn.experts import (
    QuantExperts,
    dequantize_experts_,
    expert_shape,
    expert_weights,
    pack_experts,
    quantize_experts_,
)
from halfbyte.nn.linear import QuantLinear, dequantize_linear_
from halfbyte.nn.linear_classes import is_conv1d, linear_shape, linear_weight
from halfbyte.nn.packed import Packed, PackedRows, as_dtype
from halfbyte.nn.skip import mark_dense
from halfbyte.ops.quantize import quantize
from peft_bridge.bitsandbytes import ReadBitsandbytes
from peft_bridge.config import METHOD, HalfbyteConfig
from peft_bridge.originals import record_originals
from peft_bridge.plan import Plan, describe_modules, is_described, pack_module_, plan_layers, weights_of

FRESH = "not in the checkpoint: newly initialized"
"""Why a fresh head is dense."""


class QuantizeOnLoad(ConversionOps):
    """Packs the tensors of one checkpoint key; its result is assigned by transformers' loader."""

    def __init__(self, quantizer: HalfbyteQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: PreTrainedModel, **_: Any
    ) -> dict[str, Tensor]:
        """Called by the loader with full names, after renames and merges; a name that isn't planned passes through."""
        values = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: self.hf_quantizer.pack(model, name, value) for name, value in values.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving asks for it: packed rows are saved as they are."""
        return _AsSaved()


class _AsSaved(ConversionOps):
    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:  # type: ignore[override]
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return _AsSaved()


@register_quantizer(METHOD)
class HalfbyteQuantizer(HfQuantizer):
    """Registered for `HalfbyteConfig`; transformers makes one per `from_pretrained` call.

    Quantizing on the fly: planned layers stay `nn.Linear` on meta and change class when their weight arrives, so one whose
    weight never arrives (a fresh head) is initialized by transformers and stays dense. Loading a packed checkpoint: what
    the file holds decides; uint8 rows make a layer packed. One of bitsandbytes is such a checkpoint, of which
    `ReadBitsandbytes` makes the rows.

    Args:
        quantization_config: the config of the call, or that of the checkpoint with the call's attached.
        **kwargs: `pre_quantized`: whether the checkpoint is packed.

    Raises:
        ValueError: the call's config contradicts the checkpoint's.
    """

    requires_calibration = False
    quantization_config: HalfbyteConfig

    def __init__(self, quantization_config: HalfbyteConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config.resolved(), **kwargs)
        marks = self.quantization_config.__dict__
        wanted = marks.pop("wanted", None)
        self._reader = ReadBitsandbytes(wanted) if marks.pop("bitsandbytes", False) else None
        self._plan = Plan()
        self._files: list[str] | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # of every layer that may become packed, as the model was built

    # ---- before the weights: the model is on meta -------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called before the model is built, and again with the final device map."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise NotImplementedError(
                'HalfbyteConfig: device_map must not place modules on "disk": packed rows are kept in memory; '
                "use devices or cpu"
            )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise NotImplementedError(
                "HalfbyteConfig: distributed_config (tensor parallelism) is not supported with packed rows; "
                "load without it and shard with FSDP"
            )
        self._files = kwargs.get("checkpoint_files")
        self._plan = plan_layers(model, self.quantization_config)
        if self._reader is not None:  # an output embedding that the checkpoint holds quantized is a wish like any other
            self._reader.dense = plan_layers(model, HalfbyteConfig(skip=())).reasons
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._dtypes = {
            f"{name}.{leaf}": module.get_parameter(leaf).dtype
            for name, module in model.named_modules()
            for leaf in weights_of(module)
        }

    # ---- called by the loader per key --------------------------------------------------------------------------------

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether to pack the value on its way in; also, for any load, whether its shape may differ from the dense one."""
        if self.pre_quantized:
            return param_name in self._dtypes
        return param_name in self._dtypes and param_name.rpartition(".")[0] in self._plan.formats

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes per dense element: device maps and the CUDA allocator's warm-up are computed from it before loading."""
        owner = param_name.rpartition(".")[0]
        format = self._plan.formats.get(owner)
        if format is None or param.dtype == torch.uint8 or param_name not in self._dtypes:
            return param.element_size()
        module = model.get_submodule(owner)
        transposed = is_conv1d(module) or getattr(module, "is_transposed", False)
        columns = param.shape[-2 if transposed else -1]
        return format.row_bytes(columns) / columns

    def get_quantize_ops(self) -> ConversionOps:
        """The operation for keys that `param_needs_quantization`."""
        return QuantizeOnLoad(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Called before loading: what gathers the tensors that bitsandbytes stores a weight as."""
        if self._reader is None:
            return []
        return [WeightConverter(self._reader.source_patterns, "weight", [self._reader])]

    def pack(self, model: PreTrainedModel, name: str, value: Tensor) -> Tensor:
        """Packs the weight called `name` and turns its module into the packed class.

        A value of another shape is returned as it is and its module stays dense: transformers then reports the mismatch,
        or initializes the layer anew under `ignore_mismatched_sizes`.
        """
        owner, _, leaf = name.rpartition(".")
        format = self._plan.formats.get(owner) if name in self._dtypes else None
        if format is None:
            return value
        module: Any = model.get_submodule(owner)
        if leaf != "weight":
            return self._pack_experts(name, module, leaf, value, format)
        if value.shape != module.weight.shape:
            del self._plan.formats[owner]
            return value
        packed = quantize(linear_weight(module, value), format)
        pack_module_(module, format, self.quantization_config.compute_dtype)
        return packed

    def _pack_experts(self, name: str, module: Any, leaf: str, value: Tensor, format: Format) -> Tensor:
        if not isinstance(module, QuantExperts):  # the first of its weights to arrive
            quantize_experts_(module, format, as_dtype("compute_dtype", self.quantization_config.compute_dtype))
        if expert_shape(module, value) != module.weight_shapes[leaf]:
            raise QuantizationError(
                f"{name}: the checkpoint's experts have (E, N, K) = {expert_shape(module, value)}, the model's "
                f"{module.weight_shapes[leaf]}",
                [name],
            )
        return pack_experts(module, value, format)

    # ---- after the weights -------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self._reader is not None:
            self._take_over(model, self._reader)
        if self.pre_quantized:
            self._adopt_packed(model)
        # The loader marks what it assigned (and what is tied to that); everything else was drawn anew.
        fresh = {name for name, p in model.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
        for name, reason in [*self._plan.reasons.items(), *((name, "") for name in self._plan.formats)]:
            module = model.get_submodule(name)
            unloaded = [f"{name}.{leaf}" for leaf in weights_of(module) if f"{name}.{leaf}" in fresh]
            if isinstance(module, QuantExperts) and unloaded:
                raise _unsound(dict.fromkeys(unloaded, "it is missing from the checkpoint"))
            if isinstance(module, Packed):
                continue
            if unloaded:
                mark_dense(module, FRESH)
            elif reason or self.pre_quantized:
                mark_dense(module, reason or "dense in the checkpoint")
            else:  # the loader split a key in parts, of which only the first could reach `pack`
                pack_module_(module, self._plan.formats[name], self.quantization_config.compute_dtype)
        if not any(isinstance(module, Packed) for module in model.modules()):
            raise nothing_quantized(model, "HalfbyteConfig")
        self._describe(model)
        record_originals(model, self._files)
        for module in model.modules():
            adapt_attention(module)
        # PEFT's prepare_model_for_kbit_training reads it: no upcast to float32, checkpointing and input gradients on.
        # `is_loaded_in_4bit` would do too, but makes TRL cast the adapters to bfloat16 whatever the user chose.
        model.hqq_quantized = True  # type: ignore[assignment]
        model._halfbyte_fresh = frozenset(fresh)  # type: ignore[assignment]  # `prepare_model` leaves them trainable
        return model

    def _take_over(self, model: PreTrainedModel, reader: ReadBitsandbytes) -> None:
        """Raises what the reader found wrong; from here on the model is like one of a packed checkpoint."""
        if reader.problems:
            raise _unsound(reader.problems)
        for name, reason in reader.reasons.items():
            self._plan.formats.pop(name, None)
            self._plan.reasons[name] = reason
        if reader.formats:
            self.quantization_config.format = str(next(iter(reader.formats.values())))
        # It would be reversed on saving.
        used: Any = model._weight_conversions
        kept = [each for each in used if reader not in getattr(each, "operations", ())]
        model._weight_conversions = kept  # type: ignore[assignment]

    def _adopt_packed(self, model: PreTrainedModel) -> None:
        """Gives layers whose weight arrived as rows their packed class, and checks that all rows are there and fit."""
        problems = {}
        for key, dtype in self._dtypes.items():
            name, _, leaf = key.rpartition(".")
            module = model.get_submodule(name)
            if leaf == "weight":
                problem = self._adopt(name, module, dtype)
            elif isinstance(module, QuantExperts):
                continue  # with its first weight
            else:
                problem = self._adopt_experts(name, module, dtype)
            if problem:
                problems[name] = problem
        if problems:
            raise _unsound(problems)

    def _adopt(self, name: str, module: Any, dtype: torch.dtype) -> str | None:
        """Packs the class of one linear layer or `nn.Embedding` if its weight is rows; returns what is wrong with it."""
        config, weight = self.quantization_config, module.weight
        linear = linear_shape(module)
        dense = linear or (module.num_embeddings, module.embedding_dim)
        if is_conv1d(module):
            dense = dense[::-1]
        if weight.dtype != torch.uint8:
            promised = is_described(name, config.modules) if config.modules else name in self._plan.formats
            if promised and not getattr(weight, "_is_hf_initialized", False):
                return "its packed rows are missing from the checkpoint"
            if promised and config.modules:
                return f"it must be packed, the checkpoint holds it as {weight.dtype}"
            if tuple(weight.shape) != dense:
                return f"its dense weight must have shape {dense}, got {tuple(weight.shape)}"
            return None
        named = config.format if linear else config.embedding_format
        if self._reader is not None and linear:
            named = str(self._reader.formats[name])
        if named is None:
            return "the checkpoint holds packed rows, but its config has no embedding_format"
        module._parameters["weight"] = nn.Parameter(torch.empty(dense, dtype=dtype, device="meta"))
        pack_module_(module, Format.parse(named), config.compute_dtype)
        expected = tuple(module.weight.shape)
        module.weight = weight
        if tuple(weight.shape) != expected:
            return (
                f"{named} rows for {module.weight_shape[1]} columns must have shape {expected}, got {tuple(weight.shape)}; "
                f"were they quantized with another format?"
            )
        return None

    def _adopt_experts(self, name: str, module: nn.Module, dtype: torch.dtype) -> str | None:
        """The same for fused experts, all of whose weights must be rows then."""
        config, found = self.quantization_config, {}
        dense = {leaf: module.get_parameter(leaf) for leaf in expert_weights(module)}
        if not any(weight.dtype == torch.uint8 for weight in dense.values()):
            promised = is_described(name, config.modules) if config.modules else name in self._plan.formats
            return "its packed rows are missing from the checkpoint" if promised else None
        format = Format.parse(config.format)
        for leaf, weight in dense.items():
            shape = self._shapes[f"{name}.{leaf}"]
            found[leaf] = weight
            module._parameters[leaf] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        experts = quantize_experts_(module, format, as_dtype("compute_dtype", config.compute_dtype))
        for leaf, weight in found.items():
            expected = tuple(experts.get_parameter(leaf).shape)
            experts._parameters[leaf] = weight
            if not getattr(weight, "_is_hf_initialized", False):
                return f"the packed rows of {leaf} are missing from the checkpoint"
            if weight.dtype != torch.uint8 or tuple(weight.shape) != expected:
                return (
                    f"{leaf} must be uint8 rows of {config.format} with shape {expected}, got {weight.dtype} "
                    f"{tuple(weight.shape)}; were they quantized with another format?"
                )
        return None

    # ---- saving, training, going back --------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Called by `save_pretrained` before config.json is written, which is brought in line with the model here."""
        packed = {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
        if not packed:  # merged or dequantized in the meantime: a plain dense checkpoint
            self.remove_quantization_config(model)
            return None, {}
        config = self.quantization_config
        kinds = (((QuantLinear, QuantExperts), config.format), ((QuantEmbedding,), config.embedding_format))
        for kind, named in kinds:
            others = [n for n, m in packed.items() if isinstance(m, kind) and str(m.format) != named]
            if others:
                raise QuantizationError(
                    f"save_pretrained: config.json names one format ({named}), but {len(others)} modules have another, "
                    f"{others[0]} is {packed[others[0]].format}",
                    others,
                )
        self._describe(model)
        return None, {}

    def _describe(self, model: PreTrainedModel) -> None:
        layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Packed)) or weights_of(m)}
        packed = [name for name, module in layers.items() if isinstance(module, Packed)]
        self.quantization_config.modules = describe_modules(packed, layers.keys() - set(packed))

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Packed rows are plain uint8 tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters and dense layers train on top of packed rows."""
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        # The config holds the dtype as a string after a reload.
        target = as_dtype("dtype", str(dtype).removeprefix("torch.")) if dtype is not None else None
        modules = list(model.modules())
        for module in modules:
            if isinstance(module, QuantExperts):
                dequantize_experts_(module, target or module.dense_dtype)
        rows = (module for module in modules if isinstance(module, PackedRows))
        for module, weight in dense_weights(rows, lambda module: target or module.dense_dtype):
            dense = nn.Parameter(weight, requires_grad=False)
            if isinstance(module, QuantLinear):
                dequantize_linear_(module, dense)
            elif isinstance(module, QuantEmbedding):
                dequantize_embedding_(module, dense)
        model.hqq_quantized = False  # type: ignore[assignment]
        return model


def _unsound(problems: dict[str, str]) -> QuantizationError:
    listing = "; ".join(f"{name}: {problem}" for name, problem in list(problems.items())[:5])
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return QuantizationError(f"HalfbyteConfig: the packed checkpoint is not sound: {listing}{more}", problems)
