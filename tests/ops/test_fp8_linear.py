"""fp8_linear against the fp64 oracle on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte import reference_products as reference
from halfbyte.ops import fp8_linear

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def rows(N: int, K: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return halfbyte.quantize(torch.randn(N, K, generator=generator) * torch.rand(N, 1, generator=generator), "fp8")


def tokens(M: int, K: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(M, K, generator=generator) * torch.randn(M, 1, generator=generator).exp()).to(dtype)


def check(y: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> None:
    """fp32 sums of K exact values, one rounding of the result."""
    K = x.shape[-1]
    exact = reference.fp8_linear(x, packed, bias, K)
    magnitude = reference.fp8_linear(x.abs(), packed & 0x7F, None if bias is None else bias.abs(), K)  # every sign bit off
    bound = magnitude * (K + 3) * 2.0**-24 + exact.abs() * ROUNDING[x.dtype] * 1.01 + 1e-7
    assert y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= bound).all(), float(((y.double() - exact).abs() / bound).max())


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("K", [1, 15, 65, 576, 1100])
def test_values(K: int, dtype: torch.dtype) -> None:
    packed, x = rows(37, K), tokens(70, K, dtype)
    bias = torch.randn(37, generator=torch.Generator().manual_seed(2)).to(dtype)
    for M in (0, 1, 3, 17, 70):
        for added in (None, bias):
            check(fp8_linear(x[:M], packed, added, K), x[:M], packed, added)


def test_values_of_more_than_one_block_of_tokens() -> None:
    packed, x = rows(40, 96), tokens(1030, 96, torch.bfloat16)
    check(fp8_linear(x, packed, None, 96), x, packed, None)


def test_values_that_are_not_numbers_stay_in_their_row_and_token() -> None:
    weight, x = torch.randn(9, 70), tokens(20, 70, torch.float32)
    weight[4, 69], x[1, 3], x[0] = float("inf"), float("nan"), 0.0
    y = fp8_linear(x, halfbyte.quantize(weight, "fp8"), None, 70)
    assert torch.equal(y.isnan(), (torch.arange(20) == 1)[:, None] | (torch.arange(9) == 4)[None])
    assert torch.equal(y[0, :4], torch.zeros(4))


def test_activations_are_off_by_what_the_docstring_says() -> None:
    x = tokens(8, 512, torch.float32)
    identity = torch.eye(512)
    rounded = fp8_linear(x, halfbyte.quantize(identity, "fp8"), None, 512).double()
    bound = torch.maximum(x.double().abs() / 16, x.double().abs().amax(1, keepdim=True) / 2**18) * (1 + 1e-6)
    assert ((rounded - x.double()).abs() <= bound).all()


def test_other_instruction_sets(other_isa: Any) -> None:
    """The values above on the ISAs that the CPU has but would not choose."""
    other_isa.tests(__file__, "values")
