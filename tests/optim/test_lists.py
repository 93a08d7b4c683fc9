"""Lists of parameters and blocks: what is stepped together gives what each gives alone, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfbyte.ops.optimizer as ops
from halfbyte.optim import AdamW8bit
from halfbyte.optim.dynamic_map import row_blocks


def columns(params: list[Tensor], moments: int) -> list[list[Tensor]]:
    """Codes and scales of new moments, as the ops take them."""
    out: list[list[Tensor]] = []
    for moment in range(moments):
        out.append([torch.full(p.shape, 0 if moment else 127, dtype=torch.uint8) for p in params])
        out.append([torch.zeros(row_blocks(p.shape)[0], row_blocks(p.shape)[2]) for p in params])
    return out


def adamw(params: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], step: int) -> None:
    hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    ops.adamw8bit_step_(params, grads, *state, [torch.tensor(float(step))], **hyper)


def lion(params: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], step: int) -> None:
    ops.lion8bit_step_(params, grads, *state, [torch.tensor(float(step))], lr=1e-3, beta1=0.9, beta2=0.1, weight_decay=0.1)


@pytest.mark.parametrize("rule", ["adamw", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unusual_blocks_between_others(rule: str, dtype: torch.dtype) -> None:
    """Blocks of zeros, of NaN and of the largest numbers, beside each other and beside usual ones."""
    step, moments = (adamw, 2) if rule == "adamw" else (lion, 1)
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(12, 600, generator=generator).to(dtype)
    grads = [torch.randn(12, 600, generator=generator) for _ in range(3)]
    for grad in grads:
        grad[2] = grad[3, 300:] = 0.0
        grad[5, 7] = grad[6, 599] = float("nan")
        grad[8, :256] = grad[9] = 3e38
    together, apart = [param.clone()], [row.clone()[None] for row in param]
    state, states = columns(together, moments), columns(apart, moments)
    for t, grad in enumerate(grads, 1):
        step(together, [grad.to(dtype)], state, t)
        step(apart, [row[None] for row in grad.to(dtype)], states, t)
    assert torch.equal(together[0].nan_to_num(), torch.cat(apart).nan_to_num())
    assert torch.equal(together[0].isnan(), torch.cat(apart).isnan())
    for whole, parts in zip(state, states, strict=True):
        assert torch.equal(whole[0], torch.cat(parts))


def test_many_small_parameters_beside_large_ones(two_threads: None) -> None:
    """More work than one thread takes, cut within parameters and gathered over them, none missing, none twice."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 16), (3, 5), (700, 16), (90, 500), (0, 4), (1, 1), (2, 9000), (64, 33)] * 6
    params = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [torch.randn(shape, generator=generator) for shape in shapes]
    together, apart = [p.clone() for p in params], [p.clone() for p in params]
    state = columns(together, 2)
    adamw(together, grads, state, 1)
    for i, p in enumerate(apart):
        alone = columns([p], 2)
        adamw([p], [grads[i]], alone, 1)
        assert torch.equal(together[i], p), i
        for column, expected in zip(state, alone, strict=True):
            assert torch.equal(column[i], expected[0]), i


def test_strided_gradients_are_as_good_as_contiguous_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    a = [nn.Parameter(torch.ones(80, 64)), nn.Parameter(torch.ones(80, 64))]
    b = [nn.Parameter(p.detach().clone()) for p in a]
    first, second = AdamW8bit(a, lr=1e-2), AdamW8bit(b, lr=1e-2)
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            q.grad = torch.randn(80, 64, generator=generator)
            p.grad = q.grad.t().contiguous().t() if p is a[1] else q.grad.clone()
        first.step()
        second.step()
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)
        assert float(first.state[p]["step"]) == 3
