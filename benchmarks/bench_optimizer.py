"""Step time of the 8-bit optimizers against torch's fused ones, bitsandbytes and torchao, interleaved in one run.

    python benchmarks/bench_optimizer.py [--threads N] [--only TEXT]

One matrix of 4096 x 4096 (16.8 M parameters; float32, bfloat16, and bfloat16 with stochastic rounding, which torch does not
have), and the 448 adapter matrices of LoRA runs (r = 16 and 8). Beside SGD8bit in float32 stands what bitsandbytes' codec
of a state takes alone: no op here quantizes a state or decodes one, a step does both.
Bytes are what a step must move: parameter in and out, gradient, codes in and out, scales.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import harness
import torch
from timing import Case
from torch import nn

import halfbyte.optim

RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, str]] = {
    "AdamW8bit": (halfbyte.optim.AdamW8bit, torch.optim.AdamW, "AdamW8bit"),
    "Lion8bit": (halfbyte.optim.Lion8bit, None, "Lion8bit"),
    "SGD8bit": (halfbyte.optim.SGD8bit, torch.optim.SGD, "SGD8bit"),
}


def parameters(shapes: list[tuple[int, int]], dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for shape in shapes:
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))  # from 0, so that bf16 does not round small steps away
        p.grad = (torch.randn(shape, generator=generator) * 1e-3).to(dtype)
        out.append(p)
    return out


def bitsandbytes_codec(state: torch.Tensor) -> dict[str, Case]:
    """Encoding and decoding a state (rows, columns) in bitsandbytes' blockwise 8-bit codes."""
    try:
        import bitsandbytes.functional as BF
    except ImportError:
        return {}
    codes, scales = BF.quantize_blockwise(state, blocksize=256)
    error = (BF.dequantize_blockwise(codes, scales) - state).norm()
    assert error < 0.03 * state.norm()
    return {
        "bitsandbytes quantize_blockwise": Case(lambda _: BF.quantize_blockwise(state, blocksize=256)),
        "bitsandbytes dequantize_blockwise": Case(lambda _: BF.dequantize_blockwise(codes, scales)),
    }


def compare(
    report: harness.Report,
    rule: str,
    title: str,
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    peers: bool,
    stochastic: bool = False,
) -> None:
    ours, fused, peer_name = RULES[rule]
    kw = {"momentum": 0.9} if rule == "SGD8bit" else {}
    extra = {"stochastic_rounding": True} if stochastic else {}
    numel = sum(n * k for n, k in shapes)
    moments = 2 if rule == "AdamW8bit" else 1
    moved = int(numel * (3 * dtype.itemsize + moments * 2 * (1 + 4 / 256)))
    mine = parameters(shapes, dtype)
    start = [p.detach().clone() for p in mine]
    optimizers: dict[str, tuple[Any, list[nn.Parameter]]] = {"halfbyte": (ours(mine, lr=1e-3, **kw, **extra), mine)}
    if fused is not None:
        theirs = parameters(shapes, dtype)
        # torch 2.13's fused SGD does not move bf16 parameters on the CPU at all: foreach is its fastest form that works.
        how = {"foreach": True} if rule == "SGD8bit" else {"fused": True}
        optimizers["torch " + next(iter(how))] = fused(theirs, lr=1e-3, **how, **kw), theirs
    if peers and not stochastic:  # bitsandbytes rounds to nearest
        try:
            import bitsandbytes

            theirs = parameters(shapes, dtype)
            optimizers["bitsandbytes"] = getattr(bitsandbytes.optim, peer_name)(theirs, lr=1e-3, **kw), theirs
        except ImportError:
            pass
    if peers and rule == "AdamW8bit":
        try:
            from torchao.optim import AdamW8bit

            theirs = parameters(shapes, dtype)
            optimizers["torchao"] = AdamW8bit(theirs, lr=1e-3, bf16_stochastic_round=stochastic), theirs
        except ImportError:
            pass

    def verify() -> None:
        """Three steps of every optimizer end at the same place, within a fifth of the way; a peer that errs is left out."""
        for optimizer, _ in optimizers.values():
            for _ in range(3):
                optimizer.step()
        torchs = [name for name in optimizers if name.startswith("torch ")]
        reference = optimizers[torchs[0] if torchs else "halfbyte"][1]
        for name, (_, params) in optimizers.items():
            for p, q, before in zip(params[:2], reference[:2], start[:2], strict=True):
                moved, expected = p.detach().float() - before.float(), q.detach().float() - before.float()
                near = bool((moved - expected).norm() < 0.2 * expected.norm() + 1e-6)
                assert near or name != "halfbyte"
                if not near and cases.pop(name, None):
                    print(f"  {name} moves parameters elsewhere on this instruction set: left out", flush=True)

    cases = {name: Case(lambda _, step=optimizer.step: step(), bytes=moved) for name, (optimizer, _) in optimizers.items()}
    baseline = next((n for n in cases if n != "halfbyte"), None)
    if rule == "SGD8bit" and dtype is torch.float32:
        assert mine[0].grad is not None
        cases |= bitsandbytes_codec(mine[0].grad)
    report.compare(f"{rule}, {title}", cases, verify=verify, baseline=baseline, floors={"copy": moved})


def main() -> None:
    warnings.filterwarnings("ignore")  # peers on the CPU
    report = harness.Report("optimizer", harness.arguments(__doc__))
    matrix = [(4096, 4096)]
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for rule in RULES:
            compare(report, rule, f"4096 x 4096 {name}", matrix, dtype, peers=True)
    compare(report, "AdamW8bit", "4096 x 4096 bf16, stochastic", matrix, torch.bfloat16, peers=True, stochastic=True)
    for rank in (16, 8):
        adapters = [shape for _ in range(224) for shape in ((rank, 2048), (2048, rank))]
        compare(report, "AdamW8bit", f"448 LoRA matrices r={rank} fp32", adapters, torch.float32, peers=False)
    report.save()


if __name__ == "__main__":
    main()
