"""calibrate: block by block through a causal language model, on the outputs of the blocks already quantized."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.calibration.data import token_blocks
from halfbyte.calibration.decoder import Call, collect_moments, record_calls
from halfbyte.calibration.folder import Folder
from halfbyte.calibration.moments import DAMPING, Moment, Solved
from halfbyte.calibration.report import CalibratedLayer, CalibrationReport
from halfbyte.calibration.rows import CANDIDATES, METHODS, calibrated_rows
from halfbyte.calibration.source import ModelSource, open_source
from halfbyte.calibration.weights import is_quantizable, pack_, weights_of
from halfbyte.checkpoint.folder import config_of
from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.packed import Packed
from halfbyte.nn.report import report
from halfbyte.nn.skip import SkipRules, mark_dense, tell_config
from halfbyte.ops.quantize import quantize

MIN_TOKENS = 64
"""A layer that fewer calibration tokens reach (an expert) gets plain rows: so few say little about K directions."""


def calibrate(
    model_or_checkpoint: nn.Module | str | os.PathLike[str],
    data: Any,
    format: str | Format = "nf4",
    *,
    method: str = "feedback",
    tokens: int = 8192,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    seed: int = 0,
    tokenizer: Any = None,
    seq_len: int = 512,
    batch_size: int = 4,
    skip: Iterable[str] | None = None,
    device: torch.device | str | None = None,
) -> CalibrationReport:
    """Quantizes a causal language model with codes and scales chosen from what a text sends through its layers.

    The result is ordinary packed rows of an ordinary format: kernels, checkpoints and sharding are the same. Block by block,
    the inputs of its linear layers are measured on the outputs of the blocks already quantized, then each weight is rounded
    column by column with the errors carried on (`halfbyte.ops.error_feedback`), under scales searched block by block. One
    dense block, the K x K moments of its layers and the hidden states are all that is in memory; with `out` the hidden
    states are in files.

    Args:
        model_or_checkpoint: a dense transformers model, quantized in place; or a folder of one, read block by block (needs
            transformers and `out`).
        data: text, a list of texts, the path of a file or folder, or token ids (int64, any shape).
        format: a `Format` or its name.
        method: "feedback", or "scales": only the scales are chosen, as activations weigh the errors.
        tokens: how many to calibrate on, in whole blocks of `seq_len` drawn from all of the data.
        out: a folder to write the quantized model to, with its report as calibration.json. An interrupted run goes on where
            it was. None: the model in memory is the only result.
        progress: show a progress bar with errors before and after, if standard error is a terminal (needs tqdm).
        seed: decides which blocks of the data are drawn.
        tokenizer: for text; None: that of the folder.
        seq_len: tokens in a block of text.
        batch_size: blocks of text that run at once.
        skip: names that stay dense, see `quantize_model`.
        device: where a folder's blocks are computed; None: the CPU. A model in memory is calibrated where it is.

    Returns:
        A `CalibrationReport`: what `halfbyte.report` says of the model (of a folder: nothing), and per layer the output
        error with plain and with calibrated rows, dead channels, dropped tokens, and why it got plain rows if it did.

    Raises:
        TypeError: data or model of another type, or text without a tokenizer.
        ValueError: unknown format or method; data too short, empty, or with ids the vocabulary lacks; a model that is
            quantized already; a folder without `out`.
        FileNotFoundError: no such folder.
        FileExistsError: `out` holds a finished model or another unfinished run.
        QuantizationError: no decoder blocks, or nothing in them to quantize, or all activations are NaN.
        NotImplementedError: the model does not run its blocks one after another.

    Note:
        The same arguments give the same bytes (on the same machine and number of threads: moments are sums in an order that
        torch's matrix product chooses). Linear layers outside the blocks get plain rows.

    Example:
        >>> import halfbyte
        >>> halfbyte.calibrate("meta-llama/Llama-3.2-1B", "notes.txt", out="llama-nf4")  # doctest: +SKIP

    Source:
        GPTQ: Frantar et al. 2022, arXiv:2210.17323.
    """
    fmt = Format.parse(format)
    if method not in METHODS:
        raise ValueError(f"calibrate: method must be one of {', '.join(METHODS)}, got {method!r}")
    if batch_size < 1:
        raise ValueError(f"calibrate: batch_size must be at least 1, got {batch_size}")
    if out is None and not isinstance(model_or_checkpoint, nn.Module):
        raise ValueError("calibrate: a checkpoint folder needs out=, the folder to write the result to")
    source = open_source(model_or_checkpoint, torch.device(device or "cpu"))
    if source.folder is not None and tokenizer is None and not isinstance(data, Tensor):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source.folder)
    host: Any = source.model
    vocabulary = host.get_input_embeddings().weight.shape[0]
    ids = token_blocks(data, _tokenize(tokenizer), vocabulary, tokens=tokens, seq_len=seq_len, seed=seed)
    settings = {"format": str(fmt), "method": method, "tokens": ids.numel(), "seq_len": seq_len, "seed": seed}
    settings |= {"batch_size": batch_size, "damping": DAMPING, "candidates": [round(c, 4) for c in CANDIDATES]}
    patterns = None if skip is None else list(SkipRules(skip).patterns)
    folder = None
    if out is not None:
        key = json.dumps([settings, patterns, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), source.identity()])
        folder = Folder(Path(out), hashlib.sha256(key.encode()).hexdigest(), len(source.blocks))
    run = _Run(source, ids, fmt, method, SkipRules(skip), batch_size, folder, progress and sys.stderr.isatty())
    started = time.perf_counter()
    was_training = source.model.training
    source.model.eval()
    try:
        with torch.no_grad():
            run.blocks()
            run.rest()
    finally:
        source.model.train(was_training)
    rows = report(source.model).rows if not source.streamed else ()
    result = CalibrationReport(rows, tuple(run.layers), settings, time.perf_counter() - started)
    if folder is not None:
        packed: list[Any] = [module for module in source.model.modules() if isinstance(module, Packed)]
        folder.finish(config_of(source.model, packed), result.to_json(), source.folder)
    return result


def _tokenize(tokenizer: Any) -> Any:
    if tokenizer is None:
        return None
    # A text longer than the model's context is what calibration wants: no warning about it.
    return lambda text: tokenizer(text, return_tensors="pt", verbose=False).input_ids


class _Run:
    """One pass through the model."""

    def __init__(
        self,
        source: ModelSource,
        ids: Tensor,
        format: Format,
        method: str,
        skip: SkipRules,
        batch_size: int,
        folder: Folder | None,
        bar: bool,
    ) -> None:
        self.source, self.format, self.method, self.folder = source, format, method, folder
        self.ids = ids.split(batch_size)
        host: Any = source.model
        self.device = host.get_input_embeddings().weight.device
        self.reasons = skip.of_model(source.model)
        self.layers: list[CalibratedLayer] = list(folder.layers) if folder else []
        self.bar = self._progress_bar() if bar else None
        if not any(self._layers_of(index) for index in range(len(source.blocks))):
            names = [name for name, m in source.model.named_modules() if m in self.reasons]
            raise QuantizationError(
                f"calibrate: nothing in the {len(source.blocks)} blocks can be quantized: they have no linear layers, "
                f"or all of them stay dense",
                names,
            )

    def _layers_of(self, index: int) -> dict[str, nn.Module]:
        """The modules of a block that are to be quantized, by full name."""
        prefix = f"{self.source.prefix}.{index}."
        layers = {prefix + name: module for name, module in self.source.blocks[index].named_modules()}
        return {name: module for name, module in layers.items() if is_quantizable(module) and module not in self.reasons}

    def blocks(self) -> None:
        """Quantizes all blocks, in order."""
        source, first = self.source, self.folder.next if self.folder else 0
        source.load(0)
        hidden, calls = self._entering()
        if first:
            for index in range(first):
                self._restore(index)
            assert self.folder is not None
            hidden = self.folder.hidden(first, tuple(hidden.shape), hidden.dtype)
        for index in range(first, len(source.blocks)):
            source.load(index)
            block, layers = source.blocks[index], self._layers_of(index)
            moments, shared = collect_moments(block, layers, self._batches(calls, index, hidden))
            if moments and not any(moment.tokens for moment in moments.values()):
                raise QuantizationError(
                    f"calibrate: every activation in {source.prefix}.{index} is NaN or infinite; does the dense model "
                    f"work on this text in {hidden.dtype}?",
                    list(layers),
                )
            self._quantize(layers, moments, shared)
            leaving = self._storage(index + 1, hidden)
            targets = leaving.split(len(self.ids[0]))
            for (call, batch), target in zip(self._batches(calls, index, hidden), targets, strict=True):
                target.copy_(call(block, batch))
            hidden = leaving
            if self.folder is not None:
                self.folder.write_shard(index, *source.tensors(index))
                self.folder.finish_block(index, self.layers)
            source.release(index)
        if self.bar is not None:
            self.bar.close()

    def _entering(self) -> tuple[Tensor, list[list[Call]]]:
        """Hidden states that enter the first block, and for each batch how the model calls its blocks.

        Arguments are kept per batch: some models make them from the tokens.
        """
        found = [record_calls(self.source.model, list(self.source.blocks), batch.to(self.device)) for batch in self.ids]
        return torch.cat([entering for entering, _ in found]), [calls for _, calls in found]

    def _batches(self, calls: list[list[Call]], index: int, hidden: Tensor) -> Iterator[tuple[Call, Tensor]]:
        for of_batch, batch in zip(calls, hidden.split(len(self.ids[0])), strict=True):
            yield of_batch[index], batch.to(self.device)

    def _storage(self, index: int, like: Tensor) -> Tensor:
        if self.folder is None:
            return torch.empty_like(like)
        return self.folder.hidden(index, tuple(like.shape), like.dtype)

    def _restore(self, index: int) -> None:
        """Gives a block of an interrupted run the rows it got."""
        if self.source.streamed:
            return
        assert self.folder is not None
        saved = self.folder.read_shard(index)
        for name, layer in self._layers_of(index).items():
            rows = []
            for weight in weights_of(name, layer):
                packed = saved[f"{name}.{weight.parameter}"]
                rows.append(packed if weight.expert is None else packed[weight.expert])
            pack_(layer, rows, self.format)

    def _quantize(self, layers: dict[str, nn.Module], moments: dict[str, Moment], shared: dict[str, str]) -> None:
        solved: dict[str, Solved | None] = {}
        weights = {name: weights_of(name, layer) for name, layer in layers.items()}
        pending = [shared.get(weight.name) for parts in weights.values() for weight in parts]
        for name, layer in layers.items():
            rows = []
            for weight in weights[name]:
                owner = pending.pop(0)
                moment = moments[owner] if owner is not None else None
                dense = weight.dense()
                rows.append(self._rows(weight.name, dense, owner, moment, solved))
                if owner is not None and owner not in pending:  # K x K floats: not kept past the last that shares them
                    solved.pop(owner, None)
                    moments.pop(owner)
            pack_(layer, rows, self.format)

    def _rows(
        self, name: str, dense: Tensor, owner: str | None, moment: Moment | None, solved: dict[str, Solved | None]
    ) -> Tensor:
        """Packed rows of one weight (N, K), and its entry in the report."""
        seen, dropped = (moment.tokens, moment.dropped) if moment else (0, 0)
        note = None
        if moment is None or owner is None or seen < MIN_TOKENS:
            note = f"only {seen} calibration tokens reached it (at least {MIN_TOKENS} are needed)"
        elif owner not in solved:
            solved[owner] = moment.solve(self.format.block_size or dense.shape[1])
        found = solved.get(owner) if owner is not None and note is None else None
        if found is None:
            note = note or "its inputs are all 0 or too large for float32"
            self._record(CalibratedLayer(name, seen, None, None, dropped_tokens=dropped, note=note))
            return quantize(dense, self.format)
        rows = calibrated_rows(dense, found, self.format, self.method)
        measured = (rows.plain_error, rows.error, found.dead, dropped, found.damping)
        self._record(CalibratedLayer(name, seen, *measured, rows.note))
        return rows.packed

    def rest(self) -> None:
        """Everything outside the blocks: linear layers get plain rows."""
        source = self.source
        inside = {module for block in source.blocks for module in block.modules()}
        for name, module in source.model.named_modules():
            if not is_quantizable(module) or isinstance(module, Packed):
                continue
            if module in self.reasons:
                mark_dense(module, self.reasons[module])
            elif module not in inside:
                weights = weights_of(name, module)
                pack_(module, [quantize(weight.dense(), self.format) for weight in weights], self.format)
                note = "outside the decoder blocks"
                self.layers += [CalibratedLayer(weight.name, 0, None, None, note=note) for weight in weights]
        if not source.streamed:
            for module in source.model.modules():
                tell_config(module)
        if self.folder is not None:
            self.folder.write_shard(len(source.blocks), *source.tensors(None))

    def _progress_bar(self) -> Any:
        """A bar over all weights of the blocks; those of an interrupted run are done."""
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("calibrate: progress=True needs tqdm; pip install tqdm") from error
        blocks = [self._layers_of(index) for index in range(len(self.source.blocks))]
        total = sum(len(weights_of(name, layer)) for layers in blocks for name, layer in layers.items())
        return tqdm(total=total, initial=len(self.layers), desc="calibrating", unit="weight", dynamic_ncols=True)

    def _record(self, layer: CalibratedLayer) -> None:
        """Enters a weight into the report and shows its errors, before and after, in the bar."""
        self.layers.append(layer)
        if self.bar is None:
            return
        name = layer.name.removeprefix(f"{self.source.prefix}.")
        measured = layer.error is not None and layer.plain_error is not None
        self.bar.set_postfix_str(f"{name} {layer.plain_error:.4f} -> {layer.error:.4f}" if measured else f"{name} plain")
        self.bar.update()
