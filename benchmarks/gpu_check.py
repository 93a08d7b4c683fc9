"""One command on a machine with a GPU: check every op, measure floors and every target, take an 8B-shaped training step.

    python benchmarks/gpu_check.py [--json OUT.json] [--only TEXT] [--rounds 20]       (under 8 minutes on an H200)
    python benchmarks/gpu_check.py --dry-run                                           (its plumbing, tiny, on the CPU)

Imports torch and halfbyte; bitsandbytes is compared with where it is installed. Peers run interleaved in one process
(A B A B), on random data, over buffers rotated past the L2 cache. `event` is the median between CUDA events, host launch
included; `graph` the same work replayed from a CUDA graph: the kernel alone. `of floor` = floor / graph, with the floor
from the copy bandwidth and the bf16 GEMM rate of this run. Memory checks to run beside it:
    compute-sanitizer --tool memcheck|racecheck|initcheck python -m pytest tests/cuda/test_on_gpu.py -k "formats or route"
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_checks  # noqa: E402
import gpu_plan  # noqa: E402

import halfbyte  # noqa: E402
from halfbyte.optim import AdamW8bit  # noqa: E402

bnb: Any = None
if torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes"):
    import bitsandbytes.functional as bnb

L2_PAST = 200 << 20  # bytes of buffers to rotate over
BF16 = torch.bfloat16


@dataclass
class Row:
    """One line of the table; times in microseconds."""

    title: str
    who: str
    event: float
    graph: float | None
    floor: float
    spread: float  # (80th - 20th percentile) / median of the event times


class Bench:
    def __init__(self, device: torch.device, rounds: int, tiny: bool) -> None:
        self.device, self.rounds, self.tiny = device, rounds, tiny
        self.cuda = device.type == "cuda"
        self.rows: list[Row] = []
        self.copy = self.gemm = float("inf")  # bytes/s and flop/s, measured by floors()

    def size(self, n: int, small: int = 256) -> int:
        return min(n, small) if self.tiny else n

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def once(self, run: Callable[[int], object], i: int) -> Callable[[], float]:
        """Starts run(i); the returned function gives its microseconds."""
        if not self.cuda:
            start = time.perf_counter()
            run(i)
            elapsed = time.perf_counter() - start
            return lambda: elapsed * 1e6
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(i)
        end.record()
        return lambda: begin.elapsed_time(end) * 1e3

    def graph(self, run: Callable[[int], object], calls: int = 16) -> float | None:
        """Microseconds a call of `calls` captured calls over rotating buffers; None where there are no graphs."""
        if not self.cuda:
            return None
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(calls):
                    run(i)
        except RuntimeError as error:
            print(f"    not capturable: {str(error).splitlines()[0]}")
            torch.cuda.synchronize(self.device)
            return None
        graph.replay()
        times = [self.once(lambda _: graph.replay(), 0) for _ in range(7)]
        self.synchronize()
        return statistics.median(t() for t in times) / calls

    def compare(
        self, title: str, peers: dict[str, Callable[[int], object]], nbytes: float = 0, flops: float = 0, graphs: bool = True
    ) -> None:
        floor = max(nbytes / self.copy, flops / self.gemm) * 1e6
        for run in peers.values():
            for i in range(2):
                run(i)
        self.synchronize()
        pending: dict[str, list[Callable[[], float]]] = {who: [] for who in peers}
        for i in range(self.rounds):
            for who, run in peers.items():
                pending[who].append(self.once(run, i))
        self.synchronize()
        for who, clocks in pending.items():
            times = sorted(c() for c in clocks)
            median = statistics.median(times)
            spread = (times[int(len(times) * 0.8)] - times[int(len(times) * 0.2)]) / median
            row = Row(title, who, median, self.graph(peers[who]) if graphs else None, floor, spread)
            self.rows.append(row)
            best = row.graph or row.event
            print(
                f"{title:42s} {who:18s} event {median:10.1f} us  graph {row.graph or float('nan'):10.1f} us  "
                f"floor {floor:9.1f} us  {100 * floor / best:5.1f} % of floor  +-{50 * spread:.0f} %",
                flush=True,
            )
        if self.cuda:
            torch.cuda.empty_cache()

    def rotate(self, make: Callable[[], Any], nbytes: int) -> Callable[[int], Any]:
        """Enough copies of a buffer to fall out of the L2 cache, by round."""
        copies = [make() for _ in range(1 if self.tiny else max(1, min(64, -(-L2_PAST // nbytes))))]
        return lambda i: copies[i % len(copies)]

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)


def floors(b: Bench) -> dict[str, float]:
    """Copy bandwidth (bytes read + written a second) and bf16 GEMM rate of this machine, now."""
    source = b.randn(b.size(1 << 29))
    target = torch.empty_like(source)
    n = b.size(8192)
    x, y = b.randn(n, n), b.randn(n, n)
    b.synchronize()

    def fastest(run: Callable[[int], object]) -> float:
        run(0)
        clocks = [b.once(run, i) for i in range(10)]
        b.synchronize()
        return statistics.median(c() for c in clocks) * 1e-6

    b.copy = 2 * source.numel() * 2 / fastest(lambda _: target.copy_(source))
    b.gemm = 2 * n**3 / fastest(lambda _: x @ y)
    print(f"copy {b.copy / 1e12:.2f} TB/s, bf16 GEMM {b.gemm / 1e12:.0f} TFLOP/s")
    return {"copy_bytes_per_s": b.copy, "gemm_flop_per_s": b.gemm}


def bnb_rows(b: Bench, weight: Tensor) -> Any:
    return bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4") if bnb else None


def codec(b: Bench) -> None:
    for name in ("nf4", "nf4-dq", "int8"):
        n, k = b.size(14336), b.size(4096)
        fmt = halfbyte.Format.parse(name)
        weights = b.rotate(lambda: halfbyte.quantize(b.randn(n, k), name), n * fmt.row_bytes(k))  # noqa: B023
        peers: dict[str, Callable[[int], object]] = {"halfbyte": lambda i: halfbyte.dequantize(weights(i), name, k)}  # noqa: B023
        if name == "nf4" and bnb:
            theirs = b.rotate(lambda: bnb_rows(b, b.randn(n, k)), n * k // 2)  # noqa: B023
            peers["bitsandbytes"] = lambda i: bnb.dequantize_4bit(*theirs(i))  # noqa: B023
        b.compare(f"dequantize {name} {n}x{k}", peers, n * (fmt.row_bytes(k) + 2 * k))
    n, k = b.size(1 << 16), b.size(1 << 14)
    dense = b.randn(n, k)
    peers = {"halfbyte": lambda _: halfbyte.quantize(dense, "nf4")}
    if bnb:
        peers["bitsandbytes"] = lambda _: bnb_rows(b, dense)
    b.compare(f"quantize bf16 -> nf4 {n * k / 1e9:.2f}e9", peers, n * k * 2.5625, graphs=False)


def linears(b: Bench) -> None:
    problems = [
        (1, 8192, 8192),
        (16, 8192, 8192),
        (1, 4096, 4096),
        (1, 14336, 4096),
        (64, 14336, 4096),
        (128, 14336, 4096),
        (256, 14336, 4096),
        (512, 14336, 4096),
        (4096, 14336, 4096),
    ]
    for batch, rows, columns in problems:
        m, n, k = b.size(batch, 64), b.size(rows), b.size(columns)
        x, nbytes = b.randn(m, k), halfbyte.Format.parse("nf4").row_bytes(k) * n
        packed = b.rotate(lambda: halfbyte.quantize(b.randn(n, k), "nf4"), nbytes)  # noqa: B023
        dense = b.rotate(lambda: b.randn(n, k), n * k * 2)  # noqa: B023
        peers: dict[str, Callable[[int], object]] = {
            "halfbyte": lambda i: halfbyte.ops.linear(x, packed(i), None, "nf4", k),  # noqa: B023
            "dequant + cuBLAS": lambda i: F.linear(x, halfbyte.dequantize(packed(i), "nf4", k)),  # noqa: B023
            "bf16 cuBLAS": lambda i: F.linear(x, dense(i)),  # noqa: B023
        }
        if bnb:
            theirs = b.rotate(lambda: bnb_rows(b, b.randn(n, k)), n * k // 2)  # noqa: B023
            if m == 1:
                peers["bitsandbytes"] = lambda i: bnb.gemv_4bit(x.view(1, 1, -1), theirs(i)[0].t(), state=theirs(i)[1])  # noqa: B023
            else:
                peers["bitsandbytes"] = lambda i: F.linear(x, bnb.dequantize_4bit(*theirs(i)))  # noqa: B023
        error = gpu_checks.linear_bound(
            x, packed(0), halfbyte.Format.parse("nf4"), halfbyte.ops.linear(x, packed(0), None, "nf4", k)
        )
        assert error <= 1, f"linear M={m} is wrong by {error} bounds"
        b.compare(f"linear nf4 M={m} {n}x{k}", peers, nbytes + 2 * m * (n + k), 2.0 * m * n * k)


def qlora_linear(b: Bench) -> None:
    """Forward and backward of a frozen linear with rank 16 adapters."""
    m, n, k = b.size(4096), b.size(4096), b.size(4096)
    x = b.randn(m, k).requires_grad_()
    packed, dense = halfbyte.quantize(b.randn(n, k), "nf4"), b.randn(n, k)
    a, c = b.randn(16, k).requires_grad_(), b.randn(n, 16).requires_grad_()
    g = b.randn(m, n)

    def step(y: Tensor) -> None:
        torch.autograd.grad(y, (x, a, c), g)

    b.compare(
        f"QLoRA linear fwd+bwd r=16 M={m}",
        {
            "halfbyte": lambda _: step(halfbyte.ops.lora_linear(x, packed, None, a, c, 1.0, "nf4", k)),
            "halfbyte, branch beside it": lambda _: step(
                halfbyte.ops.linear(x, packed, None, "nf4", k) + F.linear(F.linear(x, a), c)
            ),
            "bf16 LoRA": lambda _: step(F.linear(x, dense) + F.linear(F.linear(x, a), c)),
        },
        flops=4.0 * m * n * k,
        graphs=False,
    )


def int8_linears(b: Bench) -> None:
    """int8 rows times activations quantized per token, beside the same rows decoded."""
    for batch in (16, 512, 4096):
        m, n, k = b.size(batch, 64), b.size(4096), b.size(4096)
        x, dense = b.randn(m, k), b.randn(n, k)
        packed = halfbyte.quantize(dense, "int8")
        b.compare(
            f"int8_linear M={m} {n}x{k}",
            {
                "halfbyte": lambda _: halfbyte.ops.int8_linear(x, packed, None, k),  # noqa: B023
                "halfbyte, decoded": lambda _: halfbyte.ops.linear(x, packed, None, "int8", k),  # noqa: B023
                "bf16 cuBLAS": lambda _: F.linear(x, dense),  # noqa: B023
            },
            n * k + 2 * m * (n + k),
            2.0 * m * n * k,
        )


def optimizers(b: Bench) -> None:
    def setup(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[int], object]]:
        params = [b.randn(*s) for s in shapes]
        grads = [torch.randn_like(p) for p in params]
        ours = gpu_checks.adamw(params, grads, torch.ones((), device=b.device))
        peers: dict[str, Callable[[int], object]] = {"halfbyte": lambda _: ours()}
        dense = [p.clone().requires_grad_() for p in params]
        for p, g in zip(dense, grads, strict=True):
            p.grad = g
        fused = torch.optim.AdamW(dense, fused=True, capturable=b.cuda)
        peers["torch fused"] = lambda _: fused.step()
        if bnb:
            import bitsandbytes.optim

            other = bitsandbytes.optim.AdamW8bit(dense)
            peers["bitsandbytes"] = lambda _: other.step()
        return peers

    n = b.size(1 << 15)
    count = 8 if b.cuda else 2
    b.compare(f"AdamW8 {count * n * n / 1e9:.2f}e9 bf16", setup([(n, n)] * count), count * n * n * 10.06, graphs=False)
    r, k = 16, b.size(4096)
    lora = [(r, k), (k, r)] * (224 if b.cuda else 4)
    b.compare(f"AdamW8 {len(lora)} LoRA tensors", setup(lora), sum(x * y for x, y in lora) * 10.3, graphs=False)


def host_cost(b: Bench) -> dict[str, float]:
    """Microseconds of host time a call, tiny tensors, nothing waited for."""
    x, packed = b.randn(1, 64), halfbyte.quantize(b.randn(16, 64), "nf4")
    dense = b.randn(16, 64)
    costs = {}
    for name, run in {
        "linear": lambda: halfbyte.ops.linear(x, packed, None, "nf4", 64),
        "dequantize": lambda: halfbyte.dequantize(packed, "nf4", 64),
        "F.linear": lambda: F.linear(x, dense),
    }.items():
        for _ in range(50):
            run()
        b.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            run()
        costs[name] = (time.perf_counter() - start) / 500 * 1e6
        b.synchronize()
    print("host cost: " + ", ".join(f"{name} {us:.1f} us" for name, us in costs.items()))
    return costs


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
    world, backend = (max(1, torch.cuda.device_count()), "nccl") if b.cuda else (1, "gloo")
    torch.multiprocessing.spawn(distributed_worker, (world, backend, 29512), nprocs=world)  # type: ignore[no-untyped-call]
    return f"{backend}, {world} process{'es' if world > 1 else ''}: packed rows gathered from shards equal the whole"


def plans(b: Bench) -> list[dict[str, Any]]:
    """The memory planner against the allocator, within 10 %."""
    return gpu_plan.check_plans(b.device, b.tiny)


def run_checks(device: torch.device, only: str) -> list[str]:
    failed = []
    for name, check in gpu_checks.CHECKS.items():
        if only not in name or (device.type != "cuda" and name in gpu_checks.CUDA_ONLY):
            continue
        start = time.perf_counter()
        try:
            torch.manual_seed(0)
            check(device)
            print(f"  ok      {name} ({time.perf_counter() - start:.1f} s)", flush=True)
        except Exception:  # every failure is reported, and the run ends with status 1
            failed.append(name)
            print(f"  FAILED  {name}\n{traceback.format_exc()}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    parser.add_argument("--only", default="", help="run only checks and sections whose name contains this")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: proves the script, measures nothing")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU (--dry-run exercises this script without one)", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.dry_run else "cuda:0")
    b = Bench(device, 3 if args.dry_run else args.rounds, args.dry_run)
    result: dict[str, Any] = {
        "device": "dry run on the CPU" if args.dry_run else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "halfbyte": halfbyte._library.build_info(),
        "bitsandbytes": getattr(sys.modules.get("bitsandbytes"), "__version__", None),
    }
    print(json.dumps(result))
    start = time.perf_counter()
    result["failed"] = run_checks(device, args.only)
    sections = {
        "floors": floors,
        "codec": codec,
        "linears": linears,
        "qlora_linear": qlora_linear,
        "int8_linear": int8_linears,
        "optimizers": optimizers,
        "host_cost": host_cost,
        "plan": plans,
        "train_8b": train_8b,
        "distributed": distributed,
    }
    for name, section in sections.items():
        if args.only and args.only not in name and name != "floors":
            continue
        print(f"-- {name}", flush=True)
        try:
            result[name] = section(b)
        except Exception:
            result["failed"].append(name)
            print(f"  FAILED  {name}\n{traceback.format_exc()}", flush=True)
    result["rows"] = [asdict(row) for row in b.rows]
    result["seconds"] = time.perf_counter() - start
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1, default=str))
    print(f"{result['seconds']:.0f} s, {len(result['failed'])} failed {result['failed'] or ''}; written to {args.json}")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
