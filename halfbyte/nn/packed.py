"""What every module with packed rows shares: the parameter, its state dict, loading dense or packed tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.formats import Format
from halfbyte.nn.tensor_parallel import refuse_cut_rows
from halfbyte.ops.dequantize import dequantize
from halfbyte.ops.quantize import FLOAT_DTYPES, FLOAT_NAMES, describe, quantize
from halfbyte.optim.sharding import first_row, is_dtensor, local

if TYPE_CHECKING:
    from typing_extensions import Self

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(argument: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """A compute dtype given as a dtype or its name; None stays None. Raises TypeError or ValueError naming `argument`."""
    if isinstance(value, str):
        if value not in _DTYPES:
            raise ValueError(f"{argument} must be one of {', '.join(_DTYPES)}, got {value!r}")
        return _DTYPES[value]
    if value is not None and value not in FLOAT_DTYPES:
        raise TypeError(f"{argument} must be {FLOAT_NAMES} or None, got {value!r}")
    return value


class _DenseBuffer(threading.local):
    depth = 0
    bytes: Tensor | None = None


_dense_buffer = _DenseBuffer()


@contextmanager
def reusing_dense_buffer() -> Iterator[None]:
    """Inside, `dense_buffer` hands out one buffer per thread again and again.

    A fresh dense weight per layer leaves holes in the heap that the next layer does not fit into: building 24 layers of
    16 MiB packed to 2 MiB each peaked at 183 MiB that way, at about 80 MiB with one buffer.
    """
    _dense_buffer.depth += 1
    try:
        yield
    finally:
        _dense_buffer.depth -= 1
        if _dense_buffer.depth == 0:
            _dense_buffer.bytes = None


def dense_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory for a dense weight that lives until the next call at most."""
    if not _dense_buffer.depth or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    if _dense_buffer.bytes is None or _dense_buffer.bytes.numel() < size:
        _dense_buffer.bytes = None  # release it before a larger one is taken
        _dense_buffer.bytes = torch.empty(size, dtype=torch.uint8)
    return _dense_buffer.bytes[:size].view(dtype).view(shape)


def _as_floats(rows: Tensor) -> Tensor:
    """Packed rows viewed as float32; rows inside a mapped file may start at any byte and are copied then."""
    rows = rows.contiguous()
    return (rows.clone() if rows.storage_offset() % 4 else rows).view(torch.float32)


class Packed(nn.Module):
    """Anything that holds packed rows: `PackedRows` with one matrix, `QuantExperts` with several stacks of them."""

    format: Format
    compute_dtype: torch.dtype | None
    dense_dtype: torch.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `.to(dtype)`, `.half()` and the like do to every module: the rows stay, `dense_dtype` follows.

        So the layer returns what a dense one would after the same call.
        """
        super()._apply(fn, recurse)
        dtype = fn(torch.empty(0, dtype=self.dense_dtype)).dtype
        if dtype in FLOAT_DTYPES:
            self.dense_dtype = dtype
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As `nn.Module` does for what can train, which packed rows can't.

        Called by users, and by PEFT on what `modules_to_save` names.

        Args:
            requires_grad: False freezes the bias as well.

        Returns:
            The module.

        Raises:
            RuntimeError: True.

        Note:
            `requires_grad_(True)` on a tensor, or on a module around this one, is torch's own and raises torch's message
            ("only Tensors of floating point dtype can require gradients"): see docs/troubleshooting.md.
        """
        if requires_grad:
            raise RuntimeError(  # as torch does
                f"requires_grad_: the packed rows of {type(self).__name__}({self.extra_repr()}) can't require a gradient. "
                "Train an adapter on them (PEFT's LoRA), make the layer dense (skip=, peft's modules_to_save on a dense "
                "layer, lightning_plugin.GradualUnfreezing while it trains), or call bias.requires_grad_(True) for its bias"
            )
        return super().requires_grad_(False)


class PackedRows(Packed):
    """Mixin of modules whose `weight` is a packed matrix: (rows, row_bytes) uint8, `weight_shape` = (rows, K) dense.

    The layout is one plain uint8 parameter under the key `weight`, so that sharding, broadcasting, `deepcopy`, `.to()`
    and every checkpoint format treat it like any other tensor. Subclasses define `weight_shape`.
    """

    _contained = False
    """Whether `weight` holds the rows viewed as float32; see `to_container_`."""

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(rows, K) of the dense weight."""
        raise NotImplementedError

    @property
    def packed(self) -> Tensor:
        """The packed rows, shape (rows, row_bytes) uint8; under FSDP1 a view of the gathered container."""
        weight: Tensor = self.weight
        # A trainable bias makes FSDP1's flat parameter require a gradient, and with it every view of it.
        return weight.detach().view(torch.uint8) if self._contained else weight

    def to_container_(self) -> None:
        """Views the rows as float32, shape (rows, row_bytes / 4), for FSDP1, whose flat parameters must be floating.

        Called by `halfbyte.distributed.wrap_policy`. No byte changes; state dicts still hold uint8 under the same key.
        """
        if not self._contained:
            self._contained = True
            self.weight.data = _as_floats(self.weight.data)  # the same Parameter: an optimizer may list it

    def _init_packed(
        self, format: str | Format, compute_dtype: torch.dtype | str | None, dtype: torch.dtype | None, device: Any
    ) -> None:
        self.format = Format.parse(format)
        self.compute_dtype = as_dtype("compute_dtype", compute_dtype)
        self.dense_dtype = dtype or torch.get_default_dtype()
        rows, columns = self.weight_shape
        size = (rows, self.format.row_bytes(columns))
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device=device), requires_grad=False)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight these rows stand for.

        Args:
            dtype: float32, bfloat16 or float16; None means the compute dtype, or else the dtype the module was built with.

        Returns:
            Shape (rows, K).
        """
        dtype = dtype or self.compute_dtype or self.dense_dtype
        return dequantize(self.packed, self.format, self.weight_shape[1], dtype)

    @torch.no_grad()
    def quantize_(self, dense_weight: Tensor) -> None:
        """Replaces the packed rows by the quantization of a dense weight, in place.

        Args:
            dense_weight: shape (rows, K), float32, bfloat16 or float16. A layer sharded by rows takes the rows it holds.

        Raises:
            TypeError: not a float tensor.
            ValueError: another shape.
        """
        if not isinstance(dense_weight, Tensor) or dense_weight.dtype not in FLOAT_DTYPES:
            raise TypeError(f"quantize_: dense_weight must be a {FLOAT_NAMES} tensor, got {describe(dense_weight)}")
        if tuple(dense_weight.shape) != self.weight_shape:
            raise ValueError(f"quantize_: dense_weight must have shape {self.weight_shape}, got {tuple(dense_weight.shape)}")
        if is_dtensor(self.weight):  # called on each rank, by Lightning for one after a model was built on meta
            rows, first = local(self.weight), first_row(self.weight)
            rows.copy_(quantize(dense_weight[first : first + rows.shape[0]], self.format))
            return
        packed = quantize(dense_weight, self.format)
        if self.weight.is_meta:
            self.weight = nn.Parameter(packed, requires_grad=False)
        else:
            self.packed.copy_(packed)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As `nn.Module` does; called by tensor-parallel plans, and by every assignment of a parameter.

        Raises:
            NotImplementedError: a weight that is sharded inside its rows.
        """
        if name == "weight" and is_dtensor(param):
            refuse_cut_rows(self, param)
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._contained:
            # Called by FSDP1 while the unit is gathered; keep_vars promises the variable, which has another dtype here.
            destination[prefix + "weight"] = destination[prefix + "weight"].detach().view(torch.uint8)
        # Rows of nf4 and fp4 (int8 and fp8) of one K look alike: what they are travels in the metadata, which survives
        # torch.save and torch.load(weights_only=True).
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            entry = metadata.setdefault(prefix[:-1], {})
            entry.update(format=str(self.format), in_features=self.weight_shape[1])

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        value = state_dict.get(key)
        if value is not None:
            problem = self._cannot_load(value, local_metadata)
            if problem:
                error_msgs.append(f"{key}: {problem}")
                return
            if value.dtype != torch.uint8:  # a dense checkpoint: quantize on the way in
                state_dict = dict(state_dict)
                # torch.detach, not the method: it reads the tensors that Lightning's lazy loading stands in for
                state_dict[key] = quantize(torch.detach(value), self.format).to(
                    value.device if local_metadata.get("assign_to_params_buffers") else self.weight.device
                )
            if self._contained:
                state_dict = {**state_dict, key: _as_floats(state_dict[key])}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _cannot_load(self, value: Tensor, local_metadata: dict[str, Any]) -> str | None:
        saved = local_metadata.get("format"), local_metadata.get("in_features")
        return cannot_load(value, self.format, self.weight_shape, self.weight_shape, *saved)


def cannot_load(
    value: Tensor,
    format: Format,
    shape: tuple[int, ...],
    dense_shape: tuple[int, ...],
    saved_format: str | None,
    saved_in_features: int | None,
) -> str | None:
    """Why a tensor of a checkpoint can't become packed rows, or None.

    Args:
        value: the tensor, packed or dense.
        format: of the module.
        shape: (..., N, K) of the weight that the rows stand for.
        dense_shape: of a dense weight; some modules store it transposed.
        saved_format: what the checkpoint says that its rows are; None if it doesn't.
        saved_in_features: the same for K.
    """
    columns = shape[-1]
    if value.dtype != torch.uint8:
        if value.dtype not in FLOAT_DTYPES:
            return f"expected packed uint8 rows or a dense {FLOAT_NAMES} weight, got {describe(value)}"
        if tuple(value.shape) != dense_shape:
            return f"a dense weight must have shape {dense_shape}, got {tuple(value.shape)}"
        return None
    if saved_format not in (None, str(format)):
        return (
            f"the checkpoint holds {saved_format} rows, the module is {format}; "
            f"build it with format={saved_format!r}, or dequantize the checkpoint first"
        )
    in_features = columns if saved_in_features is None else saved_in_features
    expected = (*shape[:-1], format.row_bytes(columns))
    if in_features != columns or tuple(value.shape) != expected:
        return (
            f"packed {format} rows for in_features={columns} must have shape {expected}, got "
            f"{tuple(value.shape)} for in_features={in_features}; were they quantized with another format?"
        )
    return None
