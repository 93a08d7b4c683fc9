"""A dense checkpoint to a packed folder through transformers, for what can't be streamed tensor by tensor."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from halfbyte.checkpoint.stream import copy_rest
from halfbyte.nn.report import Report, report
from peft_bridge.loading import load_model


def quantize_folder(src: Path, out: Path, format: str) -> Report:
    """Packs a checkpoint whose tensors are merged (experts) or transposed (Conv1D) on loading, which transformers does.

    The packed model is in memory as a whole, the dense one never. The folder appears when it is complete.

    Args:
        src: a dense transformers folder.
        out: a new folder, or an empty one.
        format: for the linear layers and experts.

    Returns:
        The `Report` of the packed model.

    Raises:
        FileExistsError: `out` holds something.
        OSError: the disk is full; nothing is left behind.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"quantize: {out} holds something already; delete it or choose another folder")
    model, staged = load_model(src, format), out.with_name(f".{out.name}.{os.getpid()}")
    try:
        model.save_pretrained(staged)
        copy_rest(src, staged, replace=False)
        staged.replace(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return report(model)
