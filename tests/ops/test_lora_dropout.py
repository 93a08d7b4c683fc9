"""lora_linear's dropout: what it drops, values and gradients against fp64, what is saved, generators, compilation."""

from __future__ import annotations

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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ops = torch.ops.halfbyte


def kept_of(mask: Tensor, columns: int) -> Tensor:
    """(..., ceil(K / 8)) uint8 -> (..., K) bool."""
    return (mask.unsqueeze(-1) >> torch.arange(8) & 1).flatten(-2)[..., :columns].bool()


def drawn(seed: int, x: Tensor, p: float) -> Tensor:
    """What the next call with dropout keeps of x after `manual_seed(seed)`."""
    torch.manual_seed(seed)
    number = torch.randint(2**63 - 1, (1,))
    return kept_of(ops.dropout_mask(x, number, p), x.shape[-1])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1 / 65536, 65535 / 65536, 1.0])
def test_the_bits_of_a_mask(p: float) -> None:
    for rows, columns in ((1, 1), (3, 8), (5, 13), (7, 131)):
        for seed in (0, 1, 2**63 - 1, -2):  # -2: the 64 bits of 2**64 - 2
            mask = ops.dropout_mask(torch.zeros(rows, columns), torch.tensor([seed]), p)
            assert mask.shape == (rows, (columns + 7) // 8)
            assert torch.equal(kept_of(mask, columns), reference.dropout_kept(rows, columns, seed % 2**64, p))


def test_the_bits_of_a_mask_do_not_depend_on_threads() -> None:
    before, masks = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            masks.append(ops.dropout_mask(torch.zeros(1000, 1001), torch.tensor([9]), 0.3))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_elements_are_dropped_independently_with_probability_p() -> None:
    """Counts of 2e6 elements, their rows, columns and neighbours: within 5 standard deviations."""
    p, rows, columns = 0.1, 1000, 2000
    kept = kept_of(ops.dropout_mask(torch.zeros(rows, columns), torch.tensor([3]), p), columns).double()
    dropped = 1 - kept
    deviation = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 5 * deviation / (rows * columns) ** 0.5
    assert (dropped.mean(0) - p).abs().max() < 5 * deviation / rows**0.5
    assert (dropped.mean(1) - p).abs().max() < 5 * deviation / columns**0.5
    other = 1 - kept_of(ops.dropout_mask(torch.zeros(rows, columns), torch.tensor([4]), p), columns).double()
    shifted = [(dropped[:, 1:], dropped[:, :-1]), (dropped[:, 8:], dropped[:, :-8]), (dropped[1:], dropped[:-1])]
    for one, another in (*shifted, (dropped, other)):
        assert abs((one * another).mean() - p * p) < 5 * (p * p * (1 - p * p)) ** 0.5 / one.numel() ** 0.5


def leaves(M: int, N: int, K: int, rank: int, dtype: torch.dtype, adapter: torch.dtype, groups: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((M, K), (N,), (groups * rank, K), (N, rank))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [t.to(d).requires_grad_() for t, d in zip(tensors, (dtype, dtype, adapter, adapter), strict=True)]


@pytest.mark.parametrize("adapter", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [(), (20, 0, 17)])
def test_values_and_gradients_with_dropout(dtype: torch.dtype, adapter: torch.dtype, splits: tuple[int, ...]) -> None:
    """Elementwise, as test_values_and_gradients in test_lora_linear.py: a term carries one rounding more, where the branch's
    part of the gradient of x is added to the base's."""
    N, rank, p, coarsest = 37, 5, 0.25, max(ROUNDING[dtype], ROUNDING[adapter])
    for M, K in ((1, 3), (3, 17), (9, 100), (70, 131)):
        packed = random_packed(Format.parse("nf4"), N, K)
        inputs = leaves(M, N, K, rank, dtype, adapter, len(splits) or 1)
        grad = torch.randn(M, N, generator=torch.Generator().manual_seed(1)).to(dtype)
        kept = drawn(5, inputs[0], p)
        torch.manual_seed(5)
        x, bias, a, b = inputs
        y = lora_linear(x, packed, bias, a, b, 0.7, "nf4", K, splits=splits, dropout=p)
        got = [y.detach(), *torch.autograd.grad(y, inputs, grad)]

        exact = [t.detach().double().requires_grad_() for t in inputs]
        settings: dict[str, Any] = {"splits": splits, "kept": kept}
        want = reference.lora_linear(exact[0], packed, *exact[1:], 0.7 / (1 - p), "nf4", K, **settings)
        expected = [want.detach(), *torch.autograd.grad(want, exact, grad.double())]

        weight = halfbyte.dequantize(packed, "nf4", K, torch.float32).double().abs()
        x, bias, a, b = (t.detach().abs().requires_grad_() for t in exact)
        pieces, first = [], 0
        for g, rows in enumerate(splits or (N,)):
            pieces.append(((x * kept) @ a[g * rank : (g + 1) * rank].T) @ b[first : first + rows].T)
            first += rows
        size_y = x @ weight.T + bias + 0.7 / (1 - p) * torch.cat(pieces, 1)
        sizes = [size_y.detach(), *torch.autograd.grad(size_y, (x, bias, a, b), grad.double().abs())]
        for name, value, exactly, size in zip("yxbAB", got, expected, sizes, strict=True):
            bound = size * (6 * coarsest + (M + N + K + 3 * rank) * 2.0**-24) + 2.0**-20 * (coarsest > 2.0**-20)
            excess = (value.double() - exactly).abs() - bound
            assert (excess <= 0).all(), f"{name} off by {excess.max():.2g}, M={M}, K={K}"
        assert [t.dtype for t in got] == [dtype, dtype, dtype, adapter, adapter]


def test_what_is_dropped_gets_no_gradient_from_the_branch() -> None:
    """Bit by bit: dropped elements have the base's gradient, and A's columns of dropped elements none."""
    packed = random_packed(Format.parse("nf4"), 40, 130)
    for dtype in DTYPES:
        x, _, a, b = leaves(1, 40, 130, 3, dtype, dtype)
        kept = drawn(1, x, 0.5)
        torch.manual_seed(1)
        y = lora_linear(x, packed, None, a, b, 2.0, "nf4", 130, dropout=0.5)
        grad_x, grad_a = torch.autograd.grad(y, (x, a), torch.ones_like(y))
        base = halfbyte.ops.linear_backward_input(torch.ones_like(y), packed, "nf4", 130)
        assert torch.equal(grad_x[~kept], base[~kept])
        assert (grad_x != base)[kept].float().mean() > 0.9
        assert torch.equal(grad_a.ne(0).any(0), kept[0])


def test_dropout_of_everything_leaves_the_base() -> None:
    packed = random_packed(Format.parse("nf4"), 40, 130)
    x, bias, a, b = leaves(5, 40, 130, 3, torch.float32, torch.float32)
    y = lora_linear(x, packed, bias, a, b, 2.0, "nf4", 130, dropout=1.0)
    assert torch.equal(y, halfbyte.ops.linear(x, packed, bias, "nf4", 130))
    assert all(not g.any() for g in torch.autograd.grad(y.sum(), (a, b)))


def test_each_call_draws_from_the_default_generator() -> None:
    packed = random_packed(Format.parse("nf4"), 8, 64)
    x, _, a, b = (t.detach() for t in leaves(3, 8, 64, 2, torch.float32, torch.float32))

    def call() -> Tensor:
        return lora_linear(x, packed, None, a, b, 2.0, "nf4", 64, dropout=0.5)

    torch.manual_seed(11)
    first, second = call(), call()
    torch.manual_seed(11)
    assert torch.equal(first, call())
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    lora_linear(x, packed, None, a, b, 2.0, "nf4", 64, dropout=0.0)
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_must_be_a_probability() -> None:
    packed = random_packed(Format.parse("nf4"), 8, 64)
    x, _, a, b = leaves(3, 8, 64, 2, torch.float32, torch.float32)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="p must be from 0 to 1, got"):
            lora_linear(x, packed, None, a, b, 2.0, "nf4", 64, dropout=p)


def test_saves_a_bit_for_each_element() -> None:
    M, N, K, rank = 64, 128, 96, 4
    packed = random_packed(Format.parse("nf4"), N, K)
    x, bias, a, b = leaves(M, N, K, rank, torch.float32, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lora_linear(x, packed, bias, a, b, 2.0, "nf4", K, dropout=0.1)
    expected = [(M, K), tuple(packed.shape), (rank, K), (N, rank), (M, rank), (M, K // 8)]
    assert sorted(tuple(t.shape) for t in saved) == sorted(expected)


def test_gradients_of_gradients_with_dropout() -> None:
    packed = random_packed(Format.parse("int8"), 6, 9)
    x, bias, a, b = leaves(3, 6, 9, 2, torch.float32, torch.float32)
    weight, kept = halfbyte.dequantize(packed, "int8", 9, torch.float32), drawn(2, x, 0.4)

    def penalty(y: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(y.square().sum(), (x, a, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, a, b))

    torch.manual_seed(2)
    fused = penalty(lora_linear(x, packed, bias, a, b, 0.7, "int8", 9, dropout=0.4))
    plain = penalty(x @ weight.T + bias + 0.7 / 0.6 * ((x * kept) @ a.T) @ b.T)
    for got, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_drops_the_same_elements(reentrant: bool) -> None:
    packed = random_packed(Format.parse("nf4"), 64, 64)
    x, _, a, b = leaves(5, 64, 64, 3, torch.float32, torch.float32)

    def twice(x: Tensor) -> Tensor:
        y = lora_linear(x, packed, None, a, b, 2.0, "nf4", 64, dropout=0.3).relu()
        return lora_linear(y, packed, None, a, b, 2.0, "nf4", 64, dropout=0.3)

    torch.manual_seed(4)
    plain = torch.autograd.grad(twice(x).sum(), (x, a, b))
    torch.manual_seed(4)
    checkpoint(twice, x, use_reentrant=reentrant).sum().backward()
    for got, want in zip((x.grad, a.grad, b.grad), plain, strict=True):
        assert torch.equal(got, want)


def test_autocast_drops_the_same_elements() -> None:
    packed = random_packed(Format.parse("nf4"), 8, 64)
    x, bias, a, b = leaves(3, 8, 64, 2, torch.float32, torch.float32)
    torch.manual_seed(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lora_linear(x, packed, bias, a, b, 2.0, "nf4", 64, dropout=0.5)
    torch.manual_seed(6)
    x, bias, a, b = (t.detach().bfloat16() for t in (x, bias, a, b))
    assert torch.equal(y, lora_linear(x, packed, bias, a, b, 2.0, "nf4", 64, dropout=0.5))


def test_compiles_without_a_graph_break_and_draws_anew() -> None:
    torch._dynamo.reset()
    layer = QuantLinear(64, 32)
    x, _, a, b = leaves(5, 32, 64, 3, torch.float32, torch.float32)

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return layer(x, lora=(a, b, 2.0, 0.5))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.manual_seed(8)
    got, again = compiled(x, a, b), compiled(x, a, b)
    torch.manual_seed(8)
    want = f(x, a, b)
    assert torch.equal(got, want)
    assert not torch.equal(got, again)
    for one, other in zip(
        torch.autograd.grad(got.sum(), (x, a, b)), torch.autograd.grad(want.sum(), (x, a, b)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_other_instruction_sets(other_isa: Any) -> None:
    """The masks, values and gradients above on the ISAs that the CPU has but would not choose."""
    other_isa.tests(__file__, "bits or values or everything or branch")
