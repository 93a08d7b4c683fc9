"""lora_linear: values and gradients against fp64, what is saved, stacking, autocast, checkpointing, compilation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import halfbyte
from halfbyte import reference_products as reference
from halfbyte.formats import Format
from halfbyte.nn import QuantLinear
from halfbyte.ops import lora_linear
from halfbyte.testing import random_packed

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def leaves(M: int, N: int, K: int, rank: int, dtype: torch.dtype, adapter: torch.dtype, groups: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((M, K), (N,), (groups * rank, K), (N, rank))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [t.to(d).requires_grad_() for t, d in zip(tensors, (dtype, dtype, adapter, adapter), strict=True)]


def run(op, inputs: list[Tensor], packed: Tensor, grad: Tensor, *args, **kwargs) -> list[Tensor]:
    x, bias, a, b = inputs
    y = op(x, packed, bias, a, b, *args, **kwargs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad.to(y.dtype))]


def check_values(
    M: int, N: int, K: int, rank: int, splits: tuple[int, ...], format: str, dtype: torch.dtype, adapter: torch.dtype
) -> None:
    """Elementwise. Every result is a sum of products with one more rounded factor than a plain product has.

    size: the same sums over absolute values. Each of its terms carries at most 5 roundings to the coarsest dtype in play
    (weight, A, B, x A^T or its gradient, the scaled one) and n * 2^-24 of fp32 summation.
    """
    coarsest = max(ROUNDING[dtype], ROUNDING[adapter])
    packed = random_packed(Format.parse(format), N, K)
    weight = halfbyte.dequantize(packed, format, K, torch.float32).double()
    inputs = leaves(M, N, K, rank, dtype, adapter, len(splits) or 1)
    grad = torch.randn(M, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = run(lora_linear, inputs, packed, grad, 0.7, format, K, splits=splits)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = run(reference.lora_linear, exact, packed, grad, 0.7, format, K, splits=splits)
    x, bias, a, b = (t.detach().abs().requires_grad_() for t in exact)
    pieces, first = [], 0
    for g, rows in enumerate(splits or (N,)):
        pieces.append((x @ a[g * rank : (g + 1) * rank].T) @ b[first : first + rows].T)
        first += rows
    size_y = x @ weight.abs().T + bias + 0.7 * torch.cat(pieces, 1)
    sizes = [size_y.detach(), *torch.autograd.grad(size_y, (x, bias, a, b), grad.double().abs())]
    for name, value, want, size in zip("yxbAB", got, expected, sizes, strict=True):
        bound = size * (5 * coarsest + (M + N + K + 3 * rank) * 2.0**-24) + 2.0**-20 * (coarsest > 2.0**-20)
        excess = (value.double() - want).abs() - bound
        assert (excess <= 0).all(), f"{name} off by {excess.max():.2g} for {format}, M={M}"
    assert [t.dtype for t in got] == [dtype, dtype, dtype, adapter, adapter]


@pytest.mark.parametrize("adapter", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [(), (20, 0, 40)])
def test_values_and_gradients(dtype: torch.dtype, adapter: torch.dtype, splits: tuple[int, ...]) -> None:
    for format in ("nf4", "fp4-dq:32", "int8", "fp8"):
        for M in (1, 8, 9, 20, 62, 70, 270):  # turned weights with AVX-512: 20, 70, 270; AVX2, fp32: 70, 270; AMX: 270
            check_values(M, 60, 100, 5, splits, format, dtype, adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("M", "N", "K", "rank", "splits"),
    [
        (515, 300, 200, 256, (100, 100, 100)),  # branches wider than the weight, together
        (1024, 1023, 640, 511, ()),  # backward, bf16: gradients and the largest panel are more than a thread keeps
    ],
)
def test_values_of_wide_branches(M: int, N: int, K: int, rank: int, splits: tuple[int, ...], dtype: torch.dtype) -> None:
    check_values(M, N, K, rank, splits, "nf4", dtype, dtype)


@pytest.mark.parametrize("adapter", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_adapter(dtype: torch.dtype, adapter: torch.dtype) -> None:
    """The op alone, elementwise: sums in float32 of exact factors, each rounded once to its dtype.

    bfloat16 by bfloat16 may be aten's (the last two): x A^T's gradient is rounded when summed, scaled and added to, before
    it reaches A.
    """
    wide, step = dtype if dtype == adapter else torch.float32, 2.0**-24
    small = itertools.product((1, 2, 50), (1, 3, 47, 48, 130), (65,), (1, 8))
    large = ((3, 33, 17, 20), (515, 100, 97, 4), (1100, 16, 600, 9), (7, 1100, 16, 16), (20, 100, 90, 40))
    atens = ((600, 300, 320, 32), (400, 200, 300, 40))  # with tiles; with bf16 units
    for M, N, K, rank in (*small, *large, *atens):
        between = 4 * 2.0**-8 if wide == torch.bfloat16 and (M, N, K, rank) in atens else 0.0
        generator = torch.Generator().manual_seed(M * N + rank)
        grad, x = (torch.randn(M, size, generator=generator).to(dtype) for size in (N, K))
        low, more = (torch.randn(M, 2 * rank, generator=generator).to(wide) for _ in range(2))
        b, splits = torch.randn(N, rank, generator=generator).to(adapter), [N // 3, N - N // 3]
        got = torch.ops.halfbyte.lora_linear_backward_adapter(grad, x, low, b, more, 0.5, splits, True, True)
        parts = [slice(0, splits[0]), slice(splits[0], N)]
        for exact in (True, False):  # the values, then the sums of their absolute values
            g, t, up, inputs, given = (v.double() if exact else v.double().abs() for v in (grad, low, b, x, more))
            grad_low = torch.cat([0.5 * g[:, of] @ up[of] for of in parts], 1) + given
            grad_b = torch.cat([0.5 * g[:, of].T @ t[:, i * rank : (i + 1) * rank] for i, of in enumerate(parts)])
            if exact:
                wanted = grad_low, grad_low.T @ inputs, grad_b
            else:
                size = grad_low, grad_low.T @ inputs, grad_b
        for name, value, want, bound in zip(("x A^T", "A", "B"), got, wanted, size, strict=True):
            limit = want.abs() * ROUNDING[value.dtype] + bound * (between + (M + N + 3) * step) + 2.0**-24
            assert ((value.double() - want).abs() <= limit).all(), (name, M, N, K, rank)
        assert [v.dtype for v in got] == [wide, adapter, adapter]


def test_the_scaling_is_not_rounded() -> None:
    """13 * 0.7 = 9.1 is 9.125 in bfloat16; times 0.7 in bfloat16, 0.69921875, it would be 9.0625."""
    one, grad = torch.ones(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 13.0, dtype=torch.bfloat16)
    for value in torch.ops.halfbyte.lora_linear_backward_adapter(grad, one, one, one, None, 0.7, [], True, True):
        assert value.item() == 9.125


def test_gradients_of_the_adapter_by_threads_and_by_need() -> None:
    generator, before, results = torch.Generator().manual_seed(0), torch.get_num_threads(), []
    grad, x, low, b = (torch.randn(*s, generator=generator) for s in ((700, 300), (700, 500), (700, 12), (300, 12)))
    arguments = (grad, x.bfloat16().float(), low, b, None, 0.5, [])
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(torch.ops.halfbyte.lora_linear_backward_adapter(*arguments, True, True))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(t, first) for t, first in zip(result, results[0], strict=True))
    for needs_A, needs_B in ((False, True), (True, False), (False, False)):
        grad_low, *others = torch.ops.halfbyte.lora_linear_backward_adapter(*arguments, needs_A, needs_B)
        assert torch.equal(grad_low, results[0][0])
        for value, needed, full in zip(others, (needs_A, needs_B), results[0][1:], strict=True):
            assert torch.equal(value, full) if needed else value.shape == (0,)


def test_float32_adapters_keep_float32_gradients_under_bfloat16_activations() -> None:
    N, K, rank = 33, 96, 4
    packed = random_packed(Format.parse("nf4"), N, K)
    inputs = leaves(50, N, K, rank, torch.bfloat16, torch.float32)
    grad = torch.randn(50, N).bfloat16()
    got = run(lora_linear, inputs, packed, grad, 2.0, "nf4", K)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = run(reference.lora_linear, exact, packed, grad, 2.0, "nf4", K)
    for value, want in zip(got[3:], expected[3:], strict=True):
        torch.testing.assert_close(value.double(), want, rtol=1e-4, atol=1e-4)


def test_a_branch_of_zeros_changes_no_bit() -> None:
    packed = random_packed(Format.parse("nf4"), 60, 130)
    for dtype in (torch.float32, torch.bfloat16):
        for M in (1, 5, 33, 300):
            x, bias, a, b = (t.detach() for t in leaves(M, 60, 130, 3, dtype, dtype))
            y = lora_linear(x, packed, bias, a, torch.zeros_like(b), 2.0, "nf4", 130)
            assert torch.equal(y, halfbyte.ops.linear(x, packed, bias, "nf4", 130))


@pytest.mark.parametrize("M", [1, 4, 5, 20])
def test_the_gradient_of_a_layer_without_rows_is_that_of_its_branch(M: int) -> None:
    packed = random_packed(Format.parse("nf4"), 0, 300)
    for dtype in (torch.float32, torch.bfloat16):
        _, _, a, _ = (t.detach() for t in leaves(M, 0, 300, 8, dtype, dtype))
        low = torch.randn(M, 8).to(dtype)
        gradient = torch.ops.halfbyte.lora_linear_backward_input(torch.zeros(M, 0, dtype=dtype), packed, low, a, 0, 64, 300)
        exact, terms = low.double() @ a.double(), low.double().abs() @ a.double().abs()
        assert bool(((gradient.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + 8 * 2.0**-24 * terms).all())


@pytest.mark.parametrize("M", [60, 90, 290, 520])  # turned weights: AVX-512 from 90 on (without bf16 units 290), AMX 520
def test_results_do_not_depend_on_threads(M: int) -> None:
    packed = random_packed(Format.parse("nf4"), 301, 260)
    x, bias, a, b = (t.detach() for t in leaves(M, 301, 260, 6, torch.bfloat16, torch.float32))
    before, results = torch.get_num_threads(), []
    low = torch.randn(M, 6)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, projected = torch.ops.halfbyte.lora_linear(x, packed, bias, a, b, 2.0, [], 0, 64, 260)
            first = results[0][0] if results else y
            results.append((y, projected, torch.ops.halfbyte.lora_linear_backward_input(first, packed, low, a, 0, 64, 260)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(t, one) for t, one in zip(result, results[0], strict=True))


def test_three_linears_with_one_input_are_one_call() -> None:
    K, rank, sizes = 96, 4, (48, 16, 16)
    torch.manual_seed(0)
    x = torch.randn(7, K, requires_grad=True)
    packs = [random_packed(Format.parse("nf4"), n, K, seed=n + i) for i, n in enumerate(sizes)]
    down = [torch.randn(rank, K) for _ in sizes]
    up = [torch.randn(n, rank) for n in sizes]
    apart = [lora_linear(x, p, None, a, b, 0.5, "nf4", K) for p, a, b in zip(packs, down, up, strict=True)]
    stacked = lora_linear(x, torch.cat(packs), None, torch.cat(down), torch.cat(up), 0.5, "nf4", K, splits=sizes)
    torch.testing.assert_close(stacked, torch.cat(apart, 1), rtol=1e-5, atol=1e-5)
    (one,) = torch.autograd.grad(stacked.square().sum(), x)
    (sum_of_three,) = torch.autograd.grad(sum(y.square().sum() for y in apart), x)
    torch.testing.assert_close(one, sum_of_three, rtol=1e-4, atol=1e-5 * float(sum_of_three.abs().max()))


def test_saves_the_input_its_projection_and_packed_rows_only() -> None:
    M, N, K, rank = 64, 128, 96, 4
    packed = random_packed(Format.parse("nf4"), N, K)
    x, bias, a, b = leaves(M, N, K, rank, torch.float32, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = lora_linear(x, packed, bias, a, b, 2.0, "nf4", K)
    assert sorted(tuple(t.shape) for t in saved) == sorted([(M, K), tuple(packed.shape), (rank, K), (N, rank), (M, rank)])
    kinds = {type(function).__name__ for function, _ in y.grad_fn.next_functions if function is not None}
    assert kinds == {"AccumulateGrad"}  # one node, then the leaves


def test_gradients_of_gradients() -> None:
    packed = random_packed(Format.parse("int8"), 6, 9)
    x, bias, a, b = leaves(3, 6, 9, 2, torch.float32, torch.float32)
    weight = halfbyte.dequantize(packed, "int8", 9, torch.float32)

    def penalty(y: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(y.square().sum(), (x, a, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, a, b))

    fused = penalty(lora_linear(x, packed, bias, a, b, 0.7, "int8", 9))
    plain = penalty(x @ weight.T + bias + 0.7 * (x @ a.T) @ b.T)
    for got, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    packed = random_packed(Format.parse("nf4"), 64, 64)
    x, _, a, b = leaves(5, 64, 64, 3, torch.float32, torch.float32)

    def twice(x: Tensor) -> Tensor:
        return lora_linear(lora_linear(x, packed, None, a, b, 2.0, "nf4", 64).relu(), packed, None, a, b, 2.0, "nf4", 64)

    plain = torch.autograd.grad(twice(x).sum(), (x, a, b))
    y = checkpoint(twice, x, use_reentrant=reentrant)
    y.sum().backward()
    for got, want in zip((x.grad, a.grad, b.grad), plain, strict=True):
        assert torch.equal(got, want)


def test_autocast_multiplies_in_its_dtype_and_returns_gradients_in_the_leaves() -> None:
    packed = random_packed(Format.parse("nf4"), 8, 64)
    x, bias, a, b = inputs = leaves(3, 8, 64, 2, torch.float32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lora_linear(x, packed, bias, a, b, 2.0, "nf4", 64)
        raw, projected = torch.ops.halfbyte.lora_linear(x, packed, bias, a, b, 2.0, [], 0, 64, 64)
    assert y.dtype == raw.dtype == projected.dtype == torch.bfloat16
    cast = [t.detach().bfloat16() for t in inputs]
    assert torch.equal(y, lora_linear(cast[0], packed, cast[1], cast[2], cast[3], 2.0, "nf4", 64))
    assert torch.equal(y, raw)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), inputs))


def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    layer = QuantLinear(64, 32)
    x, _, a, b = leaves(5, 32, 64, 3, torch.float32, torch.float32)

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return layer(x, lora=(a, b, 2.0))

    compiled, eager = torch.compile(f, fullgraph=True, backend="aot_eager")(x, a, b), f(x, a, b)
    assert torch.equal(compiled, eager)
    for got, want in zip(
        torch.autograd.grad(compiled.sum(), (x, a, b)), torch.autograd.grad(eager.sum(), (x, a, b)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_an_explicit_compute_dtype_wins_over_autocast() -> None:
    layer = QuantLinear(64, 8, compute_dtype="float32")
    x, _, a, b = leaves(3, 8, 64, 2, torch.float32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, lora=(a, b, 1.0))
    alone = layer(x, lora=(a, b, 1.0))
    assert alone.dtype == torch.float32
    assert torch.equal(y, alone.bfloat16())  # multiplied in float32, returned as a dense layer returns it


def test_a_layer_that_quantizes_its_activations_takes_no_branch() -> None:
    layer = QuantLinear(64, 8, format="int8", activations="int8")
    x, _, a, b = leaves(3, 8, 64, 2, torch.float32, torch.float32)
    with pytest.raises(NotImplementedError, match="lora works on a layer with activations=None.*got activations='int8'"):
        layer(x, lora=(a, b, 1.0))


def test_other_instruction_sets(other_isa: Any) -> None:
    """The values and gradients above on the ISAs that the CPU has but would not choose."""
    other_isa.tests(__file__, "values or bit or adapter")


def test_functorch_transforms() -> None:
    """Eager calls skip the registered formulas; under `torch.func` they must not."""
    packed = random_packed(Format.parse("int8"), 8, 64)
    x, _, a, b = (t.detach() for t in leaves(3, 8, 64, 2, torch.float32, torch.float32))
    for f in (
        lambda x: halfbyte.ops.linear(x, packed, None, "int8", 64),
        lambda x: lora_linear(x, packed, None, a, b, 0.5, "int8", 64),
        lambda x: halfbyte.ops.int8_linear(x, packed, None, 64),
    ):
        leaf = x.clone().requires_grad_()
        f(leaf).square().sum().backward()
        torch.testing.assert_close(torch.func.grad(lambda t, f=f: f(t).square().sum())(x), leaf.grad)
