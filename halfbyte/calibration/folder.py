"""The result on disk: an ordinary quantized folder whose shards are written as blocks are finished.

The index is written last, so an interrupted folder is not a checkpoint; `.calibration/` in it holds what a resume needs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from halfbyte.calibration.report import CalibratedLayer
from halfbyte.checkpoint.files import INDEX, Checkpoint
from halfbyte.checkpoint.folder import replace_file, write_shard
from halfbyte.checkpoint.sources import Entry, TensorSource
from halfbyte.formats import Format

_COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*", "vocab*", "*.txt", "*.model")


class Folder:
    """One `out` folder.

    Args:
        path: made if it doesn't exist.
        key: what the result depends on; a run is resumed only under the same.
        blocks: how many blocks there are.

    Raises:
        FileExistsError: the folder holds a finished model, or an unfinished run with another key.
    """

    def __init__(self, path: Path, key: str, blocks: int) -> None:
        self.path, self.key, self.blocks = path, key, blocks
        self.state = path / ".calibration"
        if (path / INDEX).exists() or (path / "model.safetensors").exists():
            raise FileExistsError(f"calibrate: out={str(path)!r} holds a model already; remove it or choose another folder")
        self.state.mkdir(parents=True, exist_ok=True)
        self.next, self.layers = self._progress()

    def _progress(self) -> tuple[int, list[CalibratedLayer]]:
        """The first block to do and the layers done."""
        file = self.state / "progress.json"
        if not file.is_file():
            return 0, []
        saved = json.loads(file.read_text())
        if saved["key"] != self.key:
            raise FileExistsError(
                f"calibrate: out={str(self.path)!r} holds an unfinished run of another model, text, format or setting; "
                f"remove it, or choose another folder"
            )
        return int(saved["next"]), [CalibratedLayer(**layer) for layer in saved["layers"]]

    def hidden(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory-mapped hidden states (blocks, tokens, width) that enter block `index`; two files take turns."""
        file = self.state / f"hidden-{index % 2}.bin"
        return torch.from_file(str(file), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)

    def shard(self, index: int) -> Path:
        """File of a block; the last is everything else."""
        return self.path / f"model-{index + 1:05d}-of-{self.blocks + 1:05d}.safetensors"

    def write_shard(self, index: int, tensors: dict[str, Tensor], formats: dict[str, tuple[Format, int]]) -> None:
        """Writes a shard so that it has its name only once it is on disk; `formats` gives format and K of packed rows."""
        entries = []
        for name, value in tensors.items():
            if name in formats:
                format, K = formats[name]
                entries.append(Entry.packed(name, (*value.shape[:-1], K), format))
            else:
                entries.append(Entry(name, tuple(value.shape), value.dtype))
        write_shard(self.shard(index), entries, TensorSource(tensors, formats), self.key, lambda nbytes: None)

    def read_shard(self, index: int) -> dict[str, Tensor]:
        """What `write_shard` wrote."""
        return load_file(self.shard(index))

    def finish_block(self, index: int, layers: list[CalibratedLayer]) -> None:
        """Notes that the shard and the hidden states behind block `index` are complete."""
        self.layers = layers
        state = {"key": self.key, "next": index + 1, "layers": [vars(layer) for layer in layers]}
        replace_file(self.state / "progress.json", json.dumps(state))

    def finish(self, config: dict[str, Any] | None, report: str, copy_from: Path | None) -> None:
        """Writes config.json, calibration.json and the index; the folder then is a checkpoint."""
        weight_map, size = {}, 0
        for index in range(self.blocks + 1):
            with Checkpoint(self.shard(index)) as shard:
                weight_map.update(dict.fromkeys(shard.tensors, self.shard(index).name))
                size += sum(stored.nbytes for stored in shard)
        for pattern in _COPIED:
            for file in sorted(copy_from.glob(pattern)) if copy_from else ():
                shutil.copyfile(file, self.path / file.name)
        if config is not None:
            replace_file(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        replace_file(self.path / "calibration.json", report)
        index_text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n"
        replace_file(self.path / INDEX, index_text)
        shutil.rmtree(self.state)
