"""What a call costs beside its work: layers and optimizer steps on tensors so small that the kernels take next to nothing.

    python benchmarks/bench_overhead.py --threads 1

Each sample is 200 calls (optimizers: 1 step), divided. The goals are those of the issue that asked for the numbers: a
QuantLinear call 10 us without a gradient and 30 us with one (forward + backward), an optimizer step over 448 LoRA tensors
1 ms. The optimizer rows are tensors at the smallest size that gets 8-bit state (4096 elements), so that the kernels' own
time (printed apart by bench_optimizer.py) is small beside the host's.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch
from harness import Case
from torch import nn

import halfbyte.optim
from halfbyte.nn import QuantLinear
from halfbyte.ops import lora_linear

CALLS = 200


def repeated(call: Callable[[], object]) -> Case:
    def run(_: int) -> None:
        for _ in range(CALLS):
            call()

    return Case(run)


def layers(report: harness.Report, grad: bool) -> None:
    x = torch.randn(1, 64, requires_grad=grad)
    a, b = torch.randn(4, 64, requires_grad=grad), torch.randn(64, 4, requires_grad=grad)
    quant, int8 = QuantLinear(64, 64, bias=False), QuantLinear(64, 64, bias=False, format="int8", activations="int8")
    dense = nn.Linear(64, 64, bias=False).requires_grad_(False)
    down, up = (nn.Linear(*w.shape[::-1], bias=False) for w in (a, b))
    weight = quant.weight
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "halfbyte QuantLinear": lambda: quant(x),
        "halfbyte QuantLinear int8 activations": lambda: int8(x),
        "halfbyte lora_linear": lambda: lora_linear(x, weight, None, a, b, 2.0, "nf4", 64),
        "dense nn.Linear": lambda: dense(x),
        "dense nn.Linear with LoRA": lambda: dense(x) + up(down(x)) * 2.0,
    }
    try:
        import bitsandbytes as bnb

        theirs = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
        theirs.load_state_dict({"weight": torch.randn(64, 64)})
        theirs.to("cpu")
        theirs(x)
        calls["bitsandbytes Linear4bit"] = lambda: theirs(x)
    except ImportError:
        pass

    def with_backward(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
        seed = torch.ones(1, 64)
        return lambda: call().backward(seed)

    def verify() -> None:
        want = torch.nn.functional.linear(x, quant.dequantize(torch.float32))
        torch.testing.assert_close(quant(x), want, rtol=1e-4, atol=1e-4)

    cases = {name: repeated(with_backward(call) if grad else call) for name, call in calls.items()}
    how = "forward + backward" if grad else "forward, no gradient"
    report.compare(f"{CALLS} calls on (1, 64), {how}", cases, verify=verify, baseline="halfbyte QuantLinear")


def optimizers(report: harness.Report) -> None:
    def parameters() -> list[nn.Parameter]:
        out = [nn.Parameter(torch.zeros(16, 256)) for _ in range(448)]
        for p in out:
            p.grad = torch.randn_like(p)
        return out

    ours, theirs = halfbyte.optim.AdamW8bit(parameters()), torch.optim.AdamW(parameters(), fused=True)
    cases = {"halfbyte": Case(lambda _: ours.step()), "torch fused": Case(lambda _: theirs.step())}

    def verify() -> None:
        for optimizer in (ours, theirs):
            optimizer.step()
        (p, *_), (q, *_) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
        assert p.abs().sum() > 0
        assert q.abs().sum() > 0

    report.compare("one AdamW step over 448 tensors of 4096", cases, verify=verify, baseline="torch fused")


def main() -> None:
    report = harness.Report("overhead", harness.arguments(__doc__))
    torch.manual_seed(0)
    with torch.no_grad():
        layers(report, grad=False)
    layers(report, grad=True)
    optimizers(report)
    report.save()


if __name__ == "__main__":
    main()
