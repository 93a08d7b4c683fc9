"""csrc/cuda/error_feedback.cu, run on the CPU thread by thread, against the CPU op: bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.formats import Format

CANDIDATES = torch.tensor([1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7])  # more than a row has threads


def problem(rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(rows, k, generator=generator)
    weight[0] = 0.0
    weight[1 % rows] *= 1e-40
    factor = torch.rand(k, k, generator=generator).triu(1) / k + torch.eye(k)
    return weight, factor, torch.rand(k, generator=generator)


def assert_equal_bits(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4-dq:32", "fp4:128", "int8", "fp8"])
@pytest.mark.parametrize(("rows", "k"), [(2, 1), (35, 65), (3, 300)])
def test_equals_the_cpu_op(emulated: Any, name: str, rows: int, k: int) -> None:
    fmt = Format.parse(name)
    weight, factor, importance = problem(rows, k)
    scales = torch.rand(rows, fmt.num_blocks(k)) + 0.5
    scales[0, 0] = -1.0
    for used in (factor, None):
        args = (weight, used, importance, CANDIDATES)
        assert_equal_bits(emulated.error_feedback(*args, fmt), ops.error_feedback(*args, fmt))
    expected = ops.error_feedback(weight, factor, importance, CANDIDATES, fmt, scales=scales)
    emulated.reversed_threads(True)
    try:
        got = emulated.error_feedback(weight, factor, importance, CANDIDATES, fmt, scales)
    finally:
        emulated.reversed_threads(False)
    assert_equal_bits(got, expected)
