"""The one layout of quantized folders, and its writer: safetensors shards, an index, config.json.

Shards get their final names when they are complete and on disk; then comes the index, so a folder without it is not a
checkpoint and a crash at any point leaves what was there before. Two files can't be replaced at once: where there is a
config.json, the new index comes under another name, and the new config.json, which names it, is the one step at which the
folder changes, to us and to transformers. Then the index gets its usual name, and config.json names it no longer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.files import DTYPES, INDEX, NAMES_WEIGHTS, VERSION, Checkpoint, checksum_of, memory_of
from halfbyte.checkpoint.sources import Entry, Source, module_source
from halfbyte.errors import QuantizationError
from halfbyte.nn.embedding import QuantEmbedding
from halfbyte.nn.packed import Packed
from halfbyte.optim.sharding import is_dtensor

__all__ = ["plan_shards", "save_quantized", "write_folder", "write_shard"]

MAX_SHARD_BYTES = 5 << 30
_CHUNK = 8 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STAGED = "model.new-"
_PENDING = "0" * 8  # stands for a checksum until its tensor is written: the header's length is then known


def plan_shards(entries: Sequence[Entry], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[list[Entry]]:
    """Entries by shard, in order; a shard is over the limit only if one tensor is."""
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def write_folder(
    directory: Path,
    entries: Sequence[Entry],
    source: Source,
    *,
    config: Mapping[str, Any] | None = None,
    key: str | None = None,
    resume: bool = False,
    check: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tick: Callable[[int], None] = lambda nbytes: None,
) -> list[Path]:
    """Writes a quantized folder, one piece of a tensor at a time.

    Args:
        directory: made if it doesn't exist. Weights that are in it already are replaced at the end, when all is written.
        entries: what to write, in order.
        source: fills the entries.
        config: content of config.json, or None for none.
        key: what the content was made from, put into each header.
        resume: keep finished shards of an interrupted run with the same key whose checksums hold.
        check: read each shard back and compare it with its checksums.
        max_shard_bytes: limit of a shard.
        tick: called with the bytes of every piece.

    Returns:
        The shards.

    Raises:
        OSError: the disk is full or can't be written; finished shards stay for `resume`, nothing else is touched.
        QuantizationError: a shard is not on disk what was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(entries, max_shard_bytes)
    files, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if not resume:
            name = _unused(directory, name)
        file = directory / name
        if not (resume and _finished(file, shard, key)):
            write_shard(file, shard, source, key, tick)
            if check and not _finished(file, shard, key):
                file.unlink(missing_ok=True)
                raise QuantizationError(f"{file}: reading it back gave something else than was written")
        else:
            tick(sum(entry.nbytes for entry in shard))
        files.append(file)
        weight_map.update({entry.name: name for entry in shard})
    metadata = {"total_size": sum(entry.nbytes for entry in entries)}
    _commit(directory, files, json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n", config)
    sweep(directory)
    return files


def _commit(directory: Path, files: Sequence[Path], index: str, config: Mapping[str, Any] | None) -> None:
    """Makes these shards the folder's weights, with this config.json, or with the one that is there if it is None."""
    there = directory / "config.json"
    if config is None and there.is_file():  # which may name the weights, if they were to be replaced before
        held = json.loads(there.read_text())
        config = held if NAMES_WEIGHTS in held else None
    if config is not None:
        config = {key: value for key, value in config.items() if key != NAMES_WEIGHTS}
        staged = f"{_STAGED}{hashlib.sha256(index.encode()).hexdigest()[:16]}.safetensors.index.json"
        replace_file(directory / staged, index)
        replace_file(there, _as_json({**config, NAMES_WEIGHTS: staged}))
    replace_file(directory / INDEX, index)
    for old in directory.glob("model*.safetensors"):  # what the index no longer names
        if old not in files:
            old.unlink(missing_ok=True)
    if config is not None:
        replace_file(there, _as_json(config))
        for old in directory.glob(f"{_STAGED}*"):  # of interrupted saves too
            old.unlink(missing_ok=True)


def _as_json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"


def sweep(directory: Path) -> None:
    """Removes what processes of this machine that are no more had not finished."""
    for temporary in (*directory.glob(".*.tmp"), *directory.glob(".*.old")):
        parts = temporary.name.split(".")
        if len(parts) > 4 and parts[-4] == _host() and not Path("/proc", parts[-3]).exists():
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    """A hidden name beside `path` that says which machine and process is writing there."""
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _unused(directory: Path, name: str) -> str:
    """A shard name that does not overwrite one that may be in use: the index says which names count."""
    number = 1
    stem, found = name.removesuffix(".safetensors"), name
    while (directory / found).exists():
        number += 1
        found = f"{stem}-v{number}.safetensors"
    return found


def replace_file(file: Path, text: str) -> None:
    """Writes a small file so that it is there whole or not at all."""
    temporary = temporary_of(file)
    try:
        with open(temporary, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(file.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(shard: Sequence[Entry], key: str | None, checksums: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    offset = 0
    for entry in shard:
        rows = {"format": str(entry.format), "in_features": entry.in_features} if entry.format else {}
        described[entry.name] = {**rows, "checksum": checksums.get(entry.name, _PENDING)}
        end = offset + entry.nbytes
        tensors[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    ours = {"version": VERSION, **({"key": key} if key else {}), "tensors": described}
    text = json.dumps({"__metadata__": {"format": "pt", "halfbyte": json.dumps(ours)}, **tensors}).encode()
    return text + b" " * (-(8 + len(text)) % 64)


def _finished(file: Path, shard: Sequence[Entry], key: str | None) -> bool:
    """Whether a shard of an interrupted run is this one, whole."""
    try:
        with Checkpoint(file) as found:
            mine = _header(shard, key, {name: stored.checksum or "" for name, stored in found.tensors.items()})
            with open(file, "rb") as stream:
                if stream.read(8 + len(mine)) != len(mine).to_bytes(8, "little") + mine:
                    return False
            for entry in shard:
                found.check(entry.name)
    except (OSError, ValueError, KeyError):
        return False
    return True


def write_shard(
    file: Path, shard: Sequence[Entry], source: Source, key: str | None, tick: Callable[[int], None]
) -> None:
    """Writes one file so that it has its name only when it is whole and on disk; its header says formats and checksums."""
    temporary = temporary_of(file)
    begin = 8 + len(_header(shard, key, {}))
    checksums: dict[str, str] = {}
    scratch = torch.empty(0, dtype=torch.uint8)
    offset = begin
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            for entry in shard:
                found, step = 0, max(1, _CHUNK // max(1, entry.row_nbytes))
                for first in range(0, entry.rows, step):
                    last = min(first + step, entry.rows)
                    size = (last - first) * entry.row_nbytes
                    if scratch.numel() < size:
                        scratch = torch.empty(size, dtype=torch.uint8)
                    piece = scratch[:size]
                    source.fill(entry, first, last, piece)
                    found = checksum_of(piece, found)
                    _write_all(descriptor, piece, offset)
                    offset += size
                    tick(size)
                checksums[entry.name] = f"{found:08x}"
            header = _header(shard, key, checksums)
            beginning = bytearray(len(header).to_bytes(8, "little") + header)
            _write_all(descriptor, torch.frombuffer(beginning, dtype=torch.uint8), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            need = sum(entry.nbytes for entry in shard)
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno or 0)}: {file} needs {need / 1e6:.1f} MB; finished shards are kept, nothing else "
                f"was changed",
            ) from error
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(file.parent)


def _write_all(descriptor: int, data: Tensor, offset: int) -> None:
    memory = memoryview(memory_of(data)).cast("B")
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done : done + (1 << 30)], offset + done)


def save_quantized(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Saves a quantized model: packed rows as they are, everything else beside them, in a folder of safetensors files.

    Names are those of the state dict, tied tensors are written once. The header of each file says the format, K and
    checksum of every tensor. A transformers model's config.json is written too, so that `from_pretrained` (with
    `peft_bridge` imported) loads the folder as well. What was in the folder is replaced when all is written; a crash leaves
    the old content or the new, whole, to `load_quantized` and to `from_pretrained`.

    Args:
        model: any module with packed layers.
        directory: where; made if it doesn't exist.

    Raises:
        QuantizationError: nothing in the model is packed, or a tensor is on meta.
        NotImplementedError: the model is sharded; gather its state first.
        OSError: the disk is full or can't be written.

    Example:
        >>> import torch, halfbyte, tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = halfbyte.quantize_model(model)
        >>> folder = tempfile.mkdtemp()
        >>> halfbyte.save_quantized(model, folder)
        >>> other = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> halfbyte.load_quantized(other, folder, progress=False).quantized
        ('0',)
    """
    from halfbyte.checkpoint.layout import named_tensors, packed_shape

    packed = [module for module in model.modules() if isinstance(module, Packed)]
    if not packed:
        raise QuantizationError("save_quantized: nothing in the model is packed")
    entries = []
    for name, owners in named_tensors(model).items():
        module, attribute = owners[0]
        tensor: Any = getattr(module, attribute)
        if is_dtensor(tensor) or getattr(tensor, "_fsdp_flattened", False):
            raise NotImplementedError(
                f"save_quantized: {name} is sharded; gather the state with torch.distributed.checkpoint.state_dict, load it "
                f"into a model in one process and save that"
            )
        if tensor.is_meta:
            raise QuantizationError(f"save_quantized: {name} is on meta: nothing was loaded", [name])
        shape = packed_shape(module, attribute)
        if isinstance(module, Packed) and shape is not None:
            entries.append(Entry.packed(name, shape, module.format))
        else:
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype))
    write_folder(Path(directory), entries, module_source(model), config=config_of(model, packed))


def config_of(model: nn.Module, packed: Iterable[Packed]) -> dict[str, Any] | None:
    """config.json of a transformers model with the quantization its packed layers have; None for other models."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return None
    content = json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else config.to_dict()
    content["architectures"] = content.get("architectures") or [type(model).__name__]
    modules = list(packed)
    names = {id(module): name for name, module in model.named_modules()}
    content["quantization_config"] = quantization_config(
        {names[id(m)]: str(m.format) for m in modules if not isinstance(m, QuantEmbedding)},
        {names[id(m)]: str(m.format) for m in modules if isinstance(m, QuantEmbedding)},
    )
    return dict(content)


def quantization_config(linears: Mapping[str, str], embeddings: Mapping[str, str]) -> dict[str, Any]:
    """The entry of config.json that `peft_bridge.HalfbyteConfig` reads.

    It has one format for all layers. Where there are several it says "mixed", which that class refuses by name; the headers
    say what each tensor is, and `load_quantized` reads those.
    """
    kinds = [sorted(set(named.values())) for named in (linears, embeddings)]
    return {
        "quant_method": "halfbyte",
        "format": "mixed" if len(kinds[0]) > 1 else kinds[0][0] if kinds[0] else "nf4",
        "embedding_format": "mixed" if len(kinds[1]) > 1 else kinds[1][0] if kinds[1] else None,
        "skip": None,
        "compute_dtype": None,
        "modules": [*linears, *embeddings],
    }
