"""What a call costs beside its work: layers and optimizer steps on tensors so small that the kernels take next to nothing.

    python benchmarks/bench_overhead.py --threads 1

Each sample is 200 calls (stacks: 10 of 32 layers, optimizers: 1 step). The goals: a QuantLinear call 10 us without a
gradient and 30 us with one recorded, an optimizer step over 448 LoRA tensors 1 ms. Beside them stands what the same
machinery costs torch: `Tensor.backward` and the engine are paid once for a whole model, so a layer's own share of both
passes is the stack's row; a Python `autograd.Function` around two aten products is the floor of any op with a derivative
that comes without C++ autograd (LibTorch's stable ABI has none). The optimizers step 448 tensors of 16 elements with 8-bit
state: nothing but the host. "torch.ops" is the op of the dispatcher: its formula is Python, which is asked
even where nothing requires a gradient; `halfbyte.ops.linear` and `QuantLinear` go past it. A call costs more where a kernel
has replaced it in the caches, as in a model: a section puts a product before each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from timing import Case
from torch import nn

import halfbyte.optim
from halfbyte.nn import QuantLinear
from halfbyte.ops import linear, lora_linear

CALLS = 200
DEPTH, STACK_CALLS = 32, 10


def repeated(call: Callable[[], object], calls: int = CALLS) -> Case:
    def run(_: int) -> None:
        for _ in range(calls):
            call()

    return Case(run)


class TwoProducts(torch.autograd.Function):
    """The least that a product with a derivative in Python does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.ops.aten.linear.default(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return torch.ops.aten.mm.default(grad, weight), None


class TwoProductsLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = TwoProducts.apply(x, self.weight)
        return output


def stacks(report: harness.Report) -> None:
    x, seed = torch.randn(1, 64, requires_grad=True), torch.ones(1, 64)
    made: dict[str, Callable[[], nn.Module]] = {
        "halfbyte QuantLinear": lambda: QuantLinear(64, 64, bias=False),
        "dense nn.Linear, frozen": lambda: nn.Linear(64, 64, bias=False).requires_grad_(False),
        "dense nn.Linear, trained": lambda: nn.Linear(64, 64, bias=False),
        "autograd.Function around two aten products": TwoProductsLinear,
    }
    models = {name: nn.Sequential(*[make() for _ in range(DEPTH)]) for name, make in made.items()}

    def verify() -> None:
        want = torch.eye(64)
        for layer in models["halfbyte QuantLinear"]:
            want = want @ layer.dequantize(torch.float32).t()
        (grad,) = torch.autograd.grad(models["halfbyte QuantLinear"](x), x, seed)
        torch.testing.assert_close(grad, seed @ want.t(), rtol=1e-3, atol=1e-3 * float(grad.abs().max()))

    cases = {
        name: repeated(lambda model=model: model(x).backward(seed), STACK_CALLS)  # type: ignore[misc]
        for name, model in models.items()
    }
    title = f"{STACK_CALLS} calls of {DEPTH} layers on (1, 64), forward + backward"
    report.compare(title, cases, verify=verify, baseline="halfbyte QuantLinear")


def layers(report: harness.Report, grad: bool, backward: bool) -> None:
    x = torch.randn(1, 64, requires_grad=grad)
    a, b = torch.randn(4, 64, requires_grad=grad), torch.randn(64, 4, requires_grad=grad)
    quant, int8 = QuantLinear(64, 64, bias=False), QuantLinear(64, 64, bias=False, format="int8", activations="int8")
    dense = nn.Linear(64, 64, bias=False).requires_grad_(False)
    down, up = (nn.Linear(*w.shape[::-1], bias=False) for w in (a, b))
    weight = quant.weight
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "halfbyte QuantLinear": lambda: quant(x),
        "halfbyte QuantLinear int8 activations": lambda: int8(x),
        "halfbyte ops.linear": lambda: linear(x, weight, None, "nf4", 64),
        "halfbyte torch.ops": lambda: torch.ops.halfbyte.linear(x, weight, None, 0, 64, 64),
        "halfbyte lora_linear": lambda: lora_linear(x, weight, None, a, b, 2.0, "nf4", 64),
        "dense nn.Linear": lambda: dense(x),
        "dense nn.Linear with LoRA": lambda: dense(x) + up(down(x)) * 2.0,
    }
    if grad:
        product = TwoProductsLinear()
        calls["autograd.Function around two aten products"] = lambda: product(x)
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
        want = F.linear(x, quant.dequantize(torch.float32))
        torch.testing.assert_close(quant(x), want, rtol=1e-4, atol=1e-4)

    cases = {name: repeated(with_backward(call) if backward else call) for name, call in calls.items()}
    how = "forward + backward" if backward else "forward, gradient recorded" if grad else "forward, no gradient"
    report.compare(f"{CALLS} calls on (1, 64), {how}", cases, verify=verify, baseline="halfbyte QuantLinear")


def after_products(report: harness.Report) -> None:
    x, layer = torch.randn(1, 64), QuantLinear(64, 64, bias=False)
    weight, dense_layer = layer.weight, nn.Linear(64, 64, bias=False)
    dense = dense_layer.weight
    a, b, out = torch.randn(512, 192), torch.randn(192, 576), torch.empty(512, 576)
    op, calls = torch.ops.halfbyte.linear, 20
    after: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "halfbyte QuantLinear": lambda: layer(x),
        "dense nn.Linear": lambda: dense_layer(x),
        "halfbyte ops.linear": lambda: linear(x, weight, None, "nf4", 64),
        "halfbyte torch.ops": lambda: op(x, weight, None, 0, 64, 64),
        "F.linear": lambda: F.linear(x, dense),
    }

    def verify() -> None:
        want = F.linear(x, layer.dequantize(torch.float32))
        for name, call in after.items():
            if name.startswith("halfbyte"):
                torch.testing.assert_close(call(), want, rtol=1e-4, atol=1e-4)

    def both(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: (torch.mm(a, b, out=out), call())

    cases = {name: repeated(both(call), calls) for name, call in after.items()}
    title = f"{calls} products of 512 x 192 x 576, after each a call on (1, 64)"
    report.compare(title, cases, verify=verify, baseline="nothing")


def optimizers(report: harness.Report) -> None:
    def parameters() -> list[nn.Parameter]:
        out = [nn.Parameter(torch.zeros(1, 16)) for _ in range(448)]
        for p in out:
            p.grad = torch.randn_like(p)
        return out

    ours = halfbyte.optim.AdamW8bit([{"params": parameters(), "quantize_state": True}])
    theirs = torch.optim.AdamW(parameters(), fused=True)
    cases = {"halfbyte": Case(lambda _: ours.step()), "torch fused": Case(lambda _: theirs.step())}

    def verify() -> None:
        for optimizer in (ours, theirs):
            optimizer.step()
        (p, *_), (q, *_) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
        assert ours.state[p]["exp_avg_codes"].dtype == torch.uint8
        assert p.abs().sum() > 0
        assert q.abs().sum() > 0

    report.compare("one AdamW step over 448 tensors of 16", cases, verify=verify, baseline="torch fused")


def main() -> None:
    report = harness.Report("overhead", harness.arguments(__doc__))
    torch.manual_seed(0)
    with torch.no_grad():
        layers(report, grad=False, backward=False)
        after_products(report)
    layers(report, grad=True, backward=False)
    layers(report, grad=True, backward=True)
    stacks(report)
    optimizers(report)
    report.save()


if __name__ == "__main__":
    main()
