"""What checkpoint files hold, from their headers: no tensor is read."""

from __future__ import annotations

import fnmatch
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.formats import Format
from halfbyte.memory.plan import _aligned

__all__ = ["StoredReport", "StoredTensor", "report_headers"]

_LIMIT = 100 << 20  # bytes of a header; safetensors' own


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: its key.
        dtype: as safetensors names it, "U8" for packed rows.
        shape: as stored.
        bytes: its size in the file.
        format: of packed rows, from the file's own header or the folder's config; None if dense or not said.
        file: the file's name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    format: str | None
    file: str


@dataclass(frozen=True)
class StoredReport:
    """The tensors of a folder.

    Attributes:
        rows: a `StoredTensor` each, in file order.
    """

    rows: tuple[StoredTensor, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.bytes for row in self.rows)

    def table(self, every: bool = False) -> str:
        """An aligned table.

        Args:
            every: a line per tensor, instead of one for those whose names differ in numbers only.
        """
        groups: dict[tuple[str, str, str], list[StoredTensor]] = {}
        for row in self.rows:
            name = row.name if every else re.sub(r"\b\d+\b", "*", row.name)
            groups.setdefault((name, row.format or "", row.dtype), []).append(row)
        lines = [
            (name, str(len(rows)), format or "dense", dtype, f"{sum(row.bytes for row in rows) / 1e6:,.2f}")
            for (name, format, dtype), rows in groups.items()
        ]
        total = ("total", str(len(self.rows)), "", "", f"{self.bytes / 1e6:,.2f}")
        return _aligned([("tensor", "count", "format", "dtype", "MB"), *lines], total)

    def __str__(self) -> str:
        return self.table()


def report_headers(path: Path) -> StoredReport:
    """Reads the headers of a `.safetensors` file, or of all in a folder.

    Args:
        path: the file or folder.

    Returns:
        A `StoredReport`.

    Raises:
        FileNotFoundError: no such file, or a folder without one.
        ValueError: a file that is not safetensors.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"DIR must be a .safetensors file or a folder with some, got {str(path)!r}")
    config = path / "config.json" if path.is_dir() else path.parent / "config.json"
    quantization = json.loads(config.read_text()).get("quantization_config") or {} if config.is_file() else {}
    rows: list[StoredTensor] = []
    for file in files:
        header = _header(file)
        ours = json.loads(header.pop("__metadata__", {}).get("halfbyte", "{}")).get("tensors", {})
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            format = ours.get(name, {}).get("format")
            if format is None and entry["dtype"] == "U8":
                format = _format_in(quantization, name)
            rows.append(StoredTensor(name, entry["dtype"], tuple(entry["shape"]), last - first, format, file.name))
    return StoredReport(tuple(rows))


def _header(file: Path) -> dict[str, Any]:
    with open(file, "rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        text = stream.read(length) if 0 < length <= _LIMIT else b""
    if not text or len(text) != length or not text.startswith(b"{"):
        raise ValueError(f"DIR: {file.name} is not a safetensors file: it has no header")
    return dict(json.loads(text))


def _format_in(quantization: dict[str, Any], name: str) -> str | None:
    """The format that a config's `quantization_config` gives a tensor, by its module's name."""
    if quantization.get("quant_method") != "halfbyte":
        return None
    module = name.rpartition(".")[0]
    patterns = quantization.get("modules") or ()
    for pattern in patterns:
        if fnmatch.fnmatchcase(module, pattern):
            given = patterns[pattern] if isinstance(patterns, dict) else quantization["format"]
            return str(Format.parse(given))
    embedding = quantization.get("embedding_format")
    return str(Format.parse(embedding)) if embedding else None
