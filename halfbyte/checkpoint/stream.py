"""quantize_checkpoint: a dense checkpoint becomes a quantized folder without a model and without much memory."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.files import INDEX, VERSION, Checkpoint
from halfbyte.checkpoint.folder import MAX_SHARD_BYTES, quantization_config, write_folder
from halfbyte.checkpoint.load import progress_bar
from halfbyte.checkpoint.sources import CheckpointSource, Entry, StoredSource, TensorSource, open_source
from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.report import Report, ReportRow
from halfbyte.nn.skip import SkipRules
from halfbyte.ops.quantize import FLOAT_DTYPES

__all__ = ["quantize_checkpoint"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_SLACK = 1 << 20  # headers, index, config.json


def quantize_checkpoint(
    src: str | os.PathLike[str] | Mapping[str, Tensor],
    out: str | os.PathLike[str],
    format: str | Format = "nf4",
    *,
    model: nn.Module | None = None,
    linears: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    embedding_format: str | Format | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dry_run: bool = False,
    progress: bool = True,
) -> Report:
    """Streams a dense checkpoint to a quantized folder, which `load_quantized` and (with its config) transformers load.

    A few megabytes of a tensor are in memory at a time. Shards appear under their names when they are complete, synced and
    read back against their checksums; the index comes last. Run again after an interruption, it keeps the shards that are
    finished (of files; of a mapping nothing is kept). The source is only read.

    Args:
        src: a local folder, `.safetensors` file or index; or any mapping of names to tensors, such as one that reads another
            kind of file lazily (each tensor is then taken twice, and one is in memory at a time).
        out: folder to make; one that holds another checkpoint is refused.
        format: a `Format` or its name, for the linear layers.
        model: the checkpoint's model, best on meta: its linear layers are quantized, by the rules of `quantize_model`.
        linears: names of the linear layers, instead of `model`.
        skip: names that stay dense, see `quantize_model`.
        embedding_format: a format for embedding tables that are not tied (needs `model`); None leaves them dense.
        config: content of config.json; None: that of the source folder, if it has one.
        max_shard_bytes: bytes of one output file; a larger tensor has one of its own.
        dry_run: only say what would be written.
        progress: show a progress bar in a terminal (needs tqdm).

    Returns:
        A `Report` with a row per tensor: its bytes on disk, its bytes in the source, and why it stays dense. `.bytes` is the
        disk space that the weights take.

    Raises:
        TypeError: neither or both of `model` and `linears` are given.
        QuantizationError: nothing would be quantized, or the source is damaged or changes meanwhile.
        NotImplementedError: the source is quantized already.
        FileExistsError: `out` holds another checkpoint.
        OSError: not enough room (before anything is written), or the disk is full; finished shards are kept.

    Example:
        >>> import torch, halfbyte, tempfile
        >>> from halfbyte.checkpoint import quantize_checkpoint
        >>> weights = {"up.weight": torch.randn(128, 64), "norm.weight": torch.ones(64)}
        >>> quantize_checkpoint(weights, tempfile.mkdtemp(), linears=["up"], progress=False).quantized
        ('up.weight',)
    """
    if (model is None) == (linears is None):
        raise TypeError("quantize_checkpoint: give model or linears: names of tensors don't say which are linear layers")
    if embedding_format is not None and model is None:
        raise TypeError("quantize_checkpoint: embedding_format needs model")
    fmt, folder = Format.parse(format), Path(out)
    table = None if embedding_format is None else Format.parse(embedding_format)
    with ExitStack() as stack:
        source: Any = TensorSource(src) if isinstance(src, Mapping) else open_source(src)
        stack.enter_context(closing(source))
        if source.quantized:
            raise NotImplementedError(f"quantize_checkpoint: {src} is quantized already; load_quantized loads it as it is")
        names = list(source.names())
        wanted, reasons = _chosen(model, linears, skip, fmt, table)
        entries, rows = _entries(source, names, wanted, reasons)
        found = Report(tuple(rows))
        if not found.quantized:
            raise QuantizationError(
                f"quantize_checkpoint: nothing would be quantized: the checkpoint has {', '.join(names[:3])}, ..., the "
                f"linear layers are {', '.join(list(wanted)[:3]) or 'none'}",
                names,
            )
        if dry_run:
            return found
        if config is None and isinstance(source, CheckpointSource):
            config = source.checkpoint.config or None
        if config is not None:
            config = {**config, "quantization_config": _config(entries, model)}
        stream(source, entries, folder, config=config, max_shard_bytes=max_shard_bytes, progress=progress)
        if isinstance(source, CheckpointSource):
            copy_rest(source.checkpoint.path, folder)
    return found


def _chosen(
    model: nn.Module | None, linears: Iterable[str] | None, skip: Iterable[str] | None, format: Format, table: Format | None
) -> tuple[dict[str, Format], dict[str, str]]:
    """(format by module name, reason to stay dense by module name)."""
    rules = SkipRules(skip)
    if linears is not None:
        named = {name: rules.by_name(name) for name in linears}
        return {n: format for n, reason in named.items() if not reason}, {n: r for n, r in named.items() if r}
    assert model is not None
    by_module, wanted, reasons = rules.of_model(model), {}, {}
    for name, module in model.named_modules():
        chosen = format if isinstance(module, nn.Linear) else table if isinstance(module, nn.Embedding) else None
        if module in by_module:
            reasons[name] = by_module[module]
        elif chosen is not None:
            wanted[name] = chosen
    return wanted, reasons


def _entries(
    source: Any, names: Sequence[str], wanted: Mapping[str, Format], reasons: Mapping[str, str]
) -> tuple[list[Entry], list[ReportRow]]:
    entries, rows = [], []
    for name in names:
        found = source.find(name, None)
        owner = name.removesuffix(".weight") if name.endswith(".weight") else name
        format = wanted.get(owner) if name != owner and len(found.shape) >= 2 and found.shape[-1] else None
        reason = reasons.get(owner) if name != owner else None
        if format is not None and found.dtype not in (*FLOAT_DTYPES, torch.float64):
            format, reason = None, f"{found.dtype} has no packed form"
        dense = Entry(name, found.shape, found.dtype)
        entry = dense if format is None else Entry.packed(name, found.shape, format)
        entries.append(entry)
        rows.append(ReportRow(name, str(format) if format else None, entry.nbytes, dense.nbytes, reason))
    return entries, rows


def stream(
    source: StoredSource,
    entries: Sequence[Entry],
    folder: Path,
    *,
    config: Mapping[str, Any] | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Writes what `source` fills: room is looked for first, finished shards of an interrupted run are kept, all are checked.

    Args:
        source: where the entries' bytes come from; one without an identity is written from the beginning.
        entries: what to write, in order.
        folder: folder to make; one that holds something else is refused.
        config: content of config.json, or None for none.
        max_shard_bytes: bytes of one output file.
        progress: show a progress bar in a terminal (needs tqdm).

    Raises:
        FileExistsError: `folder` holds another checkpoint.
        OSError: not enough room (before anything is written), or the disk is full; finished shards are kept.
        QuantizationError: a shard is not on disk what was written, or the source was changed meanwhile.
    """
    need, key = sum(entry.nbytes for entry in entries), _key(source, entries)
    _check_room(folder, key, need)
    with progress_bar(need, progress, "quantizing") as tick:
        write_folder(
            folder,
            entries,
            source,
            config=config,
            key=key,
            resume=True,
            check=True,
            max_shard_bytes=max_shard_bytes,
            tick=tick,
        )
    source.check_unchanged()


def _key(source: StoredSource, entries: Sequence[Entry]) -> str:
    # What a mapping holds can't be told apart from what it held: nothing of an earlier run is kept.
    content = source.identity() or uuid.uuid4().hex
    made_from = [VERSION, content, [[e.name, list(e.shape), str(e.dtype), str(e.format)] for e in entries]]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def _check_room(folder: Path, key: str, total: int) -> None:
    """Refuses a folder with another checkpoint, and a disk without room for what is not there yet."""
    there = 0
    for file in folder.glob("model-*.safetensors") if folder.is_dir() else ():
        try:
            with Checkpoint(file) as shard:
                if any(header is not None and header.get("key") == key for header in shard.headers):
                    there += file.stat().st_size
        except (OSError, ValueError, KeyError, NotImplementedError):
            continue  # the rest of an interrupted run of something else: replaced
    if (folder / INDEX).exists() or (folder / "model.safetensors").exists():
        with Checkpoint(folder) as held:
            if not all(header is not None and header.get("key") == key for header in held.headers):
                raise FileExistsError(
                    f"quantize_checkpoint: {folder} holds another checkpoint; delete it or choose another folder"
                )
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    need, free = total + _SLACK - there, shutil.disk_usage(parent).free
    if free < need:
        raise OSError(
            errno.ENOSPC,
            f"quantize_checkpoint: {folder} needs {need / 1e6:.1f} MB, {free / 1e6:.1f} MB are free; nothing was written",
        )


def _config(entries: Sequence[Entry], model: nn.Module | None) -> dict[str, Any]:
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)} if model else set()
    packed = {entry.name.removesuffix(".weight"): str(entry.format) for entry in entries if entry.format}
    return quantization_config(
        {name: format for name, format in packed.items() if name not in tables},
        {name: format for name, format in packed.items() if name in tables},
    )


def copy_rest(src: Path, out: Path, *, replace: bool = True) -> None:
    """Tokenizer, generation settings and the like: every small file of the source that holds no weights."""
    if not src.is_dir():
        return
    for file in src.iterdir():
        other = file.name != "config.json" and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS)
        if other and file.is_file() and (replace or not (out / file.name).exists()):
            shutil.copyfile(file, out / file.name)
