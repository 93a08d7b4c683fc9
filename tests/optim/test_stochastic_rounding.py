"""Stochastic rounding: no bias, and independence of threads and of how the work is split. The oracle's bits: test_ops.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfbyte import reference_optimizer as oracle
from halfbyte.ops.optimizer import sgd8bit_step_
from halfbyte.optim import Adam8bit, AdamW8bit, Lion8bit, SGD8bit

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def sgd_step(p: torch.Tensor, grad: torch.Tensor, step: int, offset: int, seed: int, lr: float = 1.0) -> None:
    """p - lr * grad through the op: momentum 0 makes the buffer the gradient."""
    rows, blocks = p.shape[0], -(-p.shape[1] // 256)
    codes, scales = torch.full(p.shape, 127, dtype=torch.uint8), torch.zeros(rows, blocks)
    sgd8bit_step_([p], [grad], [codes], [scales], [torch.tensor(float(step))], lr=lr, momentum=0.0, dampening=0.0,
                  weight_decay=0.0, nesterov=False, element_offsets=[offset], seed=seed)  # fmt: skip


def test_philox_known_answers() -> None:
    """Random123's test vectors for philox4x32-10."""
    assert oracle.philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    # The last counter word is always 0 here, so that only keys and three counter words vary.
    assert oracle.philox(1, 2, 3) != oracle.philox(1, 2, 4)


@HALF
def test_no_bias(dtype: torch.dtype) -> None:
    """1000 updates of a tenth of the spacing are lost to nearest-even, and arrive on average here."""
    spacing = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
    nearest, stochastic = torch.ones(16, 256, dtype=dtype), torch.ones(16, 256, dtype=dtype)
    grad = torch.full((16, 256), -0.1 * spacing)
    for step in range(1, 201):
        sgd_step(stochastic, grad, step, 0, 1)
    assert (nearest + 0.1 * spacing * 200 * 0 == 1).all()
    moved = (stochastic.double() - 1) / spacing
    assert abs(moved.mean() - 20) < 4 * np.sqrt(200 * 0.09 / 4096)
    assert 0.8 < moved.var() / (200 * 0.09) < 1.2


@HALF
def test_representable_values_stay(dtype: torch.dtype) -> None:
    p = torch.randn(16, 256).to(dtype)
    before = p.clone()
    sgd_step(p, torch.zeros(16, 256), 1, 0, 3)
    assert torch.equal(p, before)


def trained(threads: int, seed: int = 0, split: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ps = [nn.Parameter(torch.randn(64, 300, generator=generator).bfloat16()) for _ in range(3)]
    groups = [{"params": [p]} for p in ps] if split else ps
    optimizer = AdamW8bit(groups, lr=1e-4, stochastic_rounding=True, seed=seed)
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            optimizer.step()
    finally:
        torch.set_num_threads(previous)
    return [p.detach() for p in ps]


def test_reproducible_and_independent_of_threads_and_groups() -> None:
    one, four, grouped, other = trained(1), trained(4), trained(2, split=True), trained(1, seed=1)
    for a, b, c, d in zip(one, four, grouped, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert not torch.equal(a, d)


def test_parameters_do_not_share_their_random_numbers() -> None:
    a, b = (nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = SGD8bit([a, b], lr=1.0, momentum=0.9, stochastic_rounding=True)
    for p in (a, b):
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    assert 0 < (a != 1).float().mean() < 1
    assert not torch.equal(a, b)


@HALF
@pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit, Lion8bit, SGD8bit])
def test_small_parameters_are_rounded_by_the_same_random_numbers(cls: Any, dtype: torch.dtype) -> None:
    """Norms and biases, whose state is float32: their float32 step, rounded as the oracle rounds."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(300,), (0,), (6, 50), ()]
    ps = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    ps.append(nn.Parameter(torch.randn(50, 6, generator=generator).to(dtype).t()))
    wide = [nn.Parameter(p.detach().float()) for p in ps]
    optimizer, exact = cls(ps, lr=1e-3, stochastic_rounding=True, seed=5), cls(wide, lr=1e-3)
    up = down = 0
    for step in (1, 2, 3):
        before = [p.detach().clone() for p in ps]
        for p, q in zip(ps, wide, strict=True):
            q.data.copy_(p.detach())
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.float()
        optimizer.step()
        exact.step()
        offset = 0
        for p, q in zip(ps, wide, strict=True):
            name = "bfloat16" if dtype == torch.bfloat16 else "float16"
            values = q.detach().flatten().tolist()
            randoms = [oracle.random_bits(offset + i, step, 5) for i in range(len(values))]
            expected = [oracle.round_stochastic(x, name, r) for x, r in zip(values, randoms, strict=True)]
            assert p.detach().flatten().tolist() == expected
            offset += p.numel()
            up += int((p.detach().float() > q).sum())
            down += int((p.detach().float() < q).sum())
        assert any(not torch.equal(p, q) for p, q in zip(ps, before, strict=True))
    assert 0.3 < up / (up + down) < 0.7


def test_small_updates_of_a_norm_are_not_lost() -> None:
    """A hundredth of the spacing of bfloat16 at 1: rounded to nearest, the weight would stay 1 for ever."""
    lr = 2.0**-7 / 100
    norm = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    optimizer = SGD8bit([norm], lr=lr, stochastic_rounding=True)
    for _ in range(200):
        norm.grad = -torch.ones_like(norm)
        optimizer.step()
    assert abs((norm.double().mean() - 1) / (200 * lr) - 1) < 0.05
