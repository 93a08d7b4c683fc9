"""quantize on the CPU against bitsandbytes and torch, and against the copy bandwidth.

    python benchmarks/bench_quantize.py [--only nf4] [--threads 2]
    HALFBYTE_CPU_ISA=avx2 python benchmarks/bench_quantize.py

"fresh memory" is what a call costs by default, page faults of the new tensor included; the other rows reuse memory
(timing.reuse_memory). Inputs rotate past the last-level cache.
"""

from __future__ import annotations

import harness
import timing
import torch
from timing import Case, Rotated
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import Format

try:
    import bitsandbytes.functional as bnb
except ImportError:
    bnb = None

ops = torch.ops.halfbyte
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def torch_recipe(dense: Rotated[Tensor], format: str, moved: int) -> Case:
    """The lines of torch that people write for 8-bit weights."""
    largest, kind = (127.0, torch.int8) if format == "int8" else (448.0, torch.float8_e4m3fn)

    def run(i: int) -> tuple[Tensor, Tensor]:
        x = dense.apart(i).float()
        absmax = x.abs().amax(-1, keepdim=True)
        scaled = x * (largest / absmax)
        return (scaled.round() if format == "int8" else scaled).to(kind), absmax

    return Case(run, moved)


def quantize(report: harness.Report, format: str, dtype_name: str, N: int, K: int, note: str = "") -> None:
    title = f"{dtype_name} -> {format}, {N} x {K}{note}"
    if report.args.only not in title:
        return
    f, dtype = Format.parse(format), DTYPES[dtype_name]
    moved = N * f.row_bytes(K) + N * K * dtype.itemsize
    dense = timing.rotate(lambda i: torch.randn(N, K).to(dtype), N * K * dtype.itemsize)

    def run(i: int) -> Tensor:
        return ops.quantize(dense[i], f.id, f.block_size)

    cases = {"halfbyte": Case(run, moved)}
    if bnb is not None and f.bits == 4:

        def peer(i: int) -> tuple[Tensor, object]:
            x = dense.apart(i)
            return bnb.quantize_4bit(x, blocksize=f.block_size, quant_type=f.codebook, compress_statistics=f.scales == "dq")

        cases["bitsandbytes"] = Case(peer, moved)
    if f.bits == 8:
        cases["torch"] = torch_recipe(dense, format, moved)

    def verify() -> None:
        rows = slice(0, min(N, 256))
        packed = run(0)[rows]
        assert torch.equal(packed, reference.quantize(dense[0][rows], format))
        if "bitsandbytes" in cases and f.codebook == "nf4" and K % f.block_size == 0:
            codes = bnb.quantize_4bit(dense[0][rows], blocksize=f.block_size, quant_type="nf4")[0]
            assert torch.equal(codes.view(-1, K // 2), packed[:, : K // 2])

    baseline = next((name for name in cases if name != "halfbyte"), None)
    floors = {"copy": moved, "read": dense[0].nbytes} if moved > 1 << 22 else None
    report.compare(title, cases, verify=verify, baseline=baseline, floors=floors)


def lists(report: harness.Report, format: str, shapes: list[tuple[int, int]], note: str) -> None:
    """`quantize_list` against its tensors one by one."""
    title = f"bf16 -> {format}, list of {len(shapes)}, {note}"
    if report.args.only not in title:
        return
    f, dense = Format.parse(format), [torch.randn(shape).bfloat16() for shape in shapes]
    moved = sum(n * (f.row_bytes(k) + 2 * k) for n, k in shapes)

    def together(_: int) -> list[Tensor]:
        return ops.quantize_list(dense, f.id, f.block_size)

    def apart(_: int) -> list[Tensor]:
        return [ops.quantize(x, f.id, f.block_size) for x in dense]

    def verify() -> None:
        for got, x in zip(together(0), dense, strict=True):
            assert torch.equal(got, reference.quantize(x, format))

    cases = {"halfbyte": Case(together, moved), "one by one": Case(apart, moved)}
    report.compare(title, cases, verify=verify, baseline="one by one")


def main() -> None:
    report = harness.Report("quantize", harness.arguments(__doc__))
    quantize(report, "nf4", "bf16", 4096, 4096, ", fresh memory")
    timing.reuse_memory()
    for format in ("nf4", "nf4:32", "nf4-dq", "fp4", "int8", "fp8"):
        quantize(report, format, "bf16", 4096, 4096)
    quantize(report, "nf4", "fp16", 4096, 4096)
    quantize(report, "nf4", "fp32", 4096, 4096)
    quantize(report, "nf4", "bf16", 1536, 576)  # in cache
    quantize(report, "nf4", "bf16", 64, 576)
    lists(report, "nf4", [(64, 64)] * 28, "64 x 64")
    lists(report, "nf4", harness.SMALL_BLOCK, "a block, d=576")
    report.save()


if __name__ == "__main__":
    main()
