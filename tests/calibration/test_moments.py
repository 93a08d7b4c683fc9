"""Second moments: what makes them singular, and the order of columns."""

from __future__ import annotations

import pytest
import torch

import halfbyte
from halfbyte.calibration.moments import DAMPING, Moment, column_order
from halfbyte.calibration.rows import calibrated_rows, snapped
from halfbyte.formats import Format


def moment_of(x: torch.Tensor) -> Moment:
    moment = Moment(x.shape[-1], x.device)
    moment.add(x)
    return moment


def test_the_factor_inverts_the_damped_moment_in_its_order() -> None:
    x = torch.randn(500, 70) * torch.rand(70)
    solved = moment_of(x).solve(32)
    assert solved is not None and solved.damping == DAMPING and solved.dead == 0
    mean = (x.T @ x / 500).double()
    mean.diagonal().add_(DAMPING * mean.diagonal().mean())
    U = solved.factor.double()
    product = U.T @ U @ mean[solved.order][:, solved.order]
    assert torch.allclose(product, torch.eye(70, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(solved.importance.double(), mean.diagonal()[solved.order], rtol=1e-5)


def test_singular_moments_are_solved() -> None:
    x = torch.randn(3, 64).repeat(30, 1)  # rank 3
    x[:, 10] = 0.0
    solved = moment_of(x).solve(64)
    assert solved is not None and solved.dead == 1 and torch.isfinite(solved.factor).all()
    rows = calibrated_rows(torch.randn(5, 64), solved, Format.parse("nf4"), "feedback")
    assert rows.error < rows.plain_error


@pytest.mark.parametrize("value", [0.0, 1e30])
def test_zero_and_overflowing_inputs_have_no_solution(value: float) -> None:
    assert moment_of(torch.full((10, 8), value)).solve(8) is None


def test_a_row_that_is_not_finite_is_counted() -> None:
    x = torch.randn(6, 8)
    x[1, 3], x[4, 0] = float("inf"), float("nan")
    moment = moment_of(x)
    assert (moment.tokens, moment.dropped) == (4, 2) and torch.isfinite(moment.sum).all()


@pytest.mark.parametrize(("K", "block_size"), [(70, 32), (64, 32), (20, 32), (9, 9)])
def test_columns_are_ordered_inside_blocks_and_blocks_stay_whole(K: int, block_size: int) -> None:
    squares = torch.rand(K)
    order = column_order(squares, block_size)
    assert sorted(order.tolist()) == list(range(K))
    for begin in range(0, K, block_size):
        part = order[begin : begin + block_size]
        assert len((part // block_size).unique()) == 1
        assert (squares[part].diff() <= 0).all()
    if K % block_size:
        assert int(order[-1]) // block_size == K // block_size


def test_snapped_scales_are_what_a_row_decodes_to() -> None:
    scales = torch.rand(4, 9) + 0.1
    held = snapped(scales)
    packed = halfbyte.quantize(torch.ones(4, 9 * 64), "nf4-dq", scales=held)  # ones saturate: they decode to the scale
    decoded = halfbyte.dequantize(packed, "nf4-dq", 9 * 64, torch.float32)[:, ::64]
    assert torch.allclose(decoded[held < 1], held[held < 1], rtol=1e-6)
    assert float((held - scales).abs().max()) <= float((scales.amax() - scales.amin()) / 500)


def test_weights_that_are_not_finite_keep_plain_rows() -> None:
    weight = torch.randn(3, 64)
    weight[1, 2] = float("nan")
    solved = moment_of(torch.randn(100, 64)).solve(64)
    assert solved is not None
    rows = calibrated_rows(weight, solved, Format.parse("nf4"), "feedback")
    assert rows.note == "the weight holds NaN or infinity" and torch.equal(rows.packed, halfbyte.quantize(weight))
