"""A dense checkpoint of any kind to a packed folder, a few megabytes at a time: the same one that a load and a save give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from halfbyte.checkpoint.folder import MAX_SHARD_BYTES
from halfbyte.checkpoint.sources import Entry
from halfbyte.checkpoint.stream import copy_rest, stream
from halfbyte.errors import QuantizationError
from halfbyte.memory.subject import on_meta
from halfbyte.nn.convert import nothing_quantized
from halfbyte.nn.linear_classes import is_conv1d
from halfbyte.nn.report import Report, ReportRow
from peft_bridge.config import HalfbyteConfig
from peft_bridge.conversion import Step, load_steps, save_steps
from peft_bridge.gguf_files import gguf_model, gguf_reader, gguf_steps
from peft_bridge.plan import Plan, describe_modules, plan_layers, weights_of
from peft_bridge.readers import Reader, open_reader, row_length
from peft_bridge.rows import ConvertedSource, ModelTensor


def quantize_folder(
    src: Path,
    out: Path,
    format: str,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    announce: Callable[[Report, list[str], list[str]], None] = lambda found, left_out, missing: None,
    progress: bool = False,
) -> Report:
    """Packs a checkpoint into the folder that `from_pretrained(HalfbyteConfig(format))` and `save_pretrained` would make.

    Tensors that transformers renames, merges (experts), splits, permutes or transposes (Conv1D) are traced row by row to
    where they are stored, and read from there: a few megabytes are in memory at a time, of a tensor that lies across the
    whole of one stored matrix, of one that transformers computes (norms of a GGUF, say) all of it. Shards appear when they
    are complete and read back; run again after an interruption, it keeps them.

    Args:
        src: a dense transformers folder (safetensors, or `pytorch_model.bin`), or a GGUF file.
        out: folder to make; one that holds another checkpoint is refused.
        format: for the linear layers and experts.
        max_shard_bytes: bytes of one output file.
        announce: called before anything is written: with what will be, the source's tensors that the model has no place
            for, and the model's that the source lacks (loading will initialize them).
        progress: show a progress bar in a terminal.

    Returns:
        A `Report` with a row per tensor of the folder.

    Raises:
        FileExistsError: `out` holds another checkpoint.
        NotImplementedError: the source is quantized already, or transformers has no mapping for it.
        OSError: not enough room (nothing was written then), or the disk is full; finished shards are kept.
        QuantizationError: nothing could be packed, or the source does not fit its config or is damaged.
    """
    gguf = src.suffix == ".gguf"
    with closing(gguf_reader(src) if gguf else open_reader(src)) as reader:
        if gguf:
            model = gguf_model(src)
            loads, left_out, used = gguf_steps(model, src, reader.shapes)
        else:
            model = _model_of(src, reader)
            conversions: list[Any] = get_model_conversion_mapping(model)
            loads, left_out = load_steps(model, reader.shapes, conversions)
            used = [each for each in conversions if each.was_used()]
        plan = plan_layers(model, HalfbyteConfig(format))
        saved, held_as, missing = _what_is_saved(model, reader, loads, plan)
        tensors = _tensors(model, plan)
        saves = save_steps(model, {name: _as_saved(tensors[name]) for name in saved}, used)
        made_by = [transformers.__version__, str(torch.__version__), type(model).__name__]
        source = ConvertedSource(reader, loads, saves, tensors, held_as, cast_first=not gguf, made_by=made_by)
        entries, found = _entries(saves, tensors, plan)
        if not found.quantized:
            raise nothing_quantized(model, "quantize")
        announce(found, left_out, missing)
        stream(source, entries, out, config=_config(model, plan, format), max_shard_bytes=max_shard_bytes, progress=progress)
        _copy_files(src, out, model)
    return found


def _model_of(folder: Path, reader: Reader) -> PreTrainedModel:
    """The dense model, on meta, in what `dtype="auto"` means: as config.json says, else as the first floating tensor."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(f"{folder} is quantized already; load_model loads it as it is")
    floating = [dtype for dtype in reader.dtypes.values() if dtype.is_floating_point and dtype.itemsize > 1]
    dtype = getattr(config, "dtype", None) or next(iter(floating), torch.float32)
    model: Any = on_meta(folder, dtype)
    if not isinstance(model, PreTrainedModel):
        raise NotImplementedError(f"{folder}: {type(model).__name__} is no model of transformers")
    return model


def _what_is_saved(
    model: PreTrainedModel, reader: Reader, loads: list[Step], plan: Plan
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """(the model's tensors that a save holds, under which name each tied one was loaded, what the checkpoint lacks).

    What the checkpoint lacks is left out: loading initializes it.

    Raises:
        QuantizationError: a shape is not the model's, or some of a layer's experts are missing.
    """
    state, by_name = model.state_dict(), {name: step for step in loads for name in step.made}
    wrong = {
        name: f"has shape {tuple(value.shape)} in the checkpoint, {tuple(state[name].shape)} in the model"
        for step in loads
        for name, value in step.made.items()
        if value.shape != state[name].shape
    }
    tied: dict[int, list[str]] = {}
    for name in state:
        tied.setdefault(id(model.get_parameter_or_buffer(name)), []).append(name)
    saved = remove_tied_weights_from_state_dict(dict(state), model)
    held_as, absent = {}, []
    for names in tied.values():
        loaded = [name for name in names if name in by_name]
        for name in names:
            if name in saved and name not in by_name:
                if loaded:
                    held_as[name] = loaded[0]
                else:
                    del saved[name]
                    absent.append(name)
            elif name in by_name and name not in saved and not _equal(reader, by_name, names, name, saved):
                saved[name] = state[name]  # the config ties what the checkpoint doesn't: transformers keeps both
    for name in (each for each in model._keys_to_ignore_on_save or () if each in saved):
        del saved[name]
    for owner in list(plan.formats):
        missing = [leaf for leaf in weights_of(model.get_submodule(owner)) if f"{owner}.{leaf}" not in saved]
        if missing and missing != ["weight"]:
            wrong.update({f"{owner}.{leaf}": "is missing from the checkpoint" for leaf in missing})
        elif missing:
            plan.reasons[owner] = "not in the checkpoint"
            del plan.formats[owner]
    if wrong:
        listed = "; ".join(f"{name} {problem}" for name, problem in list(wrong.items())[:5])
        raise QuantizationError(f"quantize: config.json and the checkpoint don't fit: {listed}", wrong)
    return saved, held_as, absent


def _equal(reader: Reader, by_name: Mapping[str, Step], names: list[str], name: str, saved: Mapping[str, Tensor]) -> bool:
    """Whether the checkpoint holds the same for `name` as for the one of the tied `names` that is saved."""
    other = next((each for each in names if each in saved and each in by_name), None)
    if other is None:
        return True
    ours, theirs = by_name[name].sources, by_name[other].sources
    for one, two in zip(ours, theirs, strict=False):
        shape = reader.shapes[one]
        count = torch.Size(shape).numel() // max(1, row_length(shape))
        step = max(1, (8 << 20) // (4 * max(1, row_length(shape))))
        for first in range(0, count, step):
            last = min(first + step, count)
            if not torch.equal(reader.rows(one, first, last), reader.rows(two, first, last)):
                return False
    return True


def _tensors(model: PreTrainedModel, plan: Plan) -> dict[str, ModelTensor]:
    """Every tensor of the model as it is loaded: in its own dtype or the one that the model keeps it in."""
    keep = model._get_dtype_plan(model.dtype)
    pattern, groups, _ = build_glob_alternation(list(keep)) if keep else (None, {}, {})
    found = {}
    for name, value in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        match = pattern.search(name) if pattern is not None else None
        dtype = keep[groups[match.lastgroup or ""]] if match else value.dtype
        module = model.get_submodule(owner)
        shape, format = tuple(value.shape), plan.formats.get(owner) if leaf in weights_of(module) else None
        across = format is not None and (is_conv1d(module) or bool(getattr(module, "is_transposed", False)))
        found[name] = ModelTensor((*shape[:-2], shape[-1], shape[-2]) if across else shape, dtype, format, across)
    return found


def _as_saved(tensor: ModelTensor) -> Tensor:
    """On meta what the packed model's state dict holds of it."""
    entry = Entry("", tensor.shape, tensor.dtype)
    if tensor.format is not None:
        entry = Entry.packed("", tensor.shape, tensor.format)
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def _entries(saves: list[Step], tensors: Mapping[str, ModelTensor], plan: Plan) -> tuple[list[Entry], Report]:
    entries, rows = [], []
    for step in saves:
        kinds = {(tensors[name].format, tensors[name].dtype, row_length(tensors[name].shape)) for name in step.sources}
        (format, dtype, K), *others = kinds
        if others:
            raise NotImplementedError(f"quantize: {next(iter(step.made))} is saved from tensors of several kinds")
        for name, value in step.made.items():
            shape = tuple(value.shape)
            entry = Entry(name, shape, dtype)
            if format is not None:
                entry = Entry.packed(name, (*shape[:-1], K), format)
                if entry.shape != shape:
                    raise NotImplementedError(f"quantize: {name} is saved with its rows across")
            dense = torch.Size(entry.dense_shape).numel() * dtype.itemsize
            reason = None if format else plan.reasons.get(step.sources[0].rpartition(".")[0])
            rows.append(ReportRow(name, str(format) if format else None, entry.nbytes, dense, reason))
            entries.append(entry)
    return entries, Report(tuple(rows))


def _config(model: PreTrainedModel, plan: Plan, format: str) -> dict[str, Any]:
    """Content of config.json, as the quantizer and `save_pretrained` write it."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or weights_of(module)]
    quantization = HalfbyteConfig(format)
    packed = [name for name in layers if name in plan.formats]
    quantization.modules = describe_modules(packed, set(layers) - set(packed))
    content = json.loads(model.config.to_json_string())
    content["architectures"] = [type(model).__name__]
    content["dtype"] = str(model.dtype).removeprefix("torch.")
    content["quantization_config"] = quantization.to_dict()
    return dict(json.loads(json.dumps(content, sort_keys=True)))


def _copy_files(src: Path, out: Path, model: PreTrainedModel) -> None:
    """Tokenizer and the like."""
    if src.is_dir():
        copy_rest(src, out)
    else:
        transformers.AutoTokenizer.from_pretrained(src.parent, gguf_file=src.name).save_pretrained(out)
    if model.can_generate() and not (out / "generation_config.json").exists():
        model.generation_config.save_pretrained(out)
