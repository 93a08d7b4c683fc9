"""Local checkpoints as files: headers, byte ranges and checksums of safetensors, read with `pread` and never mapped.

A mapped file that shrinks kills the process (SIGBUS), and its pages count as this process's; `pread` puts exactly the asked
bytes into memory that the caller owns, a bucket or a parameter.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format

__all__ = ["DTYPES", "Checkpoint", "Stored", "checksum_of", "memory_of"]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors headers."""

VERSION = 1
"""Version of the JSON under the header key `halfbyte`, and of the rules by which rows are made."""

_HEADER_LIMIT = 100 << 20  # bytes; safetensors' own
_CHUNK = 8 << 20  # bytes that are read before they are summed
INDEX = "model.safetensors.index.json"
NAMES_WEIGHTS = "transformers_weights"
"""Key of config.json that names the weights or their index, where they are not found by their usual names."""
_PART = re.compile(r"-\d+-of-(?!0*1\.)\d+")  # one of several: without an index a folder of an interrupted run


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint.

    Attributes:
        name: its key.
        dtype: as stored; uint8 for packed rows.
        shape: as stored: (..., row_bytes) for packed rows.
        file: index of its file in the checkpoint.
        offset: of its first byte in the file.
        format: of its rows if the file says it.
        in_features: K of its rows if the file says it.
        checksum: CRC-32 of its bytes (8 hexadecimal digits) if the file says it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: int
    offset: int
    format: Format | None = None
    in_features: int | None = None
    checksum: str | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of dimension 0; all of a scalar."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize


def memory_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a contiguous CPU tensor as a writable buffer (without NumPy, which torch may lack)."""
    assert tensor.is_cpu and tensor.is_contiguous()
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


def checksum_of(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes, continuing `start` (2.8 GB/s here, where BLAKE2b makes 0.6)."""
    return zlib.crc32(memory_of(tensor), start)


class Checkpoint:
    """A safetensors checkpoint: one file, or a folder with an index or one file. Only headers are read on opening.

    Args:
        path: a `.safetensors` file, an index, or a folder that holds either.

    Attributes:
        path: as given, resolved.
        files: its files.
        tensors: what it holds, by key, in the order of the files.
        config: its config.json, or {}.
        headers: the `halfbyte` entry of each file's header, or None.

    Raises:
        FileNotFoundError: no such path, or no safetensors file in the folder.
        QuantizationError: a file is truncated or not safetensors, or the index names what is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        config = (self.path if self.path.is_dir() else self.path.parent) / "config.json"
        self.config: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
        self.files, named = _files_of(self.path, self.config.get(NAMES_WEIGHTS))
        self.tensors: dict[str, Stored] = {}
        self.headers: list[dict[str, Any] | None] = []
        self._descriptors: list[int] = []
        self._stats: list[tuple[int, int]] = []
        self._sound: set[str] = set()
        try:
            for index, file in enumerate(self.files):
                self._open(index, file)
        except BaseException:
            self.close()
            raise
        missing = [key for key in named if key not in self.tensors]
        if missing:
            raise QuantizationError(
                f"{self.path}: the index names {len(missing)} tensors that its files don't hold, such as {missing[0]}",
                missing,
            )

    def _open(self, index: int, file: Path) -> None:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors.append(descriptor)
        stat = os.fstat(descriptor)
        self._stats.append((stat.st_size, stat.st_mtime_ns))
        header, begin = _header(file, descriptor, stat.st_size)
        metadata = header.pop("__metadata__", {})
        ours = json.loads(metadata["halfbyte"]) if "halfbyte" in metadata else None
        if ours is not None and ours.get("version") != VERSION:
            raise QuantizationError(f"{file}: of version {ours.get('version')}, this halfbyte reads version {VERSION}")
        self.headers.append(ours)
        described = ours["tensors"] if ours is not None else {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise NotImplementedError(f"{file}: {name} has dtype {entry['dtype']}; known are {', '.join(DTYPES)}")
            first, last = entry["data_offsets"]
            extra = described.get(name, {})
            stored = Stored(
                name,
                DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                index,
                begin + first,
                Format.parse(extra["format"]) if "format" in extra else None,
                extra.get("in_features"),
                extra.get("checksum"),
            )
            if last - first != stored.nbytes or begin + last > stat.st_size:
                raise QuantizationError(
                    f"{file}: truncated or damaged: {name} ends at byte {begin + last}, the file at {stat.st_size}", [name]
                )
            self.tensors[name] = stored

    def read(self, name: str, out: Tensor, start: int = 0) -> None:
        """Reads `out.numel()` bytes of a tensor, from its byte `start` on, into `out` (uint8, contiguous, CPU).

        Raises:
            QuantizationError: the file has shrunk or changed since it was opened.
        """
        stored = self.tensors[name]
        memory = memoryview(memory_of(out)).cast("B")
        done, size = 0, len(memory)
        while done < size:
            got = os.preadv(self._descriptors[stored.file], [memory[done : done + (1 << 30)]], stored.offset + start + done)
            if got == 0:
                raise QuantizationError(f"{self.files[stored.file]}: truncated while {name} was read", [name])
            done += got

    def tensor(self, name: str) -> Tensor:
        """All of a tensor, in memory of its own."""
        stored = self.tensors[name]
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(name, value.view(-1).view(torch.uint8) if value.dim() else value.view(1).view(torch.uint8))
        return value

    def check(self, name: str, content: Tensor | None = None) -> None:
        """Compares a tensor with its checksum, once; does nothing where the file gives none.

        Args:
            name: its key.
            content: all of its bytes if they are in memory; None: they are read.

        Raises:
            QuantizationError: they differ.
        """
        stored = self.tensors[name]
        if stored.checksum is None or name in self._sound:
            return
        found = self.checksum(name) if content is None else checksum_of(content)
        if f"{found:08x}" != stored.checksum:
            raise QuantizationError(
                f"{self.files[stored.file]}: {name} is damaged: its checksum is {found:08x}, not {stored.checksum} as the "
                f"header says",
                [name],
            )
        self._sound.add(name)

    def checksum(self, name: str) -> int:
        """CRC-32 of a tensor's bytes in the file, read through a buffer of 8 MiB."""
        size, found = self.tensors[name].nbytes, 0
        scratch = torch.empty(min(size, _CHUNK), dtype=torch.uint8)
        for start in range(0, size, _CHUNK):
            piece = scratch[: min(_CHUNK, size - start)]
            self.read(name, piece, start)
            found = checksum_of(piece, found)
        return found

    def check_unchanged(self) -> None:
        """Raises QuantizationError if a file's size or time of change is not what it was on opening."""
        for file, descriptor, before in zip(self.files, self._descriptors, self._stats, strict=True):
            stat = os.fstat(descriptor)
            if (stat.st_size, stat.st_mtime_ns) != before:
                raise QuantizationError(f"{file}: was changed while it was being read")

    def identity(self, verify: str, tick: Callable[[int], None] = lambda nbytes: None) -> list[Any]:
        """What names this very content: per file its size, header and time of change, or with "full" all of its bytes."""
        import hashlib

        found: list[Any] = []
        for file, descriptor, (size, mtime) in zip(self.files, self._descriptors, self._stats, strict=True):
            digest = hashlib.sha256()
            _, begin = _header(file, descriptor, size)
            scratch = torch.empty(_CHUNK, dtype=torch.uint8)
            memory = memoryview(memory_of(scratch)).cast("B")
            end = size if verify == "full" else begin
            for start in range(0, end, _CHUNK):
                got = os.preadv(descriptor, [memory[: min(_CHUNK, end - start)]], start)
                digest.update(memory[:got])
                tick(got)
            found.append([file.name, size, None if verify == "full" else mtime, digest.hexdigest()])
        return found

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __del__(self) -> None:
        if hasattr(self, "_descriptors"):  # layers that are read at their first use keep it open
            self.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Stored]:
        return iter(self.tensors.values())


def _files_of(path: Path, chosen: str | None = None) -> tuple[list[Path], list[str]]:
    """Files, and the keys that an index promises; `chosen`: the file that a folder's config.json names."""
    if chosen is not None and path.is_dir():
        if os.path.isabs(chosen) or ".." in Path(chosen).parts:
            raise QuantizationError(f"{path}: its config.json names {chosen!r} as weights, which is not in the folder")
        return _files_of(path / chosen)
    single = path / "model.safetensors"
    if single.is_file():  # where a folder holds both, transformers takes this one, too
        return [single], []
    index = path / INDEX if path.is_dir() else path
    if index.name.endswith(".index.json") and index.is_file():
        content = json.loads(index.read_text())
        weight_map = content["weight_map"]
        files = [index.parent / name for name in dict.fromkeys(weight_map.values())]
        gone = [file.name for file in files if not file.is_file()]
        if gone:
            raise FileNotFoundError(f"{index}: names {', '.join(gone[:3])}, which the folder has not")
        return files, list(weight_map)
    if path.is_file():
        return [path], []
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint at {path}")
    files = [file for file in sorted(path.glob("*.safetensors")) if not _PART.search(file.name)]
    if len(files) != 1:
        raise FileNotFoundError(
            f"{path}: needs {INDEX} or one .safetensors file, found {', '.join(f.name for f in files[:3]) or 'none'}; "
            f"other kinds of checkpoints must be saved as safetensors first"
        )
    return files, []


def _header(file: Path, descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    """(header, offset of the first tensor)."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > _HEADER_LIMIT or 8 + length > size:
        raise QuantizationError(f"{file}: truncated, or not a safetensors file: {size} bytes, a header of {length}")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
    except ValueError as error:
        raise QuantizationError(f"{file}: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise QuantizationError(f"{file}: its header is not a JSON object")
    return header, 8 + length
