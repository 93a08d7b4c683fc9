"""Where dense blocks come from: a model in memory, or a folder that is read one block at a time."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from halfbyte.calibration.decoder import decoder_blocks
from halfbyte.calibration.weights import packed_formats
from halfbyte.checkpoint.files import INDEX
from halfbyte.formats import Format
from halfbyte.nn.packed import Packed


class ModelSource:
    """A dense model in memory; its blocks are quantized where they stand."""

    streamed = False

    def __init__(self, model: nn.Module, folder: Path | None = None) -> None:
        self.model, self.folder = model, folder
        self.prefix, self.blocks = decoder_blocks(model)

    def load(self, index: int) -> None:
        """Brings the weights of one block into memory."""

    def release(self, index: int) -> None:
        """Gives them up."""

    def tensors(self, index: int | None) -> tuple[dict[str, Tensor], dict[str, tuple[Format, int]]]:
        """State dict of one block, or (None) of everything outside them with tied tensors once; format and K of rows."""
        if index is not None:
            prefix = f"{self.prefix}.{index}."
            block = self.blocks[index]
            formats = {prefix + name: format for name, format in packed_formats(block).items()}
            return {prefix + name: value.detach() for name, value in block.state_dict().items()}, formats
        tied, inside = tied_keys(self.model), f"{self.prefix}."
        state = self.model.state_dict()
        rest = {name: value.detach() for name, value in state.items() if not name.startswith(inside) and name not in tied}
        return rest, {name: format for name, format in packed_formats(self.model).items() if name in rest}

    def identity(self) -> Any:
        """What tells this source from others when a run is resumed: cheap, and blind to most changes of values."""
        return [[name, list(p.shape), str(p.dtype)] for name, p in self.model.named_parameters()][:8]


class FolderSource(ModelSource):
    """A Hugging Face folder of safetensors: the model is built on meta, a block has weights between load and release."""

    streamed = True

    def __init__(self, folder: Path, model: nn.Module, files: dict[str, Path], device: torch.device) -> None:
        super().__init__(model, folder)
        self.files, self.device = files, device
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._assign(name for name in _parameters(model) if not name.startswith(f"{self.prefix}."))
        tie = getattr(model, "tie_weights", None)
        if callable(tie):
            tie()

    def load(self, index: int) -> None:
        """Reads the tensors of one block."""
        prefix = f"{self.prefix}.{index}."
        self._assign(prefix + name for name in _parameters(self.blocks[index]))

    def release(self, index: int) -> None:
        """Puts the block back on meta."""
        for module in self.blocks[index].modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                    module._parameters[name] = meta

    def identity(self) -> Any:
        """Names, sizes and times of change of the files."""
        stats = {path.name: path.stat() for path in self.files.values()}
        return sorted((name, s.st_size, s.st_mtime_ns) for name, s in stats.items())

    def _assign(self, names: Iterator[str]) -> None:
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name in names:
                path = self.files.get(name)
                if path is None:  # tied: comes with what it is tied to
                    continue
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                owner, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(owner)
                old = module._parameters.get(leaf)
                value = opened[path].get_tensor(name).to(self.device)
                if old is None:
                    module._buffers[leaf] = value
                else:
                    value = value if value.dtype == old.dtype or not value.is_floating_point() else value.to(old.dtype)
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def open_source(model_or_checkpoint: Any, device: torch.device) -> ModelSource:
    """The source of a model where it is, or of a folder of a Hugging Face causal language model, computed on `device`.

    Raises:
        TypeError: it is neither.
        ValueError: the model is quantized already.
        FileNotFoundError: no such folder.
        ImportError: a folder needs transformers.
    """
    if isinstance(model_or_checkpoint, nn.Module):
        if any(isinstance(module, Packed) for module in model_or_checkpoint.modules()):
            raise ValueError("calibrate: the model is quantized already; calibrate the dense one")
        return ModelSource(model_or_checkpoint)
    if not isinstance(model_or_checkpoint, (str, os.PathLike)):
        raise TypeError(
            f"calibrate: model_or_checkpoint must be a model or the path of a folder, "
            f"got {type(model_or_checkpoint).__name__}"
        )
    folder = Path(model_or_checkpoint)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"calibrate: {folder} is not a model folder: it has no config.json")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError("calibrate: reading a checkpoint folder needs transformers; pip install transformers") from error
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"calibrate: {folder} is quantized already; calibrate the dense checkpoint")
    dtype = getattr(config, "dtype", None) or torch.float32
    files = _tensor_files(folder)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    missing = [name for name in _parameters(model) if name not in files and name not in tied_keys(model)]
    if files and not missing:
        return FolderSource(folder, model, files, device)
    warnings.warn(
        f"calibrate: {folder} can't be read block by block "
        + (f"(it does not hold {missing[0]} under that name)" if files else "(it has no safetensors files)")
        + "; the whole dense model is loaded",
        stacklevel=3,
    )
    return ModelSource(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device), folder)


def tied_keys(model: nn.Module) -> set[str]:
    """Keys of parameters that are another one's, or that transformers says are tied to one."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied.add(name)
        seen.add(id(parameter))
    return tied


def _parameters(module: nn.Module) -> list[str]:
    """Keys of what a checkpoint holds: parameters and persistent buffers."""
    return list(module.state_dict())


def _tensor_files(folder: Path) -> dict[str, Path]:
    """File of each tensor of a folder; empty if it has no safetensors."""
    index = folder / INDEX
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters registered inside are on meta; buffers (positions, masks), which no checkpoint holds, are real."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and not param.is_meta:
            meta = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
            self._parameters[name] = meta

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
