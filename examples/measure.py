"""What the examples measure and draw beside their stories: text blocks, held-out loss, memory, a loss curve."""

from __future__ import annotations

import re
import time
from pathlib import Path

import lightning as L
import torch
from transformers import AutoTokenizer


def blocks_of_text(path: str, file: str | None, length: int, held_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token blocks (B, length) to train on and to test on; every n-th block is held out."""
    if file:
        text = Path(file).read_text()
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // length * length].view(-1, length)
    stride = len(blocks) // held_out
    if stride < 2:
        raise SystemExit(f"the text gives {len(blocks)} blocks of {length} tokens, too few to hold out {held_out}")
    chosen = torch.zeros(len(blocks), dtype=torch.bool)
    chosen[stride - 1 :: stride] = True
    return blocks[~chosen], blocks[chosen][:held_out]


@torch.inference_mode()
def loss_on(model: torch.nn.Module, blocks: torch.Tensor) -> float:
    """Mean loss per token (nats) over the blocks, in eval mode."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    losses = [float(model(input_ids=b[None].to(device), labels=b[None].to(device)).loss) for b in blocks]
    model.train(was_training)
    return sum(losses) / len(losses)


def anonymous_mb() -> float:
    """Anonymous resident memory of this process, MB (mapped checkpoint pages don't count)."""
    kib = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kib[1]) * 1024 / 1e6 if kib else float("nan")


class Stages(L.Callback):
    """Measures what the demo prints: held-out loss and memory before, speed during, loss and memory after."""

    def __init__(self, held_out: torch.Tensor) -> None:
        self.held_out = held_out

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        print(f"memory after loading: {anonymous_mb():.0f} MB anonymous", flush=True)
        self.before = loss_on(module.model, self.held_out)
        print(f"held-out loss before: {self.before:.4f} ({len(self.held_out)} blocks)", flush=True)
        self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.started
        self.after = loss_on(module.model, self.held_out)
        state = [t for s in trainer.optimizers[0].state.values() for t in s.values() if torch.is_tensor(t)]
        self.state_mb = sum(t.numel() * t.element_size() for t in state) / 1e6


def plot(losses: list[float], stages: Stages, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, label="training batch")
    axes.plot([0, len(losses)], [stages.before, stages.after], "o--", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="LoRA on a 4-bit base, 8-bit AdamW")
    axes.legend()
    figure.savefig(file, dpi=120)
    print(f"loss curve: {file}")
