"""Dropout's kernels of csrc/cuda, run on the CPU thread by thread: masks against the CPU op's, and what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@pytest.mark.parametrize("p", [0.0, 0.1, 65535 / 65536, 1.0])
def test_masks_are_the_cpu_ops(emulated: Any, p: float) -> None:
    for rows, columns in ((0, 5), (1, 1), (3, 65), (40, 1001)):
        for number in (0, 7, -2):
            seed = torch.tensor([number])
            expected = torch.ops.halfbyte.dropout_mask(torch.empty(rows, columns), seed, p)
            mask = torch.full_like(expected, 0xA5)
            emulated.call("emulated_dropout_mask", seed, int(p * 65536 + 0.5), mask.numel(), mask)
            assert torch.equal(mask, expected)


def placed(x: Tensor, by: int) -> Tensor:
    """The same values `by` elements past a multiple of 16 bytes."""
    buffer = torch.empty(x.numel() + 32, dtype=x.dtype)
    start = -buffer.data_ptr() % 16 // x.element_size() + by
    return buffer[start : start + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_elements_are_zeros_and_all_others_as_they_were(emulated: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((0, 8), (1, 1), (5, 7), (5, 8), (3, 65), (70, 64), (33, 520)):
        x = torch.randn(rows, columns, generator=generator).to(dtype)
        if rows:
            x[-1, 0], x[0, -1] = float("nan"), -0.0
        mask = torch.randint(256, (rows, (columns + 7) // 8), generator=generator, dtype=torch.uint8)
        kept = (mask.unsqueeze(-1) >> torch.arange(8) & 1).flatten(-2)[..., :columns].bool()
        words = torch.int32 if dtype == torch.float32 else torch.int16
        expected = torch.where(kept, x.view(words), 0)
        for source, target in ((0, 0), (1, 0), (0, 1)):
            given, output = placed(x, source), placed(torch.full_like(x, 7.0), target)
            emulated.call("emulated_keep", given, DTYPES[dtype], rows, columns, mask, output)
            assert torch.equal(output.view(words), expected)
        emulated.call("emulated_keep", given, DTYPES[dtype], rows, columns, mask, given)
        assert torch.equal(given.view(words), expected)
