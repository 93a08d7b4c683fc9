"""The tensors of bitsandbytes checkpoints, 4-bit and 8-bit, to packed rows and back. bitsandbytes itself is not used.

A 4-bit layer `p` of shape (N, K) is stored as `p.weight` (codes of the flattened weight, two per byte, high nibble first,
shape (bytes, 1), of any dtype: only the bytes count), `p.weight.absmax`, `p.weight.quant_map` and
`p.weight.quant_state.bitsandbytes__nf4` (or `__fp4`), which is JSON in a uint8 tensor; with double quantization absmax is
uint8 and `p.weight.nested_absmax` and `p.weight.nested_quant_map` decode it. An 8-bit layer is `p.weight` (int8 (N, K)),
`p.SCB` (absmax of each row) and `p.weight_format` (0: row-major).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.errors import QuantizationError
from halfbyte.formats import BLOCK_SIZES, FP4_MAGNITUDES, NF4_VALUES, Format
from halfbyte.nn.linear import QuantLinear
from halfbyte.nn.packed import Packed

__all__ = ["KEYS", "StoredLayer", "export_state_dict", "read_layer", "stored_format", "write_layer"]

_STATE = "weight.quant_state.bitsandbytes__"
_KEYS_4BIT = (
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    f"{_STATE}nf4",
    f"{_STATE}fp4",
)
_KEYS_8BIT = ("SCB", "weight_format")

KEYS = ("weight", *_KEYS_4BIT, *_KEYS_8BIT)
"""What a layer's weight may be stored as, each after the layer's name and a dot."""

# Their table of fp4 has +0.0 where ours has -0.0 (code 8, which only they write): equal values, and files get their bytes.
_QUANT_MAPS = {"nf4": NF4_VALUES, "fp4": (*FP4_MAGNITUDES, 0.0, *(-value for value in FP4_MAGNITUDES[1:]))}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredLayer:
    """One layer as `read_layer` found it.

    Attributes:
        weight: packed rows, shape (N, row_bytes) uint8, or where `format` is None the dense weight, (N, K) float32.
        format: the format of the rows; None: they can't be rows, `reason` says why.
        dtype: dtype of the weight that was quantized, as the checkpoint records it; None in 8 bits, which don't.
        reason: why the layer must stay dense, or None.
    """

    weight: Tensor
    format: Format | None
    dtype: torch.dtype | None
    reason: str | None = None


def read_layer(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> StoredLayer | None:
    """Reads the weight of one layer; its values are exactly those that bitsandbytes decodes in float32.

    Codes and un-nested scales are carried over bit by bit; doubly quantized scales are decoded to float32 as bitsandbytes
    decodes them. bitsandbytes counts blocks over the flattened weight: where K is not a multiple of its block size they
    cross rows, and the weight comes back dense.

    Args:
        tensors: the checkpoint, or at least its keys that start with `name`.
        name: dotted name of the layer.
        shape: (N, K) of its dense weight.

    Returns:
        The layer, or None if the checkpoint holds it dense (a float tensor of `shape` and nothing else).

    Raises:
        QuantizationError: a key is missing, of the wrong dtype or size, or contradicts another; the message names it.

    Example:
        >>> import torch, halfbyte
        >>> packed = halfbyte.quantize(torch.ones(2, 64), "nf4")
        >>> tensors = write_layer(packed, "nf4", 64, "up", dtype=torch.bfloat16)
        >>> stored = read_layer(tensors, "up", (2, 64))
        >>> str(stored.format), torch.equal(stored.weight, packed)
        ('nf4', True)

    Source:
        bitsandbytes 0.50, `functional.QuantState.as_dict` and `nn.Linear8bitLt._save_to_state_dict`.
    """
    layer = _Layer(tensors, name)
    four = [suffix for suffix in _KEYS_4BIT if suffix in layer]
    eight = [suffix for suffix in _KEYS_8BIT if suffix in layer]
    weight = layer.tensor("weight")
    if four and eight:
        raise layer.error(four[0], f"belongs to a 4-bit weight, but {layer.key(eight[0])} to an 8-bit one")
    if eight or weight.dtype == torch.int8:
        return _read_8bit(layer, weight, shape)
    if not four and weight.is_floating_point() and tuple(weight.shape) == tuple(shape):
        return None
    return _read_4bit(layer, weight, shape)


def stored_format(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]
) -> tuple[Format | None, str | None] | None:
    """What `read_layer` would find, without the weight: large tensors may be on meta.

    Args:
        tensors: the checkpoint; quantization states (`...quant_state...`) must have values.
        name: dotted name of the layer.
        shape: (N, K) of its dense weight.

    Returns:
        (format of the rows, None) or (None, why it has none); None if the checkpoint holds the layer dense.

    Raises:
        QuantizationError: a state is missing, damaged or contradicts the layer; the message names it.
    """
    layer = _Layer(tensors, name)
    weight = layer.tensor("weight")
    if weight.dtype == torch.int8 or any(suffix in layer for suffix in _KEYS_8BIT):
        return Format.parse("int8"), None
    if not any(suffix in layer for suffix in _KEYS_4BIT) and weight.is_floating_point() and tuple(weight.shape) == shape:
        return None
    _, codebook, state = _state_of(layer, weight, shape)
    return _format_of(codebook, state["blocksize"], shape[1])


class _Layer:
    """The tensors of one layer, and errors that name their keys."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        self.tensors, self.name = tensors, name

    def key(self, suffix: str) -> str:
        return f"{self.name}.{suffix}" if self.name else suffix

    def __contains__(self, suffix: str) -> bool:
        return self.key(suffix) in self.tensors

    def error(self, suffix: str, problem: str) -> QuantizationError:
        return QuantizationError(f"bitsandbytes checkpoint: {self.key(suffix)} {problem}", [self.name])

    def tensor(self, suffix: str, dtype: torch.dtype | None = None, numel: int | None = None) -> Tensor:
        """The tensor, checked for its dtype and number of elements."""
        found = self.tensors.get(self.key(suffix))
        if found is None:
            others = [self.key(other) for other in KEYS if other in self]
            raise self.error(suffix, f"is missing, the layer has only {', '.join(others) or 'no keys'}")
        if (dtype is not None and found.dtype != dtype) or (numel is not None and found.numel() != numel):
            size = "" if numel is None else f"{numel} elements of "
            raise self.error(suffix, f"must hold {size}{dtype}, got shape {tuple(found.shape)} of {found.dtype}")
        return found


def _read_4bit(layer: _Layer, weight: Tensor, shape: tuple[int, int]) -> StoredLayer:
    state_key, codebook, state = _state_of(layer, weight, shape)
    N, K = shape
    block_size = state["blocksize"]
    codes = weight.detach().contiguous().view(-1).view(torch.uint8)
    if codes.numel() != (N * K + 1) // 2:
        raise layer.error("weight", f"must hold {(N * K + 1) // 2} bytes for a weight of {shape}, got {codes.numel()}")
    table = torch.tensor(_QUANT_MAPS[codebook], dtype=torch.float32, device=codes.device)
    if not torch.equal(layer.tensor("weight.quant_map", torch.float32, 16).view(-1), table):
        raise layer.error("weight.quant_map", f"is not the table of {codebook}")
    absmax = _read_absmax(layer, state_key, state, -(-N * K // block_size))
    dtype = _DTYPES[state["dtype"]]
    format, reason = _format_of(codebook, block_size, K)
    if format is None:
        halves = torch.stack((codes >> 4, codes & 15), dim=-1).view(-1)[: N * K]
        scales = absmax.repeat_interleave(block_size)[: N * K]
        return StoredLayer((table[halves.int()] * scales).view(N, K), None, dtype, reason)
    return StoredLayer(_pack(codes.view(N, K // 2), absmax.view(N, -1), format, K), format, dtype)


def _state_of(layer: _Layer, weight: Tensor, shape: tuple[int, int]) -> tuple[str, str, dict[str, Any]]:
    """(key, codebook, content) of a 4-bit layer's quantization state."""
    states = [suffix for suffix in (f"{_STATE}nf4", f"{_STATE}fp4") if suffix in layer]
    if len(states) != 1:
        problem = "contradicts " + layer.key(states[1]) if states else f"(or ...__fp4) is missing: {_seen(layer, weight)}"
        raise layer.error(states[0] if states else f"{_STATE}nf4", problem)
    codebook = states[0].removeprefix(_STATE)
    return states[0], codebook, _parse_state(layer, states[0], codebook, shape)


def _format_of(codebook: str, block_size: int, K: int) -> tuple[Format | None, str | None]:
    """The format of a 4-bit layer's rows, or why it has none."""
    if K % block_size:
        return None, f"its bitsandbytes blocks of {block_size} cross rows of {K}"
    if block_size not in BLOCK_SIZES:
        return None, f"no format has blocks of {block_size}"
    return Format(codebook, block_size), None


def _seen(layer: _Layer, weight: Tensor) -> str:
    return f"{layer.key('weight')} is {weight.dtype} of shape {tuple(weight.shape)}, not a dense weight of this layer"


def _parse_state(layer: _Layer, suffix: str, codebook: str, shape: tuple[int, int]) -> dict[str, Any]:
    try:
        state = json.loads(bytes(layer.tensor(suffix, torch.uint8).view(-1).tolist()))
    except ValueError as error:
        if isinstance(error, QuantizationError):
            raise
        raise layer.error(suffix, f"is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise layer.error(suffix, f"must hold a JSON object, got {state!r}")
    block_size = state.get("blocksize")
    rules = {
        "quant_type": (state.get("quant_type") == codebook, repr(codebook)),
        "blocksize": (type(block_size) is int and block_size > 0, "a positive integer"),
        "dtype": (state.get("dtype") in _DTYPES, f"one of {', '.join(_DTYPES)}"),
        "shape": (state.get("shape") == list(shape), f"{list(shape)}, as the model has it"),
    }
    for field, (holds, rule) in rules.items():
        if not holds:
            raise layer.error(suffix, f"must have {field} = {rule}; got {state.get(field)!r}")
    return state


def _read_absmax(layer: _Layer, state_key: str, state: dict[str, Any], blocks: int) -> Tensor:
    """The scales in float32, shape (blocks,)."""
    nested = [suffix for suffix in ("weight.nested_absmax", "weight.nested_quant_map") if suffix in layer]
    fields = ("nested_blocksize", "nested_offset")
    if not nested and layer.tensor("weight.absmax").dtype != torch.uint8 and not any(field in state for field in fields):
        return layer.tensor("weight.absmax", torch.float32, blocks).view(-1)
    codes = layer.tensor("weight.absmax", torch.uint8, blocks).view(-1)
    for field in fields:
        if type(state.get(field)) not in (int, float) or (field == fields[0] and state[field] < 1):
            raise layer.error(state_key, f"must have a number {field} for double quantization, got {state.get(field)!r}")
    size = int(state["nested_blocksize"])
    scales = layer.tensor("weight.nested_absmax", torch.float32, -(-blocks // size)).view(-1)
    table = layer.tensor("weight.nested_quant_map", torch.float32, 256).view(-1)
    # float32 multiply, then add, each rounded: what bitsandbytes computes
    return table[codes.int()] * scales.repeat_interleave(size)[:blocks] + state["nested_offset"]


def _read_8bit(layer: _Layer, weight: Tensor, shape: tuple[int, int]) -> StoredLayer:
    N, K = shape
    if weight.dtype != torch.int8 or tuple(weight.shape) != tuple(shape):
        raise layer.error("weight", f"must be int8 of shape {shape}, got {weight.dtype} of {tuple(weight.shape)}")
    absmax = layer.tensor("SCB", torch.float32, N)
    layout = int(layer.tensor("weight_format", torch.uint8, 1))
    if layout != 0:
        raise layer.error("weight_format", f"must be 0 (row-major), got {layout}; save it anew with a current bitsandbytes")
    format = Format.parse("int8")
    return StoredLayer(_pack(weight.detach().contiguous().view(torch.uint8), absmax.view(N, 1), format, K), format, None)


def _pack(codes: Tensor, scales: Tensor, format: Format, K: int) -> Tensor:
    """Rows from bytes of codes (N, code_bytes) and float32 scales (N, B)."""
    packed = codes.new_zeros(codes.shape[0], format.row_bytes(K))
    packed[:, : codes.shape[1]] = codes
    offset = format.scales_offset(K)
    scale_bytes = scales.detach().contiguous().view(torch.uint8)
    packed[:, offset : offset + scale_bytes.shape[1]] = scale_bytes
    return packed


def write_layer(
    packed: Tensor,
    format: str | Format,
    in_features: int,
    name: str,
    *,
    dtype: torch.dtype,
    quant_storage: torch.dtype = torch.uint8,
) -> dict[str, Tensor]:
    """The keys under which bitsandbytes stores one layer: the inverse of `read_layer`, byte for byte unless it was nested.

    Args:
        packed: packed rows, shape (N, row_bytes) uint8.
        format: their format: nf4, fp4 (of any block size) or int8.
        in_features: K.
        name: dotted name of the layer.
        dtype: float32, bfloat16 or float16, what bitsandbytes is to decode 4-bit weights to; 8 bits don't record it.
        quant_storage: dtype that the bytes of 4-bit codes are viewed as, such as bfloat16 for FSDP.

    Returns:
        Tensors by full key; their memory is their own.

    Raises:
        NotImplementedError: bitsandbytes has no such format, or K is not a multiple of the block size.
        ValueError: `packed` has the wrong shape, or `dtype` is none of the three.
    """
    format = Format.parse(format)
    K, where = in_features, f"bitsandbytes.write_layer: {name}"
    if format.name not in ("nf4", "fp4", "int8"):
        raise NotImplementedError(f"{where} is {format}, bitsandbytes checkpoints hold nf4, fp4 and int8")
    if format.block_size and K % format.block_size:
        raise NotImplementedError(
            f"{where} has {K} columns, no multiple of {format.block_size}: bitsandbytes counts blocks over the flattened "
            f"weight and has no blocks that end with the row"
        )
    if packed.dim() != 2 or packed.dtype != torch.uint8 or packed.shape[1] != format.row_bytes(K):
        raise ValueError(
            f"{where}: packed must be uint8 of {format.row_bytes(K)} bytes per row for {format}, got {packed.dtype} of "
            f"shape {tuple(packed.shape)}"
        )
    N, offset = packed.shape[0], format.scales_offset(K)
    codes = packed.detach()[:, : format.code_bytes(K)].contiguous()
    scales = packed.detach()[:, offset : offset + 4 * format.num_blocks(K)].contiguous().view(-1).view(torch.float32)
    if format.name == "int8":
        stored = {"weight": codes.view(torch.int8), "SCB": scales, "weight_format": codes.new_zeros(())}
    else:
        dtype_name = str(dtype).removeprefix("torch.")
        if dtype_name not in _DTYPES:
            raise ValueError(f"{where}: dtype must be one of {', '.join(_DTYPES)}, got {dtype}")
        state = {"quant_type": format.name, "blocksize": format.block_size, "dtype": dtype_name, "shape": [N, K]}
        table = torch.tensor(_QUANT_MAPS[format.name], dtype=torch.float32, device=packed.device)
        stored = {
            "weight": codes.view(-1).view(quant_storage).view(-1, 1),
            "weight.absmax": scales,
            "weight.quant_map": table,
            f"{_STATE}{format.name}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
    return {f"{name}.{suffix}" if name else suffix: tensor for suffix, tensor in stored.items()}


def export_state_dict(model: nn.Module, *, quant_storage: torch.dtype = torch.uint8) -> dict[str, Tensor]:
    """The state dict of a quantized model with its packed layers under the keys of bitsandbytes.

    Args:
        model: any module; its packed layers must be `QuantLinear` in nf4, fp4 or int8. 4-bit layers are recorded with
            the dtype that they were built with.
        quant_storage: as for `write_layer`.

    Returns:
        Tensors by key: packed layers as copies, everything else as in `model.state_dict()`.

    Raises:
        NotImplementedError: a packed module that bitsandbytes has no form for, named.
    """
    state: dict[str, Tensor] = dict(model.state_dict())
    for name, module in model.named_modules():
        if not isinstance(module, Packed):
            continue
        if not isinstance(module, QuantLinear):
            raise NotImplementedError(
                f"bitsandbytes.export_state_dict: {name} is a {type(module).__name__}, bitsandbytes checkpoints hold packed "
                f"linear layers only"
            )
        arguments: dict[str, Any] = {"dtype": module.dense_dtype, "quant_storage": quant_storage}
        state.update(write_layer(module.packed, module.format, module.in_features, name, **arguments))
    return state
