"""linear's products and gradients in fp64, and how far a kernel's may be from them.

The bound. Sums are fp32 with a fixed order, so the computed sum of n products is within (n + c) * 2^-24 * sum |x| |w| of
the exact one (c: the product with the scale, the bias, the lanes' own sum). Where bf16 inputs multiply in bf16 pairs
(AVX-512, AMX from 5 tokens on), each weight is rounded to bf16 first, as a dense bf16 layer would store it:
2^-8 * sum |x| |w| more, which also covers int16 (AVX2, up to 16 tokens). The output is rounded once: 2^-8 (bf16) or
2^-11 (fp16) of itself, and fp16 has subnormals.
"""

from __future__ import annotations

import torch

import halfbyte  # noqa: F401  (loads the ops)

ops = torch.ops.halfbyte

NF4, FP4, NF4_DQ, FP4_DQ, INT8, FP8 = range(6)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def tokens_like(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
