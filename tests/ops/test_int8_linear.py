"""int8_linear: every bit equals the integer oracle, on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte import reference_products as reference
from halfbyte.ops import int8_linear

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(N: int, K: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return halfbyte.quantize(torch.randn(N, K, generator=generator) * torch.rand(N, 1, generator=generator), "int8")


def tokens(M: int, K: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(M, K, generator=generator) * torch.randn(M, 1, generator=generator).exp()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 3, 15, 63, 65, 100, 576, 1100])
def test_every_bit_equals_the_integer_oracle(K: int, dtype: torch.dtype) -> None:
    N = 37
    packed, x = rows(N, K), tokens(130, K, dtype)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected, biased = (reference.int8_linear(x, packed, b, K) for b in (None, bias))
    for M in (0, 1, 2, 3, 4, 5, 8, 11, 12, 13, 16, 17, 20, 21, 33, 64, 65, 130):  # in passes, in vectors, or in both
        assert torch.equal(int8_linear(x[:M], packed, None, K), expected[:M])
        assert torch.equal(int8_linear(x[:M], packed, bias, K), biased[:M])


def test_more_than_one_block_of_everything() -> None:
    N, K = 205, 2200  # rows > 2 panels of 96, units > 2 panels of 256
    packed, x = rows(N, K), tokens(530, K, torch.bfloat16)
    expected = reference.int8_linear(x, packed, None, K)
    for M in (14, 515, 520, 530):  # more than 512 tokens, with a rest of 3, none, and one that fills a vector nearly
        assert torch.equal(int8_linear(x[:M], packed, None, K), expected[:M])


def test_the_largest_sums() -> None:
    """All codes at +-127, at the largest K: the sums use 31 bits, and intermediate ones wrap."""
    K = 2**17
    x = torch.ones(6, K)
    x[1::2] = -1.0
    packed = halfbyte.quantize(torch.ones(5, K) * torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [1.0]]), "int8")  # 4 and 1
    for M in (1, 2, 6):
        assert torch.equal(int8_linear(x[:M], packed, None, K), reference.int8_linear(x[:M], packed, None, K))
    sums = 127 * 127 * K
    assert int(int8_linear(x[:1], packed, None, K)[0, 0] / (1 / 127) ** 2) == pytest.approx(sums, rel=1e-6)


def test_what_is_not_a_number_stays_in_its_row_and_token() -> None:
    K, N = 70, 9
    weight = torch.randn(N, K)
    weight[4, 69] = float("inf")
    packed = halfbyte.quantize(weight, "int8")
    for M in (2, 10, 20):
        x = tokens(M, K, torch.float32)
        x[1, 3] = float("nan")
        x[0] = 0.0
        y = int8_linear(x, packed, None, K)
        assert y[1].isnan().all()
        assert y[:, 4].isnan().all()
        finite = [n for n in range(N) if n != 4]
        assert torch.equal(y[0, finite], torch.zeros(N - 1))
        assert y[2:, finite].isfinite().all()


def test_other_instruction_sets(other_isa: Any) -> None:
    """The bits above on the ISAs that the CPU has but would not choose."""
    other_isa.tests(__file__, "bit or block or sums or number")
