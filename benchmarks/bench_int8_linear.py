"""int8_linear (int8 rows, activations quantized per token) against our linear on the same rows and dense torch: 4096 x 4096
and SmolLM2-135M's layers, by M.

    python benchmarks/bench_int8_linear.py --only "bf16 M=16" --seconds 5

Peers: `F.linear` on dense weights in the input's dtype (and in float32 for bf16 inputs), bitsandbytes' `linear8bitlt`
forward (`int8_vectorwise_quant` + `int8_linear_matmul` + `int8_mm_dequant`), torch's own int8 product on codes quantized
beforehand (`torch._int_mm` alone: no quantization, no scales). With AVX2 that one adds pairs of bytes in 16 bits, which
saturate: its row says so where products of 127 by 127 come out wrong. With --rows, --features or --tokens only those are
measured.
"""

from __future__ import annotations

import itertools
import warnings

import harness
import torch
import torch.nn.functional as F
from layers import Layer, layers, options
from timing import Case, Rotated

from halfbyte import ops
from halfbyte import reference_products as reference

warnings.filterwarnings("ignore", module="bitsandbytes")

TOKENS = (1, 4, 8, 16, 20, 128, 512)
NARROW_TOKENS = (8, 20, 128, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def bitsandbytes_case(layer: Layer, x: torch.Tensor, flops: int) -> dict[str, Case]:
    try:
        import bitsandbytes.functional as BF
    except ImportError:
        return {}
    size = layer.rows * layer.features
    quantized = layer.kept("bitsandbytes int8", lambda weight: BF.int8_vectorwise_quant(weight.half()), size)

    def run(i: int) -> torch.Tensor:
        codes, scales, _ = quantized[i]
        q, s, _ = BF.int8_vectorwise_quant(x.half())
        return BF.int8_mm_dequant(BF.int8_linear_matmul(q, codes), s, scales)

    return {"bitsandbytes": Case(run, flops=flops)}


def int_mm_saturates(M: int, K: int) -> bool:
    """Whether torch's integer product is wrong where all codes are the largest."""
    row, column = (torch.full(shape, 127, dtype=torch.int8) for shape in ((M, K), (K, 32)))
    return bool((torch._int_mm(row, column) != 127 * 127 * K).any())


def compare(report: harness.Report, title: str, M: int, name: str, layer: Layer) -> None:
    dtype, N, K = DTYPES[name], layer.rows, layer.features
    source, weights = layer.fp32, layer.dense(dtype)
    packed = layer.made(lambda weight: ops.quantize(weight, "int8"), N * K)
    x, flops, moved = torch.randn(M, K).to(dtype), 2 * M * N * K, N * packed[0].shape[1]
    codes = Rotated(p[:, :K].view(torch.int8).contiguous().t() for p in packed)
    q = ops.quantize(x, "int8")[:, :K].view(torch.int8).contiguous()
    int_mm = "torch._int_mm alone (saturates)" if int_mm_saturates(M, K) else "torch._int_mm alone"
    cases = {
        "halfbyte": Case(lambda i: ops.int8_linear(x, packed[i], None, K), bytes=moved, flops=flops),
        "halfbyte linear": Case(lambda i: ops.linear(x, packed.apart(i), None, "int8", K), bytes=moved, flops=flops),
        "dense": Case(lambda i: F.linear(x, weights[i]), flops=flops),
        int_mm: Case(lambda i: torch._int_mm(q, codes[i]), flops=flops),
    }
    if name == "bf16":
        x32 = x.float()
        cases["dense in fp32"] = Case(lambda i: F.linear(x32, source[i]), flops=flops)
    cases |= bitsandbytes_case(layer, x, flops)

    def verify() -> None:
        expected = reference.int8_linear(x[:4], packed[0][:64], None, K)
        assert torch.equal(cases["halfbyte"].run(0)[:4, :64], expected), "not the integer oracle's bits"  # type: ignore[index]

    floors = {"read": moved} | ({"int8 products": flops // 2} if flops > 1 << 28 else {})
    report.compare(title, cases, verify=verify, baseline="halfbyte", floors=floors)


def main() -> None:
    args = harness.arguments(__doc__, **options(TOKENS))
    report = harness.Report("int8_linear", args)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for layer, tokens in layers(args, TOKENS, narrow_tokens=NARROW_TOKENS):
        for M, name in itertools.product(tokens, DTYPES):
            title = f"int8_linear {name} M={M}{layer.size}"
            if args.only in title:
                compare(report, title, M, name, layer)
    report.save()


if __name__ == "__main__":
    main()
