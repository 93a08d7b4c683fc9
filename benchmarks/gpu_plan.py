"""The planner's section of gpu_check.py: `halfbyte.plan(device=...)` against what the allocator says of real training steps.

Imports torch and halfbyte only. On a GPU the peak is `torch.cuda.max_memory_allocated`; without one (`--dry-run`) it is that
of the CPU allocator (measured_memory.py) on tiny sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measured_memory import measured_peak
from torch import Tensor, nn

import halfbyte
from halfbyte.memory.simulate import OPTIMIZERS

LIMIT = 0.10


@dataclass(frozen=True)
class Case:
    """A training step; `rank` 0 trains everything, otherwise adapters of that rank on a frozen packed base."""

    format: str | None
    rank: int
    optimizer: str
    checkpointing: bool
    batch: int
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = f"{self.format or 'dense'}{f' LoRA {self.rank}' if self.rank else ''} {str(self.dtype).split('.')[1]}"
        return f"{kind}, {self.optimizer}, {self.batch} x {self.length}{' ckpt' if self.checkpointing else ''}"


CASES = [
    Case("nf4", 16, "adamw8bit", True, 4, 1024, torch.bfloat16),
    Case("nf4", 16, "adamw8bit", False, 2, 1024, torch.bfloat16),
    Case("int8", 16, "adamw", True, 4, 1024, torch.bfloat16),
    Case(None, 0, "adamw8bit", True, 2, 1024, torch.bfloat16),
    Case(None, 0, "adamw", True, 1, 1024, torch.float32),
    Case(None, 0, "sgd-momentum", False, 1, 1024, torch.bfloat16),
]


class Adapted(nn.Module):
    """A linear layer, with an adapter beside it if `rank` is not 0."""

    def __init__(self, k: int, n: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(k, n, bias=False)
        if rank:
            self.a, self.b = nn.Parameter(torch.randn(rank, k) / k**0.5), nn.Parameter(torch.zeros(n, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) if hasattr(self, "a") else self.base(x)


class Block(nn.Module):
    """A decoder block of width d with a gated MLP of width 3 d."""

    def __init__(self, d: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o = Adapted(d, 3 * d, rank), Adapted(d, d, rank)
        self.gate, self.up, self.down = Adapted(d, 3 * d, rank), Adapted(d, 3 * d, rank), Adapted(3 * d, d, rank)
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Blocks between an embedding and an output layer; forward gives the loss of predicting its input."""

    def __init__(self, vocabulary: int, d: int, layers: int, heads: int, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d, heads, rank) for _ in range(layers))
        self.lm_head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1).float(), ids.flatten())


def make_model(case: Case, device: torch.device, tiny: bool) -> nn.Module:
    """The case's model; on meta it takes no memory."""
    vocabulary, d, layers, heads = (512, 128, 5, 4) if tiny else (32000, 2048, 8, 16)
    with torch.device(device):
        model: nn.Module = Decoder(vocabulary, d, layers, heads, case.rank).to(case.dtype)
        if case.format:
            halfbyte.quantize_model(model, case.format)
    if case.rank:  # as under PEFT: only adapters train
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith((".a", ".b")))
    return model.train()


def make_batch(device: torch.device, rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device=device)


def build(case: Case, device: torch.device, tiny: bool) -> Any:
    """A step of plain PyTorch."""
    from torch.distributed._composable.checkpoint_activation import checkpoint

    model: Any = make_model(case, device, tiny)
    if case.checkpointing:
        for block in model.blocks:
            checkpoint(block)
    rows, length = sizes(case, tiny)
    ids = make_batch(device, rows, length)
    optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sizes(case: Case, tiny: bool) -> tuple[int, int]:
    return (2 * case.batch, 64) if tiny else (case.batch, case.length)


def peak_on_gpu(case: Case, device: torch.device) -> int:
    """Peak bytes of two steps above what was allocated before; cuBLAS has its workspace by then."""
    warm = torch.zeros(64, 64, device=device, dtype=case.dtype, requires_grad=True)
    (warm @ warm).sum().backward()
    del warm
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    step = build(case, device, False)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def check_plans(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Plans and measures every case.

    Raises:
        AssertionError: a prediction is off by more than 10 %.
    """
    found = []
    for case in CASES:
        rows, length = sizes(case, tiny)
        plan = halfbyte.plan(
            make_model(case, torch.device("meta"), tiny),
            batch_size=rows,
            seq_len=length,
            optimizer=case.optimizer,
            checkpointing=case.checkpointing,
            device=device.type,
            batch=partial(make_batch, device),
        )
        took = peak_on_gpu(case, device) if device.type == "cuda" else measured_peak(partial(build, case, device, tiny))
        error = plan.peak_bytes / took - 1
        print(f"  plan {case!s:52} {plan.peak_bytes / 1e6:9.1f} MB, took {took / 1e6:9.1f} MB, {100 * error:+.1f} %")
        found.append({"case": str(case), "planned": plan.peak_bytes, "measured": took, "error": error})
    worst = max(found, key=lambda each: abs(each["error"]))
    assert abs(worst["error"]) <= LIMIT, f"{worst['case']}: off by {100 * worst['error']:+.1f} %"
    return found
