"""dequantize and embedding on the CPU against bitsandbytes, torchao and torch, and against the copy bandwidth.

    python benchmarks/bench_dequantize.py [--only nf4] [--threads 2]
    HALFBYTE_CPU_ISA=avx2 python benchmarks/bench_dequantize.py

Two kinds of rows: "fresh memory" is what a call costs by default, page faults of the new tensor included; the others
reuse memory (timing.reuse_memory) and so show the kernels. Inputs rotate past the last-level cache.
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
try:
    from torchao.dtypes.nf4tensor import to_nf4
except ImportError:
    to_nf4 = None

ops = torch.ops.halfbyte
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def bitsandbytes_case(dense: Rotated[Tensor], format: str, moved: int) -> Case | None:
    """bitsandbytes' own dequantization of the same weights, where it has the format."""
    f = Format.parse(format)
    if bnb is None or f.bits != 4:
        return None
    how = {"blocksize": f.block_size, "quant_type": f.codebook, "compress_statistics": f.scales == "dq"}
    states = Rotated(bnb.quantize_4bit(x, **how) for x in dense)
    return Case(lambda i: bnb.dequantize_4bit(*states[i]), moved)


def torch_recipe(packed: Rotated[Tensor], format: str, K: int, dtype: torch.dtype, moved: int) -> Case | None:
    """The line of torch that people write for 8-bit weights: codes times a column of scales."""
    f = Format.parse(format)
    if f.bits != 8:
        return None
    kind = torch.int8 if f.codebook == "int8" else torch.float8_e4m3fn
    codes = Rotated(p[:, :K].contiguous().view(kind) for p in packed)
    scales = Rotated(reference.unpack(p, f, K)[1] / (127 if f.codebook == "int8" else 448) for p in packed)
    return Case(lambda i: codes[i].to(dtype) * scales[i].to(dtype), moved)


def dequantize(report: harness.Report, format: str, dtype_name: str, N: int, K: int, note: str = "") -> None:
    title = f"{format} -> {dtype_name}, {N} x {K}{note}"
    if report.args.only not in title:
        return
    f, dtype = Format.parse(format), DTYPES[dtype_name]
    moved = N * f.row_bytes(K) + N * K * dtype.itemsize
    dense = timing.rotate(lambda i: torch.randn(N, K).to(dtype), N * K * dtype.itemsize)
    packed = timing.rotate(lambda i: ops.quantize(dense[i], f.id, f.block_size), min(N * f.row_bytes(K), 8 << 20))

    def run(i: int) -> Tensor:
        return ops.dequantize(packed[i], f.id, f.block_size, K, dtype)

    peer = bitsandbytes_case(dense, format, moved)

    def verify() -> None:
        rows = slice(0, min(N, 256))
        exact = reference.dequantize(packed[0][rows], format, K, dtype)
        assert torch.equal(run(0)[rows], exact)
        # Its fp4 breaks ties another way, its nested scales are coarser, and it goes wrong where blocks straddle rows.
        if peer is not None and f.codebook == "nf4" and f.scales == "fp32" and K % f.block_size == 0:
            torch.testing.assert_close(peer.run(0)[rows], exact, rtol=0.01, atol=0)

    cases = {"halfbyte": Case(run, moved)}
    if peer is not None:
        cases["bitsandbytes"] = peer
    if recipe := torch_recipe(packed, format, K, dtype, moved):
        cases["torch"] = recipe
    if to_nf4 is not None and format == "nf4" and N * K % 16384 == 0 and dtype == torch.bfloat16:
        tensors = [to_nf4(x, block_size=64, scaler_block_size=256) for x in dense[:2]]
        cases["torchao"] = Case(lambda i: tensors[i % 2].get_original_weight(), moved)
    floors = {"copy": moved, "write": N * K * dtype.itemsize} if moved > 1 << 22 else None
    baseline = next((name for name in cases if name != "halfbyte"), None)
    report.compare(title, cases, verify=verify, baseline=baseline, floors=floors)


def lists(report: harness.Report, format: str, shapes: list[tuple[int, int]], note: str) -> None:
    """`dequantize_list` against its tensors one by one."""
    title = f"{format} -> bf16, list of {len(shapes)}, {note}"
    if report.args.only not in title:
        return
    f, columns = Format.parse(format), [k for _, k in shapes]
    packed = [ops.quantize(torch.randn(n, k), f.id, f.block_size) for n, k in shapes]
    moved = sum(n * (f.row_bytes(k) + 2 * k) for n, k in shapes)

    def together(_: int) -> list[Tensor]:
        return ops.dequantize_list(packed, f.id, f.block_size, columns, torch.bfloat16)

    def apart(_: int) -> list[Tensor]:
        return [ops.dequantize(p, f.id, f.block_size, k, torch.bfloat16) for p, k in zip(packed, columns, strict=True)]

    def verify() -> None:
        for got, rows, k in zip(together(0), packed, columns, strict=True):
            assert torch.equal(got, reference.dequantize(rows, format, k, torch.bfloat16))

    cases = {"halfbyte": Case(together, moved), "one by one": Case(apart, moved)}
    report.compare(title, cases, verify=verify, baseline="one by one")


def embedding(report: harness.Report, format: str, V: int, K: int, count: int) -> None:
    title = f"embedding {format} -> bf16, {count} of {V} x {K}"
    if report.args.only not in title:
        return
    f = Format.parse(format)
    dense = torch.randn(V, K).bfloat16()
    packed = ops.quantize(dense, f.id, f.block_size)
    indices = [torch.randint(0, V, (count,)) for _ in range(20)]

    def run(i: int) -> Tensor:
        return ops.embedding(indices[i % 20], packed, f.id, f.block_size, K, torch.bfloat16)

    def verify() -> None:
        assert torch.equal(run(0), reference.embedding(indices[0], packed, format, K, torch.bfloat16))

    moved = count * (f.row_bytes(K) + 2 * K)
    peer = Case(lambda i: torch.nn.functional.embedding(indices[i % 20], dense), 4 * count * K)
    report.compare(
        title, {"halfbyte": Case(run, moved), "torch, dense bf16": peer}, verify=verify, baseline="torch, dense bf16"
    )


def main() -> None:
    report = harness.Report("dequantize", harness.arguments(__doc__))
    dequantize(report, "nf4", "bf16", 4096, 4096, ", fresh memory")
    timing.reuse_memory()
    for format in ("nf4", "nf4:32", "nf4-dq", "fp4", "int8", "fp8"):
        dequantize(report, format, "bf16", 4096, 4096)
    dequantize(report, "nf4", "fp16", 4096, 4096)
    dequantize(report, "nf4", "fp32", 4096, 4096)
    dequantize(report, "nf4", "bf16", 4096, 4304)  # every other row starts off a cache line
    dequantize(report, "nf4", "bf16", 1536, 576)  # in cache
    dequantize(report, "nf4", "bf16", 64, 576)
    lists(report, "nf4", [(64, 64)] * 28, "64 x 64")
    lists(report, "nf4", harness.SMALL_BLOCK, "a block, d=576")
    embedding(report, "nf4", 49152, 576, 4096)
    report.save()


if __name__ == "__main__":
    main()
