"""What each of lightning_plugin's four callbacks changes: the same run without and with it.

    OMP_NUM_THREADS=1 python benchmarks/bench_callbacks.py [--steps 16] [--json FILE]

A byte-level Llama of 6 blocks learns Python's documentation in Lightning's Trainer, from one seed, on the CPU. Loss and peak
are those of the last quarter of the steps: the mean, and what the CPU allocator gave out at most (measured_memory.py, in a
run of its own). Seconds are CPU seconds of one whole fit. ActivationOffloading refuses a model on the CPU: what it moves is
counted with copies that stand for host memory, and not timed.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import lightning as L
import torch
from measured_memory import MARK, peak_since_mark
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.memory import offload_activations
from halfbyte.optim import AdamW8bit
from lightning_plugin import GradualUnfreezing, HalfbytePrecision, MemoryMonitor, ProgressiveQuantization

LENGTH, ROWS = 128, 4


def text() -> torch.Tensor:
    """Bytes of Python's documentation topics, in rows of LENGTH."""
    from pydoc_data.topics import topics

    bytes_ = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    ids = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8).long()
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def new_model() -> LlamaForCausalLM:
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False))


class Learner(L.LightningModule):
    """Trains what is not packed: embedding, norms and head, or everything."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.model = new_model()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> AdamW8bit:
        return AdamW8bit([p for p in self.parameters() if p.requires_grad], lr=2e-3)


class Mark(L.Callback):
    """Says when the last quarter begins."""

    def __init__(self, steps: int) -> None:
        self.first = steps - steps // 4

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.first:
            with record_function(MARK):
                pass


def run(steps: int, plugin: Callable[[], Any], callback: Callable[[], Any] | None) -> tuple[Learner, float]:
    """The fitted module, and CPU seconds of fit."""
    L.seed_everything(0, verbose=False)
    module, batches = Learner(), DataLoader(text(), batch_size=ROWS)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        plugins=plugin(),
        callbacks=[Mark(steps), *([callback()] if callback else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.process_time()
    trainer.fit(module, batches)
    return module, time.process_time() - start


def measured(steps: int, plugin: Callable[[], Any], callback: Callable[[], Any] | None) -> tuple[str, str, str]:
    """Loss, peak MB and seconds."""
    module, seconds = run(steps, plugin, callback)
    torch.ops.halfbyte.clear_workspace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(steps, plugin, callback)
    peak = peak_since_mark(recorded)
    losses = module.losses[-max(1, steps // 4) :]
    return f"{sum(losses) / len(losses):.3f}", f"{peak / 1e6:.1f}", f"{seconds:.1f}"


def offloaded() -> tuple[str, str]:
    """MB that a forward leaves on the device for backward, without and with offloading of tensors from 64 KiB on."""
    model, batch = new_model(), text()[:ROWS]
    found = []
    for offload in (False, True):
        stayed: dict[int, int] = {}
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor: torch.Tensor, stayed: dict[int, int] = stayed, weights: set[int] = weights) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                stayed[storage.data_ptr()] = storage.nbytes()
            return tensor

        hidden: list[torch.Tensor] = []  # host memory; kept, so that no address is used twice

        def to_host(tensor: torch.Tensor, pin: bool, hidden: list[torch.Tensor] = hidden) -> torch.Tensor:
            hidden.append(tensor.clone())
            return hidden[-1]

        offloading = "halfbyte.memory.offload"
        with (
            mock.patch(f"{offloading}._on_host", return_value=False),
            mock.patch(f"{offloading}._to_host", to_host),
            offload_activations(model, min_bytes=1 << 16) if offload else nullcontext(),
        ):
            inner = torch._C._autograd._top_saved_tensors_default_hooks(False) if offload else None

            def pack(tensor: torch.Tensor, inner: Any = inner, keep: Any = keep) -> Any:
                kept = inner[0](tensor) if inner else tensor
                return keep(kept) if isinstance(kept, torch.Tensor) else kept

            with torch.autograd.graph.saved_tensors_hooks(pack, inner[1] if inner else lambda tensor: tensor):
                model(input_ids=batch, labels=batch).loss.backward()
        found.append(f"{sum(stayed.values()) / 1e6:.1f}")
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each run")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "callbacks.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    packed, dense = (lambda: HalfbytePrecision("nf4")), (lambda: None)
    quarter = args.steps // 4
    unfreezing = lambda: GradualUnfreezing({quarter: ["layers.5"], 2 * quarter: ["layers.4"]}, lr=5e-4)  # noqa: E731
    progressive = lambda: ProgressiveQuantization({quarter * i: [f"layers.{2 * i - 2}", f"layers.{2 * i - 1}"]  # noqa: E731
                                                   for i in (1, 2, 3)})
    plain = {plugin: measured(args.steps, plugin, None) for plugin in (packed, dense)}
    rows = []
    for name, plugin, callback, what in (
        ("GradualUnfreezing", packed, unfreezing, "nf4; two of six blocks become dense and train"),
        ("ProgressiveQuantization", dense, progressive, "dense; two blocks more are packed at each quarter"),
        ("MemoryMonitor", packed, MemoryMonitor, "nf4; every step is measured"),
    ):
        found = measured(args.steps, plugin, callback)
        rows.append([name, what, *(f"{a} -> {b}" for a, b in zip(plain[plugin], found, strict=True))])
        print(rows[-1], flush=True)
    before, after = offloaded()
    rows.append(["ActivationOffloading", "dense, one step; MB that stay on the device for backward", "unchanged",
                 f"{before} -> {after}", "not timed"])
    title = f"{args.steps} steps of {ROWS} x {LENGTH} bytes, a Llama of 6 blocks of width 256, without -> with the callback"
    columns = ["callback", "run", "loss at the end", "peak MB at the end", "CPU seconds"]
    harness.save_table("callbacks", title, columns, rows, args.json)


if __name__ == "__main__":
    main()
