"""linear and linear_backward_input on the CPU against fp64, for every format, ISA and awkward size.

The bound. Sums are fp32 with a fixed order, so the computed sum of n products is within (n + c) * 2^-24 * sum |x| |w| of
the exact one (c: the product with the scale, the bias, the lanes' own sum). Where bf16 inputs multiply in bf16 pairs
(AVX-512, AMX from 5 tokens on), each weight is rounded to bf16 first, as a dense bf16 layer would store it:
2^-8 * sum |x| |w| more, which also covers int16 (AVX2, up to 16 tokens). The output is rounded once: 2^-8 (bf16) or
2^-11 (fp16) of itself, and fp16 has subnormals.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte  # noqa: F401  (loads the ops)
from halfbyte._library import cpu_isa

ROOT = Path(__file__).resolve().parent.parent
ops = torch.ops.halfbyte

NF4, FP4, NF4_DQ, FP4_DQ, INT8, FP8 = range(6)
FORMATS = (
    [(NF4, b) for b in (32, 64, 128, 256, 512, 1024, 2048, 4096)]
    + [(NF4_DQ, b) for b in (32, 64, 128, 4096)]
    + [(FP4, 32), (FP4, 64), (FP4_DQ, 32), (FP4_DQ, 64), (INT8, 0), (FP8, 0)]
)
FEATURES = (1, 63, 65, 100, 576, 4304)
TOKENS = (0, 1, 2, 3, 4, 5, 16, 17, 64, 130)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT16_ISAS = ("avx2", "avx2_vnni")  # a few bf16 tokens multiply 4-bit codes as int16
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def make(rows: int, K: int, format: int, block_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """packed (rows, row_bytes) and its values (rows, K) in fp64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, K, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    packed = ops.quantize(weight, format, block_size)
    return packed, ops.dequantize(packed, format, block_size, K, torch.float32).double()


class Exact:
    """a (M, n) @ b (n, columns) + bias in fp64, and the bound of the module's docstring for results of a's dtype."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        dtype, a = a.dtype, a.double()
        self.value, size = a @ b, a.abs() @ b.abs()
        if bias is not None:
            self.value, size = self.value + bias.double(), size + bias.double().abs()
        bound = size * ((a.shape[-1] + 8) * 2.0**-24 + (2.0**-8 if dtype is torch.bfloat16 else 0.0))
        self.bound = bound * (1 + ROUNDING[dtype]) + self.value.abs() * ROUNDING[dtype]
        self.bound += 2.0**-25 if dtype is torch.float16 else 2.0**-100

    def check(self, got: torch.Tensor) -> None:
        """`got` are the results of the first len(got) tokens."""
        M = len(got)
        excess = (got.double() - self.value[:M]).abs() - self.bound[:M]
        assert got.isfinite().all()
        assert (excess <= 0).all(), f"excess {excess.max().item():.3g} at {tuple(got.shape)}, {got.dtype}"


def assert_within(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    Exact(a, b, bias).check(got)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Many tiny fp64 products are faster so; threads have their own test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens_like(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("K", FEATURES)
@pytest.mark.parametrize(("format", "block_size"), FORMATS)
def test_values(format: int, block_size: int, K: int) -> None:
    rows = 37  # odd, and not a multiple of any tile
    packed, weight = make(rows, K, format, block_size)
    for dtype in DTYPES:
        x, grad = tokens_like((130, K), dtype), tokens_like((130, rows), dtype, seed=3)
        bias = tokens_like((rows,), dtype, seed=2)
        plain, biased, reverse = Exact(x, weight.T), Exact(x, weight.T, bias), Exact(grad, weight)
        for M in TOKENS:
            y = ops.linear(x[:M], packed, bias if M % 2 else None, format, block_size, K)
            assert y.shape == (M, rows)
            assert y.dtype is dtype
            (biased if M % 2 else plain).check(y)
            back = ops.linear_backward_input(grad[:M], packed, format, block_size, K)
            assert back.shape == (M, K)
            assert back.dtype is dtype
            reverse.check(back)


@pytest.mark.parametrize(("format", "block_size"), [(NF4, 64), (NF4_DQ, 128), (INT8, 0), (FP8, 0)])
def test_bf16_tokens_that_multiply_exact_weights(format: int, block_size: int) -> None:
    isa = cpu_isa()
    exact = {"avx512": range(0), "amx": range(5)}.get(isa, range(18))
    if isa in INT16_ISAS and format in (NF4, NF4_DQ):
        exact = range(13, 18)  # fewer multiply int16
    packed, _ = make(64, 576, format, block_size)
    for M in (1, 2, 4, 5, 12, 13, 17):
        x = tokens_like((M, 576), torch.bfloat16)
        in_fp32 = ops.linear(x.float(), packed, None, format, block_size, 576)
        same = torch.equal(ops.linear(x, packed, None, format, block_size, 576), in_fp32.bfloat16())
        assert same == (M in exact), M
        grad = tokens_like((M, 64), torch.bfloat16)
        back = ops.linear_backward_input(grad.float(), packed, format, block_size, 576)
        same = torch.equal(ops.linear_backward_input(grad, packed, format, block_size, 576), back.bfloat16())
        assert same == (M in {"avx512": range(0), "amx": range(5)}.get(isa, range(18))), M


def int16_weight(weight: torch.Tensor, format: int, block_size: int) -> torch.Tensor:
    """`weight` with codes rounded to 7854ths (fp4: 8064ths) of their block's scale, which is its largest weight."""
    steps = 8064 if format == FP4 else 7854
    scales = [block.abs().amax(1, keepdim=True).expand_as(block) for block in weight.split(block_size, dim=1)]
    scale = torch.cat(scales, dim=1)
    return (weight / scale * steps).round() / steps * scale


def int16_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What AVX2 multiplies for a few bf16 tokens, and whether by rounded weights (or exact ones), for every element."""
    value, rounded = x.double(), torch.zeros(x.shape, dtype=torch.bool)
    for m in range(len(x)):
        for start in range(0, x.shape[1], 64):
            group = value[m, start : start + 64]
            largest = group.abs().max()
            if largest == 0 or 2.0**-64 < largest < 2.0**64:
                up = 2.0 ** (15 - int(torch.frexp(largest)[1]))
                whole = (group * up).round() / up
                if 2 * largest <= group.abs().sum() or torch.equal(whole, group):
                    group[:] = whole
                    rounded[m, start : start + 64] = True
    return value, rounded


@pytest.mark.parametrize("M", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("format", "block_size"), [(NF4, 32), (NF4, 64), (NF4, 256), (FP4, 64)])
def test_few_bf16_tokens_to_17_bits(format: int, block_size: int, M: int) -> None:
    """The sum behind the output's 8 bits, by a second call that adds what the first one gave with the other sign."""
    rows, K, terms = 601, 456, 64  # few terms: errors of weights don't average out
    packed, weight = make(rows, K, format, block_size)
    x = torch.zeros(M, K, dtype=torch.bfloat16)
    x[:, 3 :: K // terms] = tokens_like((M, K), torch.bfloat16)[:, 3 :: K // terms]
    x[:, 64:128] = 0
    x[0, 199] = 300.0  # more than its group's other elements together
    x[0, 452] = 40.0  # the last, shorter group
    if M > 1:
        x[1, :448] = 0  # small ones that lose bits as int16 beside large ones
        x[1, 256:320] = tokens_like((64,), torch.bfloat16) / 512
        x[1, 260:300:20] = 1.0
        x[1, 420] = 77.0  # alone
    x[-1, 130:180] = tokens_like((50,), torch.bfloat16) * 2.0**-80
    isa = cpu_isa()
    pairs = isa == "avx512" or (isa == "amx" and M > 4)  # bf16 weights
    value, exact = x.double(), weight * x.double()[:, None]
    if isa in INT16_ISAS:
        value, rounded = int16_tokens(x)
        assert rounded.any(1).all()
        assert not rounded[[0, -1]].all(1).any()
        products = torch.where(rounded[:, None], int16_weight(weight, format, block_size), weight) * value[:, None]
    else:
        products = (weight.bfloat16().double() if pairs else weight) * value[:, None]
    expected = products.sum(2)
    bound = expected.abs() * 2.0**-17 + exact.abs().sum(2) * (2 * terms + 8) * 2.0**-24
    first = ops.linear(x, packed, None, format, block_size, K)
    second = torch.stack([ops.linear(x, packed, -first[m], format, block_size, K)[m] for m in range(M)])
    got = first.double() + second.double()
    assert ((got - expected).abs() <= bound).all()
    coarse = pairs or (isa in INT16_ISAS and format == NF4)  # fp4 has whole steps
    assert ((got - exact.sum(2)).abs() > bound)[0].any() == coarse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "block_size"), [(NF4, 64), (NF4_DQ, 128), (FP8, 0)])
@pytest.mark.parametrize(
    ("M", "rows", "K"),
    [
        (600, 1101, 700),  # blocks of 512 tokens; backward, panels of 512 units and 256 columns (bf16: two rows each, 640)
        (70, 301, 4300),  # panels of 96 rows (AMX: 192) and of 4096 columns
        (20, 301, 4300),  # few tokens: of 12 rows (AMX: 32); backward, of 128 units of rows and 1024 columns
        (20, 301, 480),  # and of more rows, 240 units of pairs each: with 16 more they would lie 1 KiB apart
        (600, 590, 700),  # turned weights, in blocks of columns
        (300, 250, 4300),  # and in parts of a row
        (2048, 2048, 5),  # and no more columns than a thread may keep sums of
        (3, 1101, 700),  # backward of few tokens: 4 slices of rows, the last one shorter
        (1, 2050, 4300),  # 8 of them, scales in two stretches
        (4, 16, 270000),  # sums that no thread may keep
    ],
)
def test_more_than_one_block_of_everything(
    format: int, block_size: int, dtype: torch.dtype, M: int, rows: int, K: int
) -> None:
    packed, weight = make(rows, K, format, block_size)
    x, grad = tokens_like((M, K), dtype), tokens_like((M, rows), dtype)
    assert_within(ops.linear(x, packed, None, format, block_size, K), x, weight.T)
    assert_within(ops.linear_backward_input(grad, packed, format, block_size, K), grad, weight)


@pytest.mark.parametrize("K", [1, 63, 100, 576, 577, 4100])
@pytest.mark.parametrize(("format", "block_size"), [(NF4, 32), (NF4, 64), (NF4, 4096), (FP4_DQ, 64), (INT8, 0), (FP8, 0)])
def test_many_tokens_of_few_rows(format: int, block_size: int, K: int) -> None:
    """From 256 tokens on, and no fewer than rows or 512, weights are turned, unless tokens have to be widened; 59 rows are
    nearly whole micro-kernels everywhere, and 4100 columns more than one pass."""
    rows, M = 59, 261
    packed, weight = make(rows, K, format, block_size)
    for dtype in DTYPES:
        # At an odd element of its memory: pairs of bf16 are read where they lie only if they are aligned.
        x = tokens_like((M * K + 1,), dtype)[1:].view(M, K)
        grad, bias = tokens_like((M * rows + 1,), dtype, seed=3)[1:].view(M, rows), tokens_like((rows,), dtype, seed=2)
        y = ops.linear(x, packed, None, format, block_size, K)
        assert_within(y, x, weight.T)
        assert torch.equal(y, ops.linear(x.clone(), packed, None, format, block_size, K))
        assert_within(ops.linear(x, packed, bias, format, block_size, K), x, weight.T, bias)
        back = ops.linear_backward_input(grad, packed, format, block_size, K)
        assert_within(back, grad, weight)
        assert torch.equal(back, ops.linear_backward_input(grad.clone(), packed, format, block_size, K))


@pytest.mark.parametrize("M", [511, 512, 515])
def test_a_block_of_tokens_of_more_rows(M: int) -> None:
    """From 512 tokens on weights are turned whatever the rows."""
    rows, K = 1088, 100
    packed, weight = make(rows, K, NF4, 64)
    for dtype in DTYPES:
        x, bias = tokens_like((M, K), dtype), tokens_like((rows,), dtype, seed=2)
        assert_within(ops.linear(x, packed, bias, NF4, 64, K), x, weight.T, bias)


@pytest.mark.usefixtures("one_thread")
def test_every_small_number_of_tokens() -> None:
    K, rows = 200, 29
    packed, weight = make(rows, K, NF4, 64)
    for dtype in (torch.float32, torch.bfloat16):
        x, grad = tokens_like((70, K), dtype), tokens_like((70, rows), dtype)
        forward, reverse = Exact(x, weight.T), Exact(grad, weight)
        for M in range(1, 70):
            forward.check(ops.linear(x[:M], packed, None, NF4, 64, K))
            reverse.check(ops.linear_backward_input(grad[:M], packed, NF4, 64, K))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "block_size"), [(NF4, 64), (NF4_DQ, 32), (INT8, 0), (FP8, 0)])
def test_equal_tokens_of_a_batch_give_equal_bits(format: int, block_size: int, dtype: torch.dtype) -> None:
    """Up to 16 tokens are taken 4 at a time, with fewer at the end."""
    rows, K = 45, 700
    packed, _ = make(rows, K, format, block_size)
    x = tokens_like((1, K), dtype)
    for M in range(2, 20):
        y = ops.linear(x.expand(M, K), packed, None, format, block_size, K)
        assert torch.equal(y, y[:1].expand_as(y)), M


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [NF4, INT8])
def test_few_tokens_do_not_change_each_others_gradients(format: int, dtype: torch.dtype) -> None:
    rows, K, block_size = 603, 700, 64 if format == NF4 else 0
    packed, _ = make(rows, K, format, block_size)
    grad = tokens_like((4, rows), dtype)
    together = ops.linear_backward_input(grad, packed, format, block_size, K)
    for M in (1, 2, 3):
        assert torch.equal(ops.linear_backward_input(grad[:M], packed, format, block_size, K), together[:M])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "K", "tokens"),
    [
        (2100, 400, (1, 2, 4)),  # backward: threads share slices of rows, and columns within one
        (523, 1100, (1, 3, 7, 40, 700)),
        (50, 130, (256, 512, 1100, 1536, 2560)),  # 2, 3 or 5 threads share tokens
        (250, 130, (256, 300, 1100, 2560)),  # turned weights
    ],
)
def test_threads_do_not_change_a_bit(rows: int, K: int, tokens: tuple[int, ...], dtype: torch.dtype) -> None:
    packed, _ = make(rows, K, NF4, 64)
    before = torch.get_num_threads()
    try:
        for M in tokens:
            x, grad = tokens_like((M, K), dtype), tokens_like((M, rows), dtype)
            results = []
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                results.append(
                    (ops.linear(x, packed, None, NF4, 64, K), ops.linear_backward_input(grad, packed, NF4, 64, K))
                )
            for y, back in results[1:]:
                assert torch.equal(y, results[0][0])
                assert torch.equal(back, results[0][1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "block_size"), [(NF4, 64), (NF4_DQ, 32), (INT8, 0), (FP8, 0)])
def test_nan_stays_where_it_belongs(format: int, block_size: int, dtype: torch.dtype) -> None:
    rows, K, bad = 60, 150, 11
    weight = tokens_like((rows, K), torch.float32)
    clean = ops.quantize(weight, format, block_size)
    weight[bad, 140] = float("nan")
    packed = ops.quantize(weight, format, block_size)
    others = [n for n in range(rows) if n != bad]
    columns = ops.dequantize(packed, format, block_size, K, torch.float32)[bad].isnan()
    assert columns[140]
    for M in (1, 3, 6, 40, 300):
        x, grad = tokens_like((M, K), dtype), tokens_like((M, rows), dtype)
        y = ops.linear(x, packed, None, format, block_size, K)
        assert y[:, bad].isnan().all()
        assert torch.equal(y[:, others], ops.linear(x, clean, None, format, block_size, K)[:, others])
        back = ops.linear_backward_input(grad, packed, format, block_size, K)
        assert torch.equal(back.isnan(), columns.expand(M, K))
        if M > 1:  # a NaN token spoils its own outputs only
            x2, grad2 = x.clone(), grad.clone()
            x2[2, 149] = grad2[2, rows - 1] = float("nan")
            y2 = ops.linear(x2, clean, None, format, block_size, K)
            back2 = ops.linear_backward_input(grad2, clean, format, block_size, K)
            keep = [m for m in range(M) if m != 2]
            assert y2[2].isnan().all()
            assert back2[2].isnan().all()
            assert torch.equal(y2[keep], ops.linear(x, clean, None, format, block_size, K)[keep])
            assert torch.equal(back2[keep], ops.linear_backward_input(grad, clean, format, block_size, K)[keep])


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_once_to_nearest_even(dtype: torch.dtype) -> None:
    """Rows with one weight each, a bf16 number: every sum is one exact product. Overflow and fp16's subnormals included."""
    rows, K = 197, 200
    generator = torch.Generator().manual_seed(3)
    column, factor = torch.randperm(K, generator=generator)[:rows], torch.randn(rows, generator=generator).mul(8).exp2()
    factor = factor.bfloat16().float()
    weight = torch.zeros(rows, K)
    weight[torch.arange(rows), column] = factor
    packed = ops.quantize(weight, NF4, 64)
    assert torch.equal(ops.dequantize(packed, NF4, 64, K, torch.float32), weight)
    bias = torch.randn(rows, generator=generator).to(dtype)
    for M in (3, 20, 130):
        x, grad = (tokens_like((M, n), dtype) * 300 for n in (K, rows))
        products = x[:, column].float() * factor
        if dtype is not torch.bfloat16 or M != 3:  # AVX2 multiplies few bf16 tokens as int16
            assert torch.equal(ops.linear(x, packed, None, NF4, 64, K), products.to(dtype))
            assert torch.equal(ops.linear(x, packed, bias, NF4, 64, K), (products + bias.float()).to(dtype))
        back = torch.zeros(M, K, dtype=dtype)
        back[:, column] = (grad.float() * factor).to(dtype)
        assert torch.equal(ops.linear_backward_input(grad, packed, NF4, 64, K), back)
        if dtype is torch.float16:
            assert back.isinf().any()
            assert ((back != 0) & (back.abs() < 2.0**-14)).any()


def test_fp8_nan_codes_decode_to_nan() -> None:
    packed, _ = make(3, 128, FP8, 0)
    packed[1, 5] = 0xFF  # never written by quantize
    for dtype in (torch.float32, torch.bfloat16):
        for M in (1, 20):
            y = ops.linear(tokens_like((M, 128), dtype), packed, None, FP8, 0, 128)
            assert y[:, 1].isnan().all()
            assert y[:, ::2].isfinite().all()


@pytest.mark.parametrize("format", [INT8, FP8])
def test_every_code_of_a_row_counts(format: int) -> None:
    """All 256 codes, int8's -128 (which quantize never writes) included; fp8's two NaNs have the test above."""
    codes = torch.arange(256, dtype=torch.int32).repeat(2)
    if format == FP8:
        codes[(codes & 0x7F) == 0x7F] = 1
    K = len(codes)
    packed, _ = make(14, K, format, 0)
    packed[:, :K] = torch.stack([codes.roll(n) for n in range(14)]).to(torch.uint8)
    weight = ops.dequantize(packed, format, 0, K, torch.float32).double()
    for dtype in DTYPES:
        for M in (1, 3, 20):
            x, grad = tokens_like((M, K), dtype), tokens_like((M, 14), dtype)
            assert_within(ops.linear(x, packed, None, format, 0, K), x, weight.T)
            assert_within(ops.linear_backward_input(grad, packed, format, 0, K), grad, weight)


def test_shapes_strides_and_empties() -> None:
    K, rows = 100, 9
    packed, weight = make(rows, K, NF4, 64)
    x = tokens_like((2, 3, K), torch.float32)
    assert ops.linear(x, packed, None, NF4, 64, K).shape == (2, 3, rows)
    assert ops.linear(x[0, 0], packed, None, NF4, 64, K).shape == (rows,)
    assert ops.linear(x[:0], packed, None, NF4, 64, K).shape == (0, 3, rows)
    assert ops.linear(x, packed[:0], None, NF4, 64, K).shape == (2, 3, 0)
    assert ops.linear_backward_input(x[..., :rows], packed, NF4, 64, K).shape == (2, 3, K)
    assert torch.equal(ops.linear_backward_input(x[..., :0], packed[:0], NF4, 64, K), torch.zeros(2, 3, K))
    strided = tokens_like((K, 6), torch.float32).T
    assert_within(ops.linear(strided, packed[::2], None, NF4, 64, K), strided, weight[::2].T)
    spread = torch.zeros(rows, 2 * packed.shape[1], dtype=torch.uint8)
    spread[:, 1 : 1 + packed.shape[1]] = packed
    assert_within(ops.linear(strided, spread[:, 1 : 1 + packed.shape[1]], None, NF4, 64, K), strided, weight.T)
    one_off = torch.cat([torch.zeros(1, dtype=torch.uint8), packed.flatten()])[1:].view_as(packed)  # no alignment at all
    bias = tokens_like((2 * rows,), torch.float32)[::2]
    assert_within(ops.linear(strided, one_off, bias, NF4, 64, K), strided, weight.T, bias)


def test_raw_ops_record_nothing_inside() -> None:
    """A kernel that calls aten with grad mode on would add its own nodes to the graph of the registered formula."""
    packed, weight = make(8, 64, NF4, 64)
    x = tokens_like((64, 5), torch.float32).T.requires_grad_()  # not contiguous: the kernel copies it
    grad = tokens_like((5, 8), torch.float32)
    ops.linear(x, packed, None, NF4, 64, 64).backward(grad)
    assert x.grad is not None
    assert_within(x.grad, grad, weight)
    g = tokens_like((8, 5), torch.float32).T.requires_grad_()
    ops.linear_backward_input(g, packed, NF4, 64, 64).backward(x.detach())
    assert g.grad is not None
    assert_within(g.grad, x.detach(), weight.T)
    assert torch.is_grad_enabled()


def test_errors_name_the_argument() -> None:
    packed, _ = make(8, 64, NF4, 64)
    x = tokens_like((2, 64), torch.float32)
    with pytest.raises(ValueError, match=r"linear: input's last dimension must be in_features=64, got shape \(2, 32\)"):
        ops.linear(x[:, :32], packed, None, NF4, 64, 64)
    with pytest.raises(ValueError, match=r"halfbyte::linear: bias must have shape \(8,\), got \(9,\)"):
        ops.linear(x, packed, torch.zeros(9), NF4, 64, 64)
    with pytest.raises(ValueError, match="bias must have input's dtype float32, got bfloat16"):
        ops.linear(x, packed, torch.zeros(8, dtype=torch.bfloat16), NF4, 64, 64)
    with pytest.raises(ValueError, match="was it quantized with another format"):
        ops.linear(x, packed, None, INT8, 0, 64)
    with pytest.raises(ValueError, match="grad_output's last dimension must be out_features=8"):
        ops.linear_backward_input(x, packed, NF4, 64, 64)
    with pytest.raises(ValueError, match="input must be float32, bfloat16 or float16, got float64"):
        ops.linear(x.double(), packed, None, NF4, 64, 64)


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def test_workspace_is_bounded_and_released() -> None:
    ops.clear_workspace()
    assert ops.workspace_bytes() == 0
    K, copies = 1024, 64
    packed, _ = make(256, K, NF4, 64)
    packed = packed.repeat(copies, 1)  # 16384 rows: 64 MiB as fp32
    x, grad = tokens_like((8, K), torch.float32), tokens_like((8, 256 * copies), torch.float32)
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM = what is resident now
        before = _peak_kib()
    for _ in range(2):
        for tokens in (1, 8, 40):
            ops.linear(x[:1].expand(tokens, K), packed, None, NF4, 64, K)
            ops.linear_backward_input(grad[:1].expand(tokens, -1), packed, NF4, 64, K)
    many = tokens_like((512, K), torch.float32)  # 2 threads keep what they prepare: 256 tokens, 1 MiB, backward less
    ops.linear_backward_input(ops.linear(many, packed[:256], None, NF4, 64, K), packed[:256], NF4, 64, K)
    kept = ops.workspace_bytes()
    assert 0 < kept <= torch.get_num_threads() * 4 * 2**20
    if Path("/proc/self/clear_refs").exists():
        assert _peak_kib() - before < 32 * 1024, "a dense weight would be 64 MiB"
    ops.clear_workspace()
    assert ops.workspace_bytes() == 0
    assert ops.linear(x, packed, None, NF4, 64, K).isfinite().all()


def test_concurrent_calls_and_clears() -> None:
    K, rows = 300, 120
    packed, _ = make(rows, K, NF4, 64)
    x = tokens_like((40, K), torch.float32)
    expected = ops.linear(x, packed, None, NF4, 64, K)
    wrong: list[str] = []
    done = threading.Event()

    def call() -> None:
        for _ in range(30):
            if not torch.equal(ops.linear(x, packed, None, NF4, 64, K), expected):
                wrong.append("differs")

    def clear() -> None:
        while not done.is_set():
            ops.clear_workspace()

    callers = [threading.Thread(target=call) for _ in range(3)]
    clearer = threading.Thread(target=clear)
    for thread in (*callers, clearer):
        thread.start()
    for thread in callers:
        thread.join()
    done.set()
    clearer.join()
    assert not wrong
    ops.clear_workspace()
    assert ops.workspace_bytes() == 0  # ended threads took theirs along


def test_everything_here_under_another_isa(other_isa: Any) -> None:
    other_isa.tests(__file__)
