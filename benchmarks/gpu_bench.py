"""How gpu_check.py times: interleaved peers between CUDA events, the same work replayed from a graph, floors of this run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        self.left_out: list[str] = []  # peers that did not run, and why
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
        """Times `peers` round by round, a row each; another library that fails is left out by name, ours is an error."""
        floor = max(nbytes / self.copy, flops / self.gemm) * 1e6
        for who, run in [*peers.items()]:
            try:
                for i in range(2):
                    run(i)
                self.synchronize()
            except Exception as error:
                if who.startswith("halfbyte"):
                    raise
                peers.pop(who)
                self.left_out.append(f"{title}: {who}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
                print(f"    left out: {self.left_out[-1]}", flush=True)
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
