"""error_feedback on the CPU: bit for bit the oracle, whatever the instruction set, tile and number of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte import ops, reference_error_feedback
from halfbyte.formats import Format

ROOT = Path(__file__).parents[2]
FORMATS = ("nf4", "nf4:32", "fp4", "nf4-dq", "fp4-dq:32", "int8", "fp8")
CANDIDATES = torch.tensor([1.1, 1.0, 0.9])


def problem(rows: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, the factor of correlated inputs and the inputs' mean squares."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator) / K**0.5 + torch.eye(K)
    x = torch.randn(4 * K + 8, K, generator=generator) @ mix
    moment = (x.T @ x / len(x)).double()
    moment.diagonal().add_(0.01 * moment.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    return torch.randn(rows, K, generator=generator), factor, moment.diagonal().float()


def assert_equal_bits(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), float((a - b).abs().max())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "K"), [(3, 1), (40, 65), (2, 140)])
def test_equals_the_oracle(name: str, rows: int, K: int) -> None:
    weight, factor, importance = problem(rows, K)
    args = (weight, factor, importance, CANDIDATES, name)
    assert_equal_bits(ops.error_feedback(*args), reference_error_feedback.error_feedback(*args))


@pytest.mark.parametrize("name", FORMATS)
def test_hard_rows_equal_the_oracle(name: str) -> None:
    weight, factor, importance = problem(7, 67)
    weight[0] = 0.0
    weight[1] *= 1e-38  # subnormal, some reciprocals not finite
    weight[2] *= 1e30
    weight[3, :64] = 0.0
    weight[4] = weight[4].round()
    weight[5] *= 1e-44
    importance[:40] = 0.0
    for args in ((weight, factor), (weight, None)):
        given = (*args, importance, CANDIDATES, name)
        assert_equal_bits(ops.error_feedback(*given), reference_error_feedback.error_feedback(*given))


@pytest.mark.parametrize("name", FORMATS)
def test_given_scales_equal_the_oracle(name: str) -> None:
    weight, factor, importance = problem(6, 67)
    scales = torch.rand(6, Format.parse(name).num_blocks(67)) + 0.5
    scales[0, 0], scales[1, 0], scales[2, 0], scales[3, 0] = 0.0, -1.0, float("nan"), float("inf")
    scales[4, 0] = 1e-40
    args = (weight, factor, importance, CANDIDATES[:0], name)
    got = ops.error_feedback(*args, scales=scales)
    expected = reference_error_feedback.error_feedback(*args, scales=scales)
    assert torch.equal(got[1].nan_to_num(7.0), scales.nan_to_num(7.0))
    assert_equal_bits((got[0], got[0]), (expected[0], expected[0]))


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8", "fp8"])
def test_packing_the_results_gives_the_codes_that_were_rounded_to(name: str) -> None:
    weight, factor, importance = problem(20, 150)
    targets, scales = ops.error_feedback(weight, factor, importance, CANDIDATES, name)
    values = halfbyte.dequantize(halfbyte.quantize(targets, name, scales=scales), name, 150, torch.float32)
    step = (values - targets) / factor.diagonal()
    carried = weight.double() + step.double() @ factor.triu(1).double()
    assert torch.allclose(carried, targets.double(), atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_the_output_changes_less_than_with_plain_rounding(name: str) -> None:
    weight, factor, importance = problem(64, 256)
    U = factor.double()
    moment = torch.cholesky_inverse(torch.linalg.cholesky(U.T @ U))

    def loss(packed: Tensor) -> float:
        off = halfbyte.dequantize(packed, name, 256, torch.float32).double() - weight.double()
        return float(((off @ moment) * off).sum())

    plain = loss(halfbyte.quantize(weight, name))
    searched = ops.error_feedback(weight, None, importance, CANDIDATES, name)
    fed_back = ops.error_feedback(weight, factor, importance, CANDIDATES, name)
    assert loss(halfbyte.quantize(searched[0], name, scales=searched[1])) <= plain
    assert loss(halfbyte.quantize(fed_back[0], name, scales=fed_back[1])) < 0.8 * plain


def test_rows_do_not_depend_on_each_other_or_on_threads() -> None:
    weight, factor, importance = problem(70, 130)
    args = (factor, importance, CANDIDATES, "nf4:32")
    whole = ops.error_feedback(weight, *args)
    rows = [ops.error_feedback(weight[i : i + 1], *args) for i in range(70)]
    assert_equal_bits(whole, (torch.cat([t for t, _ in rows]), torch.cat([s for _, s in rows])))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        assert_equal_bits(ops.error_feedback(weight, *args), whole)
    finally:
        torch.set_num_threads(before)


def test_wrong_types_name_the_argument() -> None:
    weight, factor, importance = problem(2, 32)
    with pytest.raises(TypeError, match="weight must be a float32 tensor, got bfloat16"):
        ops.error_feedback(weight.bfloat16(), factor, importance, CANDIDATES)
    with pytest.raises(TypeError, match="candidates must be a float32 tensor, got list"):
        ops.error_feedback(weight, factor, importance, [1.0])  # type: ignore[arg-type]


def test_everything_here_under_another_isa(other_isa: Any) -> None:
    other_isa.tests(__file__, "oracle")
