"""Dense checkpoints as files of any kind: names, shapes and dtypes at once, rows of a tensor when they are wanted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte.checkpoint.files import Checkpoint
from halfbyte.checkpoint.sources import CheckpointSource, open_source
from halfbyte.errors import QuantizationError

__all__ = ["GgufReader", "PickleReader", "Reader", "SafetensorsReader", "open_reader"]

_PICKLE = "pytorch_model.bin"


class Reader(Protocol):
    """The tensors of a checkpoint. A tensor's rows lie along its last dimension; one of a single dimension has rows of one
    element each.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start to stop, counted over all dimensions but the last: shape (stop - start, K), of `dtypes[name]`."""

    def identity(self) -> Any:
        """What names this very content, in JSON."""

    def check_unchanged(self) -> None:
        """Raises QuantizationError if a file is no longer what it was on opening."""

    def close(self) -> None:
        """Closes the files."""


def open_reader(path: Path) -> Reader:
    """The reader for a folder: of safetensors, else of torch pickles, as transformers chooses.

    Raises:
        FileNotFoundError: it holds neither.
        NotImplementedError: it is quantized already.
        QuantizationError: a file is damaged.
    """
    try:
        return SafetensorsReader(open_source(path))
    except FileNotFoundError:
        index = path / f"{_PICKLE}.index.json"
        if index.is_file():
            named = json.loads(index.read_text())["weight_map"].values()
            return PickleReader([path / name for name in dict.fromkeys(named)])
        if (path / _PICKLE).is_file():
            return PickleReader([path / _PICKLE])
        raise


class SafetensorsReader:
    """Files that are read with `pread`, a few rows at a time."""

    def __init__(self, source: CheckpointSource) -> None:
        self._checkpoint: Checkpoint = source.checkpoint
        if source.quantized:
            raise NotImplementedError(f"{self._checkpoint.path} is quantized already; load_model loads it as it is")
        self.shapes = {stored.name: stored.shape for stored in self._checkpoint}
        self.dtypes = {stored.name: stored.dtype for stored in self._checkpoint}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Reads exactly these bytes."""
        K, dtype = row_length(self.shapes[name]), self.dtypes[name]
        rows = torch.empty((stop - start, K), dtype=dtype)
        if rows.numel():
            self._checkpoint.read(name, rows.view(-1).view(torch.uint8), start * K * dtype.itemsize)
        return rows

    def identity(self) -> Any:
        """Size, header and time of change of every file."""
        return self._checkpoint.identity("fast")

    def check_unchanged(self) -> None:
        """Compares sizes and times of change."""
        self._checkpoint.check_unchanged()

    def close(self) -> None:
        """Closes the files."""
        self._checkpoint.close()


class _MappedFiles:
    """Files that another library maps into memory: they must not change meanwhile, and are what they are by their stat."""

    def __init__(self, files: list[Path]) -> None:
        gone = [file.name for file in files if not file.is_file()]
        if gone:
            raise FileNotFoundError(f"{files[0].parent}: {', '.join(gone[:3])} does not exist")
        self._before = {file: self._stat(file) for file in files}

    @staticmethod
    def _stat(file: Path) -> tuple[int, int]:
        stat = os.stat(file)
        return stat.st_size, stat.st_mtime_ns

    def identity(self) -> Any:
        """Size, time of change and beginning of every file."""
        found = []
        for file, (size, mtime) in self._before.items():
            with open(file, "rb") as stream:
                found.append([file.name, size, mtime, hashlib.sha256(stream.read(1 << 20)).hexdigest()])
        return found

    def check_unchanged(self) -> None:
        """Compares sizes and times of change."""
        for file, before in self._before.items():
            if self._stat(file) != before:
                raise QuantizationError(f"{file}: was changed while it was being read")


class PickleReader(_MappedFiles):
    """`pytorch_model.bin` and its shards: mapped by torch, and read as weights only (no code in them is run)."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(files)
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError as error:
                raise NotImplementedError(
                    f"{file}: torch can't map it ({str(error).splitlines()[0]}); load it with transformers and save it as "
                    f"safetensors first"
                ) from error
            self._tensors.update({name: value for name, value in found.items() if isinstance(value, Tensor)})
        self.shapes = {name: tuple(value.shape) for name, value in self._tensors.items()}
        self.dtypes = {name: value.dtype for name, value in self._tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """A view of the mapped file."""
        return self._tensors[name].reshape(-1, row_length(self.shapes[name]))[start:stop]

    def close(self) -> None:
        """Releases the mappings."""
        self._tensors = {}


class GgufReader(_MappedFiles):
    """A GGUF file: mapped, decoded a few rows at a time.

    Args:
        file: the file.
        decode: makes values of the blocks of some rows: (mapped rows, GGML type) to a tensor of the same rows.
        dtype: what `decode` makes of blocks; plain floats stay what they are, but bfloat16 is taken for blocks.

    Raises:
        ImportError: the package gguf is missing.
    """

    def __init__(self, file: Path, decode: Callable[[Any, Any], Tensor], dtype: torch.dtype) -> None:
        super().__init__([file])
        try:
            import gguf
        except ImportError as error:
            raise ImportError("reading GGUF needs the package gguf; pip install gguf") from error
        self._decode, plain = decode, {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}
        self._tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        self._plain = {name for name, tensor in self._tensors.items() if tensor.tensor_type in plain}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in self._tensors.items()
        }
        self.dtypes = {
            name: torch.from_numpy(tensor.data[:0].copy()).dtype if name in self._plain else dtype
            for name, tensor in self._tensors.items()
        }

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Decodes the blocks of these rows."""
        tensor, K = self._tensors[name], row_length(self.shapes[name])
        if name in self._plain:
            return torch.from_numpy(tensor.data.reshape(-1, K)[start:stop].copy())
        stored = tensor.data.reshape(-1, tensor.data.shape[-1])[start:stop]
        return self._decode(stored, tensor.tensor_type).reshape(-1, K)

    def close(self) -> None:
        """Releases the mapping."""
        self._tensors = {}


def row_length(shape: tuple[int, ...]) -> int:
    """Elements of a row: the last dimension, or 1 where there is one dimension or none."""
    return shape[-1] if len(shape) > 1 else 1
