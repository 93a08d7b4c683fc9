"""lora_linear, forward + backward at r = 16: against the same LoRA on dense weights and on bitsandbytes; 4096 x 4096 and
SmolLM2-135M's query projection, by M.

    python benchmarks/bench_lora.py --only "bf16 M=512" --seconds 5

The peers do what PEFT's layer does: y = base(x) + (d(x) A^T) B^T * scaling, gradients of x, A and B; d is dropout where a
row says so, else nothing. "dense" is `F.linear` on weights of the input's dtype, "dense in fp32" the same step in float32
throughout (should that be the faster one), and bitsandbytes is `matmul_4bit` as its training path runs it. "two nodes" is
PEFT's formula on our own `linear`: what fusing is worth. Adapters have the input's dtype, or float32 under bf16 ("bf16, fp32
adapters"), as PEFT makes them by default. With --rows, --features or --tokens only those are measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import harness
import timing
import torch
import torch.nn.functional as F
from layers import Layer, layers, options
from timing import Case
from torch import Tensor

from halfbyte.ops import linear, lora_linear, quantize

KINDS = {  # dtype of the input, of the adapter, dropout
    "bf16": (torch.bfloat16, torch.bfloat16, 0.0),
    "bf16, fp32 adapters": (torch.bfloat16, torch.float32, 0.0),
    "bf16, fp32 adapters, dropout 0.1": (torch.bfloat16, torch.float32, 0.1),
    "fp32": (torch.float32, torch.float32, 0.0),
    "fp32, dropout 0.1": (torch.float32, torch.float32, 0.1),
}
TOKENS = (16, 128, 512, 2048)
NARROW, NARROW_TOKENS = ((576, 576),), (4, 20, 128, 512)
NARROW_KINDS = ("bf16", "bf16, fp32 adapters", "fp32")
SCALING = 2.0


def peft(base: Callable[[Tensor], Tensor], x: Tensor, a: Tensor, b: Tensor, dropout: Callable[[Tensor], Tensor]) -> Tensor:
    """PEFT's `lora.Linear.forward`."""
    return (base(x) + F.linear(F.linear(dropout(x.to(a.dtype)), a), b) * SCALING).to(x.dtype)


def dropout_kept(x: Tensor, p: float) -> Tensor:
    """What `lora_linear` keeps of x when it draws next."""
    mask = torch.ops.halfbyte.dropout_mask(x, torch.randint(2**63 - 1, (1,)), p)
    return (mask.unsqueeze(-1) >> torch.arange(8) & 1).flatten(-2)


def compare(report: harness.Report, title: str, M: int, name: str, rank: int, layer: Layer) -> None:
    (dtype, adapter, p), N, K = KINDS[name], layer.rows, layer.features
    source, dense = layer.fp32, layer.dense(dtype)
    packed = layer.made(lambda weight: quantize(weight, "nf4"), N * K // 2)
    grad = torch.randn(M, N).to(dtype)

    def leaves(of: torch.dtype, low: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shapes = (M, K), (rank, K), (N, rank)
        return tuple(  # type: ignore[return-value]
            (torch.randn(shape, generator=generator) * (0.05 if i else 1.0)).to(low if i else of).requires_grad_()
            for i, shape in enumerate(shapes)
        )

    def step(
        leaves: tuple[Tensor, Tensor, Tensor], output: Callable[[int], Tensor], grad: Tensor
    ) -> Callable[[int], object]:
        def run(i: int) -> tuple[Tensor, ...]:
            y = output(i)
            return y.detach(), *torch.autograd.grad(y, leaves, grad)

        return run

    def drop(t: Tensor) -> Tensor:
        return F.dropout(t, p) if p else t

    x, a, b = mine = leaves(dtype, adapter)
    cases = {
        "halfbyte": step(mine, lambda i: lora_linear(x, packed[i], None, a, b, SCALING, "nf4", K, dropout=p), grad),
        "halfbyte two nodes": step(
            mine, lambda i: peft(lambda t: linear(t, packed.apart(i), None, "nf4", K), x, a, b, drop), grad
        ),
        "dense": step(mine, lambda i: peft(lambda t: F.linear(t, dense[i]), x, a, b, drop), grad),
    }
    if dtype == torch.bfloat16:
        x32, a32, b32 = wide = leaves(torch.float32, torch.float32)
        fp32 = step(wide, lambda i: peft(lambda t: F.linear(t, source[i]), x32, a32, b32, drop), grad.float())
        cases["dense in fp32"] = fp32
    try:
        import bitsandbytes as bnb

        theirs = layer.bitsandbytes_nf4(dtype)

        def base(t: Tensor, i: int) -> Tensor:
            data, state = theirs[i]
            return bnb.matmul_4bit(t, data.t(), quant_state=state)  # type: ignore[no-any-return, attr-defined]

        cases["bitsandbytes"] = step(mine, lambda i: peft(lambda t: base(t, i), x, a, b, drop), grad)
    except ImportError:
        pass
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2" and M > 16:
        for peer in ("dense", "bitsandbytes"):  # torch's bf16 backward takes 0.12 s a token
            cases.pop(peer, None)

    def verify() -> None:
        """Every result, with dropout the fused step's, lies as near to PEFT's formula in fp64 as the dtype allows."""
        exact = [t.detach().double().requires_grad_() for t in mine]
        torch.manual_seed(2)
        kept = dropout_kept(x, p)
        for case, rows in ({"halfbyte": packed[0]} | ({} if p else {"halfbyte two nodes": packed.apart(0)})).items():
            weight = torch.ops.halfbyte.dequantize(rows, 0, 64, K, torch.float32).double()
            y = peft(lambda t: F.linear(t, weight), *exact, lambda t: t * kept / (1 - p))  # noqa: B023
            expected = (y.detach(), *torch.autograd.grad(y, exact, grad.double()))
            torch.manual_seed(2)
            for got, want in zip(cases[case](0), expected, strict=True):  # type: ignore[call-overload]
                error = (got.double() - want).norm() / want.norm()
                assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5), f"{case}: {error}"

    flops = 4 * M * N * K + 8 * M * rank * (N + K) - 2 * M * rank * K
    timed = {case: Case(run, flops=flops) for case, run in cases.items()}
    floors = {f"{name[:4]} products": flops // 2} if flops > 1 << 28 else None
    report.compare(title, timed, verify=verify, baseline="halfbyte", floors=floors)


def main() -> None:
    rank = {"type": int, "default": 16, "help": "rank of the adapters"}
    args = harness.arguments(__doc__, **options(TOKENS), rank=rank)
    report = harness.Report("lora", args)
    timing.reuse_memory()  # every case here makes tensors of 8 to 64 MiB; fresh pages would be half of what is timed
    torch.manual_seed(0)
    for layer, tokens in layers(args, TOKENS, NARROW, NARROW_TOKENS):
        for M, name in itertools.product(tokens, NARROW_KINDS if layer.size else KINDS):
            title = f"LoRA r={args.rank} nf4 {name} M={M}{layer.size}, forward + backward"
            if args.only in title:
                compare(report, title, M, name, args.rank, layer)
    report.save()


if __name__ == "__main__":
    main()
