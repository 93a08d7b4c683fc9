"""linear and linear_backward_input against bitsandbytes and dense torch: 4096 x 4096 and SmolLM2-135M's layers by M.

    python benchmarks/bench_linear.py --only "nf4 bf16 M=16" --seconds 5

Peers: `F.linear` on dense weights in the input's dtype (and fp32's for bf16 and fp16, should that be the faster one),
bitsandbytes' `matmul_4bit` (its inference path) and `dequantize_4bit` + `F.linear` (what its training path does).
halfbyte is called as its users do, by `halfbyte.ops`: what the op of the dispatcher costs beside it says bench_overhead.py.
With --rows, --features or --tokens only those are measured.
"""

from __future__ import annotations

import itertools
import warnings

import harness
import torch
import torch.nn.functional as F
from layers import Layer, layers, options
from timing import Case

from halfbyte import ops
from halfbyte.formats import Format

warnings.filterwarnings("ignore", module="bitsandbytes")

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
NARROW_TOKENS = (1, 20, 128, 512)  # 1: what generates a token; 20: no whole vectors
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
FORMATS = ("nf4", "fp4", "nf4-dq", "int8", "fp8")


def check(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    """Loose on purpose: peers sum and round in their own ways. tests/linear/oracle.py has the derived bound."""
    allowed = size * 2.0**-6 + exact.abs() * 2.0**-7
    if not ((got.double() - exact).abs() <= allowed).all():
        raise AssertionError("a result is wrong")


def bitsandbytes_cases(layer: Layer, x: torch.Tensor, flops: int) -> dict[str, Case]:
    try:
        import bitsandbytes as bnb
        import bitsandbytes.functional as BF
    except ImportError:
        return {}
    packed = layer.bitsandbytes_nf4(x.dtype)

    def inference(i: int) -> torch.Tensor:
        data, state = packed[i]
        return bnb.matmul_4bit(x, data.t(), quant_state=state)  # type: ignore[attr-defined]

    def training(i: int) -> torch.Tensor:
        return F.linear(x, BF.dequantize_4bit(*packed.apart(i)))

    return {"bitsandbytes": Case(inference, flops=flops), "bitsandbytes training": Case(training, flops=flops)}


def slow_backward(dtype: torch.dtype) -> bool:
    """Whether torch's takes 0.1 s a token of 4096 x 4096 and more."""
    if dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2"


def compare(report: harness.Report, title: str, M: int, name: str, format_name: str, layer: Layer) -> None:
    dtype, format = DTYPES[name], Format.parse(format_name)
    source, weights, N, K = layer.fp32, layer.dense(dtype), layer.rows, layer.features
    x, grad, flops = torch.randn(M, K).to(dtype), torch.randn(M, N).to(dtype), 2 * M * N * K
    row_bytes = format.row_bytes(K)
    packed = layer.made(lambda weight: ops.quantize(weight, format), N * row_bytes)

    def forward(i: int) -> torch.Tensor:
        return ops.linear(x, packed[i], None, format, K)

    def backward(i: int) -> torch.Tensor:
        return ops.linear_backward_input(grad, packed.apart(i), format, K)

    cases = {
        "halfbyte": Case(forward, bytes=N * row_bytes, flops=flops),
        "halfbyte backward": Case(backward, bytes=N * row_bytes, flops=flops),
        "dense": Case(lambda i: F.linear(x, weights[i]), flops=flops),
        "dense backward": Case(lambda i: grad @ weights.apart(i), flops=flops),
    }
    if name != "fp32":
        x32, grad32 = x.float(), grad.float()
        cases["dense in fp32"] = Case(lambda i: F.linear(x32, source[i]), flops=flops)
        cases["dense backward in fp32"] = Case(lambda i: grad32 @ source.apart(i), flops=flops)
        if slow_backward(dtype) and M > 1:
            del cases["dense backward"]
    if format_name == "nf4":
        cases |= bitsandbytes_cases(layer, x, flops)

    def verify() -> None:
        a, g = x[:8].double(), grad[:8].double()
        weight, other = (ops.dequantize(p, format, K, torch.float32).double() for p in (packed[0], packed.apart(0)))
        check(forward(0)[:8], a @ weight.T, a.abs() @ weight.abs().T)
        check(backward(0)[:8], g @ other, g.abs() @ other.abs())

    floors = {"read": N * row_bytes}
    if flops > 1 << 28:  # less is done before the floor's threads have started
        floors["fp32 products" if name == "fp16" else f"{name} products"] = flops // 2  # as ours multiplies
    report.compare(title, cases, verify=verify, baseline="halfbyte", floors=floors)


def wanted(name: str, format_name: str, M: int, layer: Layer) -> bool:
    """nf4 at every M, of every other format and of fp16 a few; of narrow layers nf4."""
    some = M in (1, 16, 512)
    if layer.size:
        return format_name == "nf4"
    return (format_name == "nf4" and (some or name != "fp16")) or (some and name == "bf16")


def main() -> None:
    args = harness.arguments(__doc__, **options(TOKENS))
    report = harness.Report("linear", args)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for layer, tokens in layers(args, TOKENS, narrow_tokens=NARROW_TOKENS):
        for M, name, format_name in itertools.product(tokens, DTYPES, FORMATS):
            title = f"linear {format_name} {name} M={M}{layer.size}"
            if wanted(name, format_name, M, layer) and args.only in title:
                compare(report, title, M, name, format_name, layer)
    report.save()


if __name__ == "__main__":
    main()
