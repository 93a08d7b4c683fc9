"""Values of linear and linear_backward_input on the CPU against fp64 (oracle.py), for every format, ISA and awkward size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfbyte._library import cpu_isa

from .oracle import DTYPES, FP4, FP4_DQ, FP8, INT8, NF4, NF4_DQ, Exact, assert_within, make, ops, tokens_like

FORMATS = (
    [(NF4, b) for b in (32, 64, 128, 256, 512, 1024, 2048, 4096)]
    + [(NF4_DQ, b) for b in (32, 64, 128, 4096)]
    + [(FP4, 32), (FP4, 64), (FP4_DQ, 32), (FP4_DQ, 64), (INT8, 0), (FP8, 0)]
)
FEATURES = (1, 63, 65, 100, 576, 4304)
TOKENS = (0, 1, 2, 3, 4, 5, 16, 17, 64, 130)
INT16_ISAS = ("avx2", "avx2_vnni")  # a few bf16 tokens multiply 4-bit codes as int16


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
        (1100, 600, 700),  # blocks of 368 tokens (fp32 with AMX: 560)
        (1100, 50, 4300),  # rows that are no whole micro-kernels keep panels: blocks of 512 tokens
        (45, 301, 4300),  # panels of 96 rows (AMX: 192) and of 4096 columns
        (70, 301, 4300),  # turned weights with AVX-512
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
    """From 64 tokens on (AMX: 256) weights of few rows are turned; tokens that have to be widened meet them with AVX-512
    alone. 59 rows are nearly whole micro-kernels everywhere, and 4100 columns more than one pass."""
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
    """From 512 tokens on weights are turned whatever the rows, for widened tokens with AVX-512 alone."""
    rows, K = 1088, 100
    packed, weight = make(rows, K, NF4, 64)
    for dtype in DTYPES:
        x, bias = tokens_like((M, K), dtype), tokens_like((rows,), dtype, seed=2)
        assert_within(ops.linear(x, packed, bias, NF4, 64, K), x, weight.T, bias)


@pytest.mark.parametrize("K", [100, 700, 4300])
@pytest.mark.parametrize(("format", "block_size"), [(NF4, 64), (FP4_DQ, 64), (INT8, 0), (FP8, 0)])
def test_tokens_that_are_no_whole_vectors(format: int, block_size: int, K: int) -> None:
    """With AVX-512 weights are turned for a number of tokens that panels would pad with 6 and more, and not with 5."""
    rows = 128
    packed, weight = make(rows, K, format, block_size)
    for dtype in DTYPES:
        x, bias = tokens_like((43, K), dtype), tokens_like((rows,), dtype, seed=2)
        exact = Exact(x, weight.T, bias)
        for M in (9, 10, 11, 17, 20, 26, 27, 33, 42, 43):
            exact.check(ops.linear(x[:M], packed, bias, format, block_size, K))


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
        (130, 1024, (330,)),  # 5 threads: blocks of 80 tokens and one of 10, which takes panels of more columns
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


@pytest.mark.parametrize(("format", "block_size"), [(NF4, 64), (NF4_DQ, 64), (FP4, 32), (INT8, 0), (FP8, 0)])
def test_every_finite_fp16_value_is_widened_exactly(format: int, block_size: int) -> None:
    """All 63488 times one weight each: subnormals, zeros and whatever follows the last whole vector of a row."""
    K = 250
    # Scales are powers of two: neither codes times scales nor tokens times codes are rounded.
    packed = ops.quantize(torch.eye(K) * {INT8: 127 / 128, FP8: 448 / 512}.get(format, 1.0), format, block_size)
    decoded = ops.dequantize(packed, format, block_size, K, torch.float32)
    scale = decoded.diagonal()
    assert torch.equal(decoded, scale.diag())
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.float16)
    values = values[values.isfinite()]
    values = torch.cat([values, values[: -len(values) % K]]).view(-1, K)
    expected = (values.float() * scale).half()
    assert ((values != 0) & (values.abs() < 2.0**-14)).sum() > 2000
    for M in (1, 3, 20, 100, len(values)):
        for first in range(0, len(values), M):
            x = values[first : first + M]
            assert torch.equal(ops.linear(x, packed, None, format, block_size, K), expected[first : first + M])
            assert torch.equal(ops.linear_backward_input(x, packed, format, block_size, K), expected[first : first + M])


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


def test_everything_here_under_another_isa(other_isa: Any) -> None:
    other_isa.tests(__file__)
