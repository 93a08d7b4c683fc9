"""Where the final bytes of a model's tensors come from: files, bitsandbytes' files, a mapping, a model in memory.

Everything that loads, sends, caches or saves asks a source to fill a range of rows of an `Entry` into memory it owns, so
quantization goes straight to where the rows are needed, in pieces: no dense tensor exists in full unless its owner has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.bitsandbytes import KEYS, StoredLayer, read_layer, stored_format
from halfbyte.checkpoint.files import Checkpoint
from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.packed import Packed
from halfbyte.ops.dequantize import dequantize
from halfbyte.ops.quantize import FLOAT_DTYPES, quantize_

__all__ = [
    "BitsandbytesSource",
    "CheckpointSource",
    "Entry",
    "Found",
    "Source",
    "StoredSource",
    "TensorSource",
    "open_source",
]

_SCRATCH = 8 << 20
"""Bytes of dense rows that are read before they are quantized or cast."""


@dataclass(frozen=True)
class Entry:
    """One tensor as the model is to hold it.

    Attributes:
        name: its key in the state dict.
        shape: of the tensor itself: (..., row_bytes) for packed rows.
        dtype: uint8 for packed rows.
        format: of packed rows, None for a dense tensor.
        in_features: K of packed rows, 0 for a dense tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: Format | None = None
    in_features: int = 0

    @classmethod
    def packed(cls, name: str, dense_shape: tuple[int, ...], format: Format) -> Entry:
        """The rows of a dense tensor of shape (..., K)."""
        K = dense_shape[-1]
        return cls(name, (*dense_shape[:-1], format.row_bytes(K)), torch.uint8, format, K)

    @property
    def rows(self) -> int:
        """Size of dimension 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of dimension 0."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_nbytes

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """Shape of the dense tensor it stands for."""
        return (*self.shape[:-1], self.in_features) if self.format else self.shape


@dataclass(frozen=True)
class Found:
    """How a source holds one tensor.

    Attributes:
        shape: of the dense tensor; None where only the model knows (rows of unrecorded K).
        dtype: as stored.
        format: of its rows; None: dense.
        reason: why a quantized tensor can't be rows, or None.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    format: Format | None = None
    reason: str | None = None


class Source(Protocol):
    """What can fill entries."""

    quantized: bool
    """Whether anything in it is quantized already: what it holds dense then stays dense."""

    def names(self) -> Iterator[str]:
        """Keys of the tensors, each as a model would call it."""

    def find(self, name: str, dense_shape: tuple[int, ...] | None, embedding: bool = False) -> Found:
        """How it holds `name`; the model's dense shape and whether it is a table help where the source doesn't say."""

    def fill(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        """Writes rows start to stop of the entry into `out`, contiguous uint8 CPU memory of exactly their size."""

    def close(self) -> None:
        """Releases files."""


class StoredSource(Source, Protocol):
    """A source whose content can be recognized: what an interrupted run made of it is then kept."""

    def identity(self) -> Any:
        """What names this very content, in JSON; None where nothing does."""

    def check_unchanged(self) -> None:
        """Raises QuantizationError if what it reads is no longer what it was on opening."""


def fill_rows(entry: Entry, rows: Tensor, out: Tensor) -> None:
    """Converts dense rows (float, or of any dtype for a dense entry) to the entry's and writes their bytes to `out`."""
    if entry.format is None:
        out.view(entry.dtype).view(rows.shape).copy_(rows)
        return
    if rows.dtype == torch.float64:
        rows = rows.float()
    if rows.dtype not in FLOAT_DTYPES:
        raise NotImplementedError(f"{entry.name}: a tensor of {rows.dtype} can't be quantized to {entry.format}")
    flat = rows.detach().reshape(-1, rows.shape[-1])
    quantize_(out.view(-1, entry.shape[-1]), flat, entry.format)


class CheckpointSource:
    """Dense tensors and packed rows of safetensors files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        config = checkpoint.config.get("quantization_config") or {}
        ours = config.get("quant_method") == "halfbyte"
        self._named: tuple[Any, Any] = (config.get("format"), config.get("embedding_format")) if ours else (None, None)
        self.quantized = ours or any(stored.format for stored in checkpoint)
        self._scratch: Tensor | None = None

    def names(self) -> Iterator[str]:
        """All keys."""
        return iter(self.checkpoint.tensors)

    def find(self, name: str, dense_shape: tuple[int, ...] | None, embedding: bool = False) -> Found:
        """Says what the header says, else config.json."""
        stored = self.checkpoint.tensors[name]
        format = stored.format
        if format is None and stored.dtype == torch.uint8 and dense_shape is not None and self.quantized:
            named = self._named[embedding]
            if named is None:
                raise QuantizationError(f"{name}: the checkpoint holds uint8 rows and nothing says of which format", [name])
            format = Format.parse(named)
        if format is None:
            return Found(stored.shape, stored.dtype)
        K = stored.in_features or (dense_shape[-1] if dense_shape else None)
        if K is None:
            return Found(None, stored.dtype, format)
        if stored.shape[-1] != format.row_bytes(K):
            raise QuantizationError(
                f"{name}: {format} rows for in_features={K} must have {format.row_bytes(K)} bytes, the checkpoint holds "
                f"{stored.shape[-1]}; were they quantized with another format, or for another model?",
                [name],
            )
        return Found((*stored.shape[:-1], K), stored.dtype, format)

    def fill(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        """Reads, checks, and converts where the entry asks for it."""
        if start == stop:
            return
        stored = self.checkpoint.tensors[entry.name]
        raw = entry.dtype == stored.dtype and (entry.format is not None or entry.shape == stored.shape)
        if raw and stop - start == entry.rows:
            self.checkpoint.read(entry.name, out)
            self.checkpoint.check(entry.name, out)
            return
        self.checkpoint.check(entry.name)
        if raw:
            self.checkpoint.read(entry.name, out, start * stored.row_nbytes)
            return
        step = max(1, _SCRATCH // max(1, stored.row_nbytes))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            piece = self._bytes((last - first) * stored.row_nbytes)
            self.checkpoint.read(entry.name, piece, first * stored.row_nbytes)
            rows = piece.view(stored.dtype).view(last - first if stored.shape else 1, *stored.shape[1:])
            if entry.format is None and stored.dtype == torch.uint8 and entry.shape != stored.shape:
                format = self.find(entry.name, entry.shape).format
                assert format is not None
                rows = dequantize(rows, format, entry.shape[-1], torch.float32)
            fill_rows(entry, rows, out[(first - start) * entry.row_nbytes : (last - start) * entry.row_nbytes])

    def identity(self) -> Any:
        """Size, header and time of change of every file."""
        return self.checkpoint.identity("fast")

    def check_unchanged(self) -> None:
        """Compares sizes and times of change."""
        self.checkpoint.check_unchanged()

    def close(self) -> None:
        """Closes the files."""
        self.checkpoint.close()

    def _bytes(self, size: int) -> Tensor:
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]


class BitsandbytesSource(CheckpointSource):
    """Layers that bitsandbytes stored, each read whole when its turn comes; everything else as it is."""

    quantized = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.quantized = True
        suffixes = tuple(f".{key}" for key in KEYS if key != "weight")
        self._parts = {key for key in checkpoint.tensors if key.endswith(suffixes)}
        self._layer: tuple[str, StoredLayer] | None = None

    def names(self) -> Iterator[str]:
        """Keys, without those that belong to a quantized weight."""
        return (name for name in self.checkpoint.tensors if name not in self._parts)

    def _quantized(self, name: str) -> bool:
        owner = name.removesuffix(".weight")
        stored = self.checkpoint.tensors[name]
        return name.endswith(".weight") and (
            stored.dtype in (torch.int8, torch.uint8) or any(f"{owner}.{key}" in self._parts for key in KEYS)
        )

    def find(self, name: str, dense_shape: tuple[int, ...] | None, embedding: bool = False) -> Found:
        """Reads the layer's quantization state."""
        if not self._quantized(name):
            return super().find(name, dense_shape, embedding)
        stored = self.checkpoint.tensors[name]
        if dense_shape is None or len(dense_shape) != 2:
            raise QuantizationError(f"{name} is quantized in the checkpoint, but not the weight of a linear layer", [name])
        found = stored_format(_States(self.checkpoint), name.removesuffix(".weight"), (dense_shape[0], dense_shape[1]))
        if found is None:
            return Found(stored.shape, stored.dtype)
        return Found(tuple(dense_shape), stored.dtype, *found)

    def fill(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        """Copies rows, or decodes them for a dense entry."""
        if not self._quantized(entry.name):
            super().fill(entry, start, stop, out)
            return
        layer = self._read(entry)
        if layer.format is not None and layer.format == entry.format:
            out.copy_(layer.weight[start:stop].reshape(-1))
            return
        rows = layer.weight[start:stop]
        if layer.format is not None:
            rows = dequantize(rows, layer.format, entry.shape[-1], torch.float32)
        fill_rows(entry, rows, out)

    def _read(self, entry: Entry) -> StoredLayer:
        if self._layer is None or self._layer[0] != entry.name:
            owner = entry.name.removesuffix(".weight")
            keys = [f"{owner}.{key}" for key in KEYS]
            tensors = {key: self.checkpoint.tensor(key) for key in keys if key in self.checkpoint.tensors}
            N, K = entry.dense_shape
            layer = read_layer(tensors, owner, (N, K))
            assert layer is not None
            self._layer = entry.name, layer
        return self._layer[1]


class _States(Mapping[str, Tensor]):
    """A checkpoint's tensors, large ones on meta: what a layer is, without its weight."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        stored = self.checkpoint.tensors[name]
        if stored.nbytes > 1 << 16:
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        return self.checkpoint.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.tensors)

    def __len__(self) -> int:
        return len(self.checkpoint.tensors)


class TensorSource:
    """A mapping of names to tensors, dense or (where `formats` says so) rows; an item is taken when its turn comes.

    A lazy mapping (one that reads or dequantizes in `__getitem__`) holds one tensor at a time.
    """

    def __init__(self, tensors: Mapping[str, Tensor], formats: Mapping[str, tuple[Format, int]] | None = None) -> None:
        self.tensors, self.formats = tensors, formats or {}
        self.quantized = bool(self.formats)
        self._last: tuple[str, Tensor] | None = None

    def names(self) -> Iterator[str]:
        """All keys."""
        return iter(self.tensors)

    def _tensor(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self.tensors[name].detach()
        return self._last[1]

    def find(self, name: str, dense_shape: tuple[int, ...] | None, embedding: bool = False) -> Found:
        """Takes the tensor to look at it."""
        tensor = self._tensor(name)
        if name in self.formats:
            format, K = self.formats[name]
            return Found((*tensor.shape[:-1], K), tensor.dtype, format)
        return Found(tuple(tensor.shape), tensor.dtype)

    def fill(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        """Copies or quantizes rows."""
        tensor = self._tensor(entry.name)
        rows = tensor[start:stop] if tensor.dim() else tensor.reshape(1)
        if entry.name in self.formats:
            out.view(rows.shape).copy_(rows)
            return
        step = max(1, _SCRATCH // max(1, entry.row_nbytes))
        for first in range(0, stop - start, step):
            piece = rows[first : first + step].cpu().contiguous()
            fill_rows(entry, piece, out[first * entry.row_nbytes : (first + len(piece)) * entry.row_nbytes])

    def identity(self) -> Any:
        """None: what a mapping holds can't be told apart from what it held."""
        return None

    def check_unchanged(self) -> None:
        """Nothing to compare with."""

    def close(self) -> None:
        """Releases the last tensor."""
        self._last = None


def open_source(path: Any) -> CheckpointSource:
    """The source for a local checkpoint, by what its config.json and headers say.

    Raises:
        FileNotFoundError: nothing is there.
        NotImplementedError: it is quantized by a method that halfbyte can't read.
        QuantizationError: a file is damaged.
    """
    checkpoint = Checkpoint(path)
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    states = any(".quant_state.bitsandbytes__" in name for name in checkpoint.tensors)
    if method == "bitsandbytes" or (method is None and states):
        return BitsandbytesSource(checkpoint)
    if method not in (None, "halfbyte"):
        checkpoint.close()
        raise NotImplementedError(
            f"{checkpoint.path}: quantized by {method}; halfbyte reads dense checkpoints, its own and those of bitsandbytes"
        )
    return CheckpointSource(checkpoint)


def module_source(model: nn.Module) -> TensorSource:
    """A model's parameters and persistent buffers as they are, packed rows with their formats."""
    from halfbyte.checkpoint.layout import named_tensors, packed_shape

    formats = {}
    for name, owners in named_tensors(model, aliases=True).items():
        module, attribute = owners[0]
        shape = packed_shape(module, attribute)
        if isinstance(module, Packed) and shape is not None:
            formats[name] = module.format, shape[-1]
    tensors = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    return TensorSource(tensors, formats)
