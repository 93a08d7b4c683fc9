"""The planner's section of gpu_check.py: `halfbyte.plan(device=...)` against what the allocator says of real training steps.

Imports torch and halfbyte; mixtures of experts are transformers' and run where it is installed. DDP and FSDP2 run with one
rank. On a GPU the peak is `torch.cuda.max_memory_allocated`: what tensors took, in blocks of 512 bytes (as plans count), not
what the allocator reserved from the driver for them. Without one (`--dry-run`) it is that of the CPU allocator on tiny sizes
(measured_memory.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured_memory import measured_peak
from torch import Tensor, nn

import halfbyte
from halfbyte.distributed.fsdp2 import MINIMUM_TORCH, takes_packed_rows
from halfbyte.memory.simulate import OPTIMIZERS

LIMIT = 0.10


@dataclass(frozen=True)
class Case:
    """A training step; `rank` 0 trains everything, otherwise adapters of that rank on a frozen packed base.

    Attributes:
        strategy: "single", or "ddp" or "fsdp2" with one rank.
        mixture: a Qwen3-MoE of transformers; adapters are on its attention.
    """

    format: str | None
    rank: int
    optimizer: str
    checkpointing: bool
    batch: int
    length: int
    dtype: torch.dtype = torch.bfloat16
    strategy: str = "single"
    mixture: bool = False

    def __str__(self) -> str:
        kind = f"{self.format or 'dense'}{f' LoRA {self.rank}' if self.rank else ''} {str(self.dtype).split('.')[1]}"
        kind = f"Qwen3-MoE {kind}" if self.mixture else kind
        strategy = "" if self.strategy == "single" else f", {self.strategy} x 1"
        return f"{kind}, {self.optimizer}, {self.batch} x {self.length}{' ckpt' if self.checkpointing else ''}{strategy}"


CASES = [
    Case("nf4", 16, "adamw8bit", True, 4, 1024),
    Case("nf4", 16, "adamw8bit", False, 2, 1024),
    Case("int8", 16, "adamw", True, 4, 1024),
    Case("nf4-dq", 8, "lion8bit", False, 2, 512),
    Case("fp8", 16, "sgd8bit", True, 2, 1024),
    Case("nf4", 16, "adamw8bit", False, 1, 64),  # few tokens: kernels on packed rows and the sums of their splits
    Case(None, 0, "adamw8bit", True, 2, 1024),
    Case(None, 0, "adamw", True, 1, 1024, torch.float32),
    Case(None, 0, "sgd-momentum", False, 1, 1024),
    Case("nf4", 16, "adamw8bit", True, 4, 1024, strategy="ddp"),
    Case(None, 0, "adamw8bit", True, 2, 1024, strategy="ddp"),
    Case("nf4", 16, "adamw8bit", True, 4, 1024, strategy="fsdp2"),
    Case(None, 0, "adamw", False, 1, 1024, strategy="fsdp2"),
    Case("nf4", 16, "adamw8bit", True, 4, 1024, mixture=True),
    Case("int8", 16, "adamw", False, 2, 512, mixture=True),
]


class Adapted(nn.Module):
    """A linear layer, with an adapter beside it if `rank` is not 0."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, k, n = base, base.in_features, base.out_features
        if rank:
            self.a, self.b = nn.Parameter(torch.randn(rank, k) / k**0.5), nn.Parameter(torch.zeros(n, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) if hasattr(self, "a") else self.base(x)


class Block(nn.Module):
    """A decoder block of width d with a gated MLP of width 3 d."""

    def __init__(self, d: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        sizes = {"qkv": (d, 3 * d), "o": (d, d), "gate": (d, 3 * d), "up": (d, 3 * d), "down": (3 * d, d)}
        for name, (k, n) in sizes.items():
            self.add_module(name, Adapted(nn.Linear(k, n, bias=False), rank))
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


def make_mixture(rank: int, tiny: bool) -> nn.Module:
    """A small Qwen3-MoE with adapters on its attention."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    d, layers, experts, inner, vocabulary = (128, 5, 8, 64, 512) if tiny else (1024, 8, 32, 768, 32000)
    config = Qwen3MoeConfig(
        hidden_size=d,
        num_hidden_layers=layers,
        num_attention_heads=d // 64,
        num_key_value_heads=d // 128,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=4,
        moe_intermediate_size=inner,
        vocab_size=vocabulary,
        use_cache=False,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), rank))
    return model  # type: ignore[no-any-return]


def make_model(case: Case, device: torch.device, tiny: bool) -> nn.Module:
    """The case's model; on meta it takes no memory."""
    vocabulary, d, layers, heads = (512, 128, 5, 4) if tiny else (32000, 2048, 8, 16)
    with torch.device(device):
        model = make_mixture(case.rank, tiny) if case.mixture else Decoder(vocabulary, d, layers, heads, case.rank)
        model = model.to(case.dtype)
        if case.format:
            halfbyte.quantize_model(model, case.format)
    if case.rank:  # as under PEFT: only adapters train
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith((".a", ".b")))
    return model.train()


def make_batch(device: torch.device, mixture: bool, rows: int, length: int) -> Any:
    """Equal tokens, all of which take the same experts: the routing that needs the most memory, which plans assume."""
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids} if mixture else ids


@contextmanager
def one_rank(case: Case, device: torch.device) -> Iterator[None]:
    """A process group of this process alone, where the case's strategy needs one."""
    if case.strategy == "single":
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(case: Case, device: torch.device, tiny: bool) -> Any:
    """A step of plain PyTorch."""
    from torch.distributed._composable.checkpoint_activation import checkpoint

    model: Any = make_model(case, device, tiny)
    if case.checkpointing and case.strategy != "fsdp2":
        for block in model.model.layers if case.mixture else model.blocks:
            checkpoint(block)
    if case.strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    elif case.strategy == "fsdp2":
        halfbyte.distributed.fully_shard(model, checkpointing=case.checkpointing)
    batch = make_batch(device, case.mixture, *sizes(case, tiny))
    optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        loss = model(**batch).loss if case.mixture else model(batch)
        loss.backward()
        del loss
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


def check_plan(case: Case, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Plans and measures a case."""
    rows, length = sizes(case, tiny)
    plan = halfbyte.plan(
        make_model(case, torch.device("meta"), tiny),
        batch_size=rows,
        seq_len=length,
        optimizer=case.optimizer,
        strategy=case.strategy,
        world_size=1,
        checkpointing=case.checkpointing,
        device=device.type,
        batch=partial(make_batch, device, case.mixture),
    )
    with one_rank(case, device):
        if device.type == "cuda":
            took = peak_on_gpu(case, device)
        else:  # what gloo's threads release is found late: the least of some runs
            runs = 1 if case.strategy == "single" else 3
            took = min(measured_peak(partial(build, case, device, tiny)) for _ in range(runs))
    return {"planned": plan.peak_bytes, "measured": took, "error": plan.peak_bytes / took - 1}


class PlansError(AssertionError):
    """Some predictions are off; `found` has all rows."""

    def __init__(self, text: str, found: list[dict[str, Any]]) -> None:
        super().__init__(text)
        self.found = found


def check_plans(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Plans and measures every case; one that raises does not keep the others from running.

    Raises:
        PlansError: a prediction is off by more than 10 %, or a case raised.
    """
    found: list[dict[str, Any]] = []
    for case in CASES:
        row: dict[str, Any] = {"case": str(case)}
        if case.mixture and importlib.util.find_spec("transformers") is None:
            row["verdict"] = "not run: transformers is not installed"
        elif case.strategy == "fsdp2" and case.format and not takes_packed_rows():
            row["verdict"] = "not run: FSDP2 shards packed rows from torch {}.{} on".format(*MINIMUM_TORCH)
        else:
            try:
                row |= check_plan(case, device, tiny)
                row["verdict"] = "PASS" if abs(row["error"]) <= LIMIT else "FAIL"
            except Exception as error:
                row["verdict"] = f"FAIL: {type(error).__name__}: {error}"
        figures = "{planned:12} planned {measured:12} measured {error:+7.1%}".format(**row) if "error" in row else ""
        print(f"  plan {case!s:62} {figures}  {row['verdict']}", flush=True)
        found.append(row)
    failed = [row for row in found if row["verdict"].startswith("FAIL")]
    passed = sum(row["verdict"] == "PASS" for row in found)
    print(f"  plans: {'FAIL' if failed else 'PASS'}, {passed} of {len(found)} within {LIMIT:.0%}")
    if failed:
        texts = (f"{row['case']}: {row['verdict']} {row.get('error', float('nan')):+.1%}" for row in failed)
        raise PlansError("; ".join(texts), found)
    return found
