"""QuantExperts: the fused experts of a mixture (transformers), each weight (E, N, K) stored as packed rows."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import Format
from halfbyte.nn.linear import packed_linear
from halfbyte.nn.packed import Packed, cannot_load
from halfbyte.ops.dequantize import dequantize
from halfbyte.ops.quantize import quantize

__all__ = ["QuantExperts", "dequantize_experts_", "expert_weights", "quantize_experts_"]

_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """Names of the (E, N, K) weights of fused experts, packed or not; empty for any other module.

    They are known by transformers' dispatch (`use_experts_implementation`): it leaves the model's own forward, which takes
    one expert after the other, under `__wrapped__`, and says on the module how its weights lie.
    """
    kind = module.__dict__.get("dense_class", type(module))
    if "is_transposed" not in module.__dict__ or not hasattr(kind.forward, "__wrapped__"):
        return ()
    parameters = module._parameters
    return tuple(name for name in _NAMES if (weight := parameters.get(name)) is not None and weight.dim() == 3)


class QuantExperts(Packed):
    """The experts of one mixture-of-experts layer, packed; a dense module becomes one by `quantize_experts_`.

    Forward is the model's own ("eager"), which multiplies with one expert after the other; each product is
    `halfbyte::linear` on the rows of that expert, so no dense weight exists at any time, and gradients reach the inputs. The
    names of the weights stay: `gate_up_proj` (E, 2 I, row_bytes) and `down_proj` (E, H, row_bytes), both uint8, sharded on E
    under FSDP2. Where the model stores them transposed (E, K, N), the rows are still (E, N, row_bytes).

    Attributes:
        format: the `Format` of the rows.
        compute_dtype: as for `QuantLinear`.
        dense_class: the class that it was and becomes again.
        weight_shapes: (E, N, K) of each weight, by name.

    Raises:
        NotImplementedError: on forward, if the model does something else with an expert than multiply with it.

    Source:
        transformers 5.23, `integrations/moe.py`.
    """

    dense_class: type[nn.Module]
    weight_shapes: dict[str, tuple[int, int, int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by the layer with what the dense experts take: hidden states, expert indices, expert weights.

        Args:
            *args: hidden states (tokens, H) of float dtype, int64 indices (tokens, k), float weights (tokens, k).
            **kwargs: the same by name.

        Returns:
            Shape (tokens, H) of the hidden states' dtype.
        """
        eager: Any = self.dense_class.forward.__wrapped__  # type: ignore[attr-defined]
        return eager(_Presented(self), *args, **kwargs)

    def dequantize(self, name: str, expert: int, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight of one expert.

        Args:
            name: "gate_up_proj", "up_proj" or "down_proj".
            expert: which, from 0.
            dtype: float32, bfloat16 or float16; None means the compute dtype, or else the dtype it was built with.

        Returns:
            Shape (N, K).
        """
        dtype = dtype or self.compute_dtype or self.dense_dtype
        return dequantize(self.get_parameter(name)[expert], self.format, self.weight_shapes[name][2], dtype)

    def dense_shape(self, name: str) -> tuple[int, int, int]:
        """Shape of a weight in the layout of the dense class: (E, N, K), or (E, K, N)."""
        E, N, K = self.weight_shapes[name]
        return (E, K, N) if self.is_transposed else (E, N, K)

    @torch.no_grad()
    def quantize_(self, name: str, dense_weight: Tensor) -> None:
        """Replaces the rows of one weight, expert by expert, in place.

        Args:
            name: "gate_up_proj", "up_proj" or "down_proj".
            dense_weight: of the shape that `dense_shape` says, float32, bfloat16 or float16.
        """
        rows = self.get_parameter(name)
        for expert in range(rows.shape[0]):
            rows[expert].copy_(pack_experts(self, dense_weight[expert], self.format))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            columns = {name: shape[2] for name, shape in self.weight_shapes.items()}
            metadata.setdefault(prefix[:-1], {}).update(format=str(self.format), in_features=columns)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        error_msgs: list[str] = rest[-1]
        saved, columns = local_metadata.get("format"), local_metadata.get("in_features", {})
        changed = dict(state_dict)
        for name, shape in self.weight_shapes.items():
            key = prefix + name
            value = state_dict.get(key)
            if value is None:
                continue
            problem = cannot_load(value, self.format, shape, self.dense_shape(name), saved, columns.get(name))
            if problem:
                error_msgs.append(f"{key}: {problem}")
                return
            if value.dtype != torch.uint8:  # a dense checkpoint: quantize on the way in
                assigned = local_metadata.get("assign_to_params_buffers")
                device = value.device if assigned else self.get_parameter(name).device
                changed[key] = pack_experts(self, torch.detach(value), self.format).to(device)
        super()._load_from_state_dict(changed, prefix, local_metadata, *rest)

    def extra_repr(self) -> str:
        """Sizes and format."""
        sizes = ", ".join(f"{name}={shape}" for name, shape in self.weight_shapes.items())
        return f"{self.dense_class.__name__}, {sizes}, format={self.format}"


def quantize_experts_(experts: nn.Module, format: Format, compute_dtype: torch.dtype | None) -> QuantExperts:
    """Turns fused experts into `QuantExperts` where they stand, expert by expert; on meta only shapes change."""
    shapes, dtype = {}, torch.get_default_dtype()
    for name in expert_weights(experts):
        weight = experts.get_parameter(name)
        dtype, shape = weight.dtype, expert_shape(experts, weight)
        shapes[name] = shape
        packed = torch.empty((*shape[:2], format.row_bytes(shape[2])), dtype=torch.uint8, device=weight.device)
        if not weight.is_meta:
            for expert in range(shape[0]):
                packed[expert] = pack_experts(experts, weight[expert].detach(), format)
        parameter = nn.Parameter(packed, requires_grad=False)
        if getattr(weight, "_is_hf_initialized", False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        experts._parameters[name] = parameter
    experts.__dict__["dense_class"] = type(experts)
    experts.__class__ = QuantExperts
    assert isinstance(experts, QuantExperts)
    experts.format, experts.compute_dtype, experts.dense_dtype = format, compute_dtype, dtype
    experts.weight_shapes = shapes
    return experts


def dequantize_experts_(experts: QuantExperts, dtype: torch.dtype) -> nn.Module:
    """The inverse of `quantize_experts_`: dense weights of `dtype` in the layout of the dense class."""
    for name in experts.weight_shapes:
        dense = torch.empty(experts.dense_shape(name), dtype=dtype, device=experts.get_parameter(name).device)
        decode_experts(experts, name, dense)
        experts._parameters[name] = nn.Parameter(dense, requires_grad=False)
    kind = experts.dense_class
    for name in ("format", "compute_dtype", "dense_dtype", "dense_class", "weight_shapes"):
        experts.__dict__.pop(name, None)
    experts.__class__ = kind  # type: ignore[assignment]
    return experts


def decode_experts(experts: QuantExperts, name: str, dense: Tensor) -> None:
    """Writes the values of one weight into `dense`, which lies as in the dense class; on meta nothing."""
    if dense.is_meta:
        return
    for expert in range(dense.shape[0]):
        values = experts.dequantize(name, expert, dense.dtype)
        dense[expert] = values.t() if experts.is_transposed else values


def expert_shape(experts: nn.Module, weight: Tensor) -> tuple[int, int, int]:
    """(E, N, K) of a dense weight of `experts`."""
    E, N, K = weight.shape
    return (E, K, N) if experts.is_transposed else (E, N, K)


def pack_experts(experts: nn.Module, weight: Tensor, format: Format) -> Tensor:
    """Rows of one or all experts of a dense weight that lies as it does in `experts`."""
    return quantize(weight.transpose(-1, -2).contiguous() if experts.is_transposed else weight, format)


class _Presented:
    """Stands for `self` in the dense class's forward: all of the module, but its packed weights as `_Weights`."""

    def __init__(self, module: QuantExperts) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        module = self._module
        if name in module.weight_shapes:
            return _Weights(module, name)
        try:
            return getattr(module, name)
        except AttributeError:
            found = inspect.getattr_static(module.dense_class, name)  # a method of the dense class
            return functools.partial(found, self) if inspect.isfunction(found) else getattr(module.dense_class, name)


class _Weights:
    """`self.gate_up_proj` in the dense forward: indexing it names an expert."""

    def __init__(self, module: QuantExperts, name: str) -> None:
        self._module, self._name = module, name

    def __getitem__(self, expert: Any) -> _Expert:
        return _Expert(self._module, self._name, int(expert))


class _Expert:
    """One expert's weight in the dense forward: what multiplies with it runs on its rows."""

    def __init__(self, module: QuantExperts, name: str, index: int) -> None:
        self._module, self._name, self._index = module, name, index

    def _times(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        module = self._module
        rows = module.get_parameter(self._name)[self._index]
        dtypes = module.compute_dtype, module.dense_dtype
        return packed_linear(input, rows, bias, module.format, module.weight_shapes[self._name][2], *dtypes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and len(args) > 1 and isinstance(args[1], _Expert):
            expert, transposed = args[1], False
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and isinstance(args[1], _Expert):
            expert, transposed, bias = args[1], True, None
        else:
            raise NotImplementedError(f"QuantExperts: the model applies {func} to an expert; keep them dense with skip")
        module = expert._module
        if transposed != bool(module.is_transposed):
            raise NotImplementedError(
                f"QuantExperts: {module.dense_class.__name__} multiplies with an expert the other way round than it says "
                f"(is_transposed={module.is_transposed}); keep its experts dense with skip"
            )
        return expert._times(args[0], bias)
