"""What gpu_check.py measures of training: a QLoRA step of an 8B-shaped model, and packed rows over NCCL."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import BF16, Bench
from gpu_sections import borrowed
from torch import Tensor, nn

import halfbyte
from halfbyte.nn import QuantLinear
from halfbyte.optim import AdamW8bit


def fused(base: QuantLinear, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What HalfbyteLoraLinear does under PEFT. (A use of the layer's weight in Adapted itself would keep it dense.)"""
    return halfbyte.ops.lora_linear(x, base.weight, None, a, b, 1.0, base.format, base.in_features)


class Adapted(nn.Module):
    """A linear layer with a rank 16 adapter beside it."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.base: nn.Module = nn.Linear(k, n, bias=False).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(16, k) / k**0.5), nn.Parameter(torch.zeros(n, 16))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, QuantLinear):
            return fused(self.base, x, self.a, self.b)
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)  # type: ignore[no-any-return]


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


def to_bitsandbytes(linear: nn.Module) -> nn.Module:
    """The layer with bitsandbytes' nf4 weight, packed where it lies."""
    bnb = importlib.import_module("bitsandbytes")
    n, k = linear.weight.shape
    layer = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=BF16, quant_type="nf4", device="meta")
    packed, state = bnb.functional.quantize_4bit(linear.weight.data, blocksize=64, quant_type="nf4")
    options = {"quant_state": state, "quant_type": "nf4", "bnb_quantized": True, "module": layer}
    layer.weight = bnb.nn.Params4bit(packed, requires_grad=False, **options)
    layer.quant_state = state
    return layer  # type: ignore[no-any-return]


def make_blocks(b: Bench, who: str, layers: int, sizes: tuple[int, int, int, int]) -> nn.ModuleList:
    """bf16 blocks on the device, their linear weights as `who` has them."""
    blocks = nn.ModuleList()
    previous = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device(b.device), halfbyte.init_quantized("nf4") if who == "halfbyte" else nullcontext():
            for _ in range(layers):
                blocks.append(Block(*sizes))
                if who == "bitsandbytes":
                    for layer in [m for m in blocks[-1].modules() if isinstance(m, Adapted)]:
                        layer.base = to_bitsandbytes(layer.base)
    finally:
        torch.set_default_dtype(previous)
    return blocks


def train_8b(b: Bench) -> dict[str, Any]:
    """LoRA steps of an 8B-shaped model, random weights, checkpointed, AdamW8bit: on packed rows (packed at birth on the
    device), on dense bf16 weights, and on bitsandbytes' 4-bit weights.
    """
    found: dict[str, Any] = {}
    for who in ("halfbyte", "bf16", "bitsandbytes"):
        if who == "bitsandbytes" and not borrowed(b, who, lambda: importlib.import_module("bitsandbytes")):
            continue
        try:
            found[who] = train_step(b, who)
        except Exception as error:
            if who == "halfbyte":
                raise
            b.left_out.append(f"8B-shaped step: {who}: {type(error).__name__}: {error}".splitlines()[0])
        if b.cuda:
            gc.collect()
            torch.cuda.empty_cache()
    return found


def train_step(b: Bench, who: str) -> dict[str, float]:
    """One of them."""
    d, f, layers, vocab = (b.size(4096), b.size(14336), 2 if b.tiny else 32, b.size(128256))
    heads, groups = (32, 8) if d == 4096 else (4, 2)
    batch, length = (1, 32) if b.tiny else (4, 2048)
    torch.manual_seed(0)
    if b.cuda:
        torch.cuda.reset_peak_memory_stats(b.device)
    start = time.perf_counter()
    blocks = make_blocks(b, who, layers, (d, f, heads, groups))
    b.synchronize()
    built, build_peak = time.perf_counter() - start, torch.cuda.max_memory_allocated(b.device) if b.cuda else float("nan")
    embedding, head = b.randn(vocab, d), b.randn(vocab, d) / d**0.5
    optimizer = AdamW8bit([p for p in blocks.parameters() if p.requires_grad], lr=1e-4)
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
        "build_peak_gb": build_peak / 1e9,
        "step_s": statistics.median(times[1:]),
        "tokens_per_s": batch * length / statistics.median(times[1:]),
        "peak_gb": torch.cuda.max_memory_allocated(b.device) / 1e9 if b.cuda else float("nan"),
        "loss": float(loss.detach()),
    }
    print(f"8B-shaped LoRA step, {who}: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()), flush=True)
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
