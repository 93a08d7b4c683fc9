"""From whatever the caller has to token blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tokenize = Callable[[str], Any]


def token_blocks(data: Any, tokenize: Tokenize | None, vocab_size: int, *, tokens: int, seq_len: int, seed: int) -> Tensor:
    """`tokens // seq_len` blocks, shape (S, seq_len) int64, drawn at random from all that the data gives, in its order.

    Raises:
        TypeError: data of another type, or text without a tokenizer.
        ValueError: too few tokens, or ids that the vocabulary lacks.
        FileNotFoundError: a path that does not exist.
    """
    if tokens < 1 or seq_len < 1 or tokens < seq_len:
        raise ValueError(f"calibrate: tokens must be at least seq_len, got tokens={tokens} and seq_len={seq_len}")
    if isinstance(data, Tensor):
        blocks = _blocks_of_ids(data, seq_len)
    else:
        if tokenize is None:
            raise TypeError("calibrate: text needs a tokenizer: pass tokenizer=, or token ids as data")
        text = "\n\n".join(_texts(data))
        if not text.strip():
            raise ValueError("calibrate: data is empty: no text in it")
        ids = torch.as_tensor(tokenize(text), dtype=torch.int64).flatten()
        blocks = _blocks_of_ids(ids, seq_len)
    needed = tokens // seq_len
    if len(blocks) < needed:
        raise ValueError(
            f"calibrate: data is too short: it gives {len(blocks)} blocks of {seq_len} tokens, tokens={tokens} needs "
            f"{needed}; pass more text or tokens={len(blocks) * seq_len}"
        )
    low, high = int(blocks.min()), int(blocks.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"calibrate: data holds token id {low if low < 0 else high}, the model's vocabulary has {vocab_size}; "
            f"was it tokenized for another model?"
        )
    chosen = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))[:needed]
    return blocks[chosen.sort().values].contiguous()


def _blocks_of_ids(ids: Tensor, seq_len: int) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        raise TypeError(
            f"calibrate: token ids must be int64 or int32 of 1 or 2 dimensions, got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    ids = ids.to("cpu", torch.int64).flatten()
    return ids[: len(ids) // seq_len * seq_len].view(-1, seq_len)


def _texts(data: Any) -> list[str]:
    if isinstance(data, Path) or (isinstance(data, str) and "\n" not in data and len(data) < 4096 and Path(data).exists()):
        path = Path(data)
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        return [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    if isinstance(data, str):
        return [data]
    if isinstance(data, Iterable):
        items = list(data)
        if all(isinstance(item, str) for item in items):
            return items
    raise TypeError(
        f"calibrate: data must be text, a list of texts, a path of a file or folder, or a tensor of token ids, "
        f"got {type(data).__name__}"
    )
