"""What gpu_check.py measures of training: a QLoRA step of an 8B-shaped model, and packed rows over NCCL."""

from __future__ import annotations

import os
import socket
import statistics
import time

import torch
import torch.nn.functional as F
from gpu_bench import BF16, Bench
from torch import Tensor, nn

import halfbyte
from halfbyte.optim import AdamW8bit


class Adapted(nn.Module):
    """A linear layer with a rank 16 adapter beside it."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.base = nn.Linear(k, n, bias=False)
        self.a, self.b = nn.Parameter(torch.randn(16, k) / k**0.5), nn.Parameter(torch.zeros(n, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Block(nn.Module):
    """A Llama-shaped decoder layer: grouped attention and a gated MLP."""

    def __init__(self, d: int, f: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, d // heads
        self.q, self.k, self.v = Adapted(d, d), Adapted(d, groups * self.size), Adapted(d, groups * self.size)
        self.o, self.gate, self.up, self.down = Adapted(d, d), Adapted(d, f), Adapted(d, f), Adapted(f, d)
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def train_8b(b: Bench) -> dict[str, float]:
    """QLoRA steps of an 8B-shaped model: random weights, packed at birth on the device, checkpointed, AdamW8bit."""
    d, f, layers, vocab = (b.size(4096), b.size(14336), 2 if b.tiny else 32, b.size(128256))
    heads, groups = (32, 8) if d == 4096 else (4, 2)
    batch, length = (1, 32) if b.tiny else (4, 2048)
    start = time.perf_counter()
    with torch.device(b.device), halfbyte.init_quantized("nf4"):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(BF16)
        try:
            blocks = nn.ModuleList([Block(d, f, heads, groups) for _ in range(layers)])
        finally:
            torch.set_default_dtype(previous)
    embedding, head = b.randn(vocab, d), b.randn(vocab, d) / d**0.5
    b.synchronize()
    built = time.perf_counter() - start
    adapters = [p for p in blocks.parameters() if p.requires_grad]
    optimizer = AdamW8bit(adapters, lr=1e-4)
    tokens = torch.randint(0, vocab, (batch, length), device=b.device)
    if b.cuda:
        torch.cuda.reset_peak_memory_stats(b.device)
    times = []
    for _ in range(2 if b.tiny else 5):
        b.synchronize()
        start = time.perf_counter()
        x = embedding[tokens].requires_grad_()
        for block in blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        loss = F.cross_entropy(F.linear(x[:, :-1], head).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        b.synchronize()
        times.append(time.perf_counter() - start)
    assert torch.isfinite(loss), "the loss is not finite"
    result = {
        "build_s": built,
        "step_s": statistics.median(times[1:]),
        "tokens_per_s": batch * length / statistics.median(times[1:]),
        "peak_gb": torch.cuda.max_memory_allocated(b.device) / 1e9 if b.cuda else float("nan"),
        "loss": float(loss.detach()),
    }
    print("8B-shaped QLoRA step: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))
    return result


def distributed_worker(rank: int, world: int, backend: str, port: int) -> None:
    """Shard, quantize, gather packed rows: equal to quantizing the whole, on every rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group(backend, rank=rank, world_size=world)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    torch.manual_seed(0)
    weight = torch.randn(64 * world, 576).to(device)
    shard = halfbyte.quantize(weight[rank * 64 : (rank + 1) * 64], "nf4-dq")
    gathered = [torch.empty_like(shard) for _ in range(world)]
    torch.distributed.all_gather(gathered, shard)
    assert torch.equal(torch.cat(gathered), halfbyte.quantize(weight, "nf4-dq"))
    torch.distributed.destroy_process_group()


def distributed(b: Bench) -> str:
    """Every GPU there is, NCCL also with one; gloo on the CPU."""
    world, backend = (max(1, torch.cuda.device_count()), "nccl") if b.cuda else (1, "gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(distributed_worker, (world, backend, port), nprocs=world)  # type: ignore[no-untyped-call]
    return f"{backend}, {world} process{'es' if world > 1 else ''}: packed rows gathered from shards equal the whole"
