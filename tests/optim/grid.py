"""Compares the ops with the oracle over a grid of rules, shapes and dtypes; `python tests/optim/grid.py` runs it whole.

Run as a script by test_isa.py under each instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte import reference_optimizer as oracle
from halfbyte.ops import optimizer as ops

RULES: tuple[oracle.Rule, ...] = ("adamw", "adam", "lion", "sgd")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One block, ragged blocks, narrow LoRA rows (one and two vectors of each ISA; groups of rows and some left over), more than
# one trailing dimension, 1-D pieces, single elements, no rows.
SHAPES = ((5, 256), (3, 300), (9, 8), (11, 16), (7, 32), (2, 3, 129), (700,), (4, 1), (1, 513), (0, 32), (3, 0))


def call(
    rule: oracle.Rule,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
    h: oracle.Hyper,
    steps: Sequence[Tensor],
    **extra: object,
) -> None:
    """One op call; `states` holds (codes, scales) per parameter, each per moment."""
    columns: list[list[Tensor]] = []
    for moment in range(2 if rule in ("adamw", "adam") else 1):
        columns += [[codes[moment] for codes, _ in states], [scales[moment] for _, scales in states]]
    hyper: dict[str, object] = {"lr": h.lr, "weight_decay": h.weight_decay, "maximize": h.maximize, **extra}
    if h.grad_scale != 1:
        hyper["grad_scale"] = torch.tensor(h.grad_scale)
    if rule == "sgd":
        hyper |= {"momentum": h.momentum, "dampening": h.dampening, "nesterov": h.nesterov}
    else:
        hyper |= {"beta1": h.beta1, "beta2": h.beta2}
    if rule in ("adamw", "adam"):
        hyper["eps"] = h.eps
    getattr(ops, f"{rule}8bit_step_")(params, grads, *columns, steps, **hyper)


def gradient(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Magnitudes over many decades, some zeros."""
    size = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return (size * (torch.rand(shape, generator=generator) > 0.1)).clamp(-6e4, 6e4).to(dtype)


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal bits, or NaN in both."""
    return got.dtype == expected.dtype and bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def check(
    rule: oracle.Rule, shape: Sequence[int], param_dtype: torch.dtype, grad_dtype: torch.dtype, h: oracle.Hyper
) -> None:
    """Three steps of one parameter, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(shape, generator=generator).to(param_dtype)
    state = oracle.State.zeros(tuple(shape), rule)
    codes = [torch.from_numpy(c.copy()) for c in state.codes]
    scales = [torch.from_numpy(s.copy()) for s in state.scales]
    for count in (1, 2, 3):
        grad = gradient(shape, grad_dtype, generator)
        expected, state = oracle.step(rule, param.float().numpy(), grad.float().numpy(), state, h, count)
        call(rule, [param], [grad], [(codes, scales)], h, [torch.tensor(float(count))])
        where = f"{rule} {tuple(shape)} {param_dtype} {grad_dtype} step {count}"
        assert same(param, torch.from_numpy(expected).to(param_dtype)), f"{where}: parameter"
        for i, (c, s) in enumerate(zip(codes, scales, strict=True)):
            assert same(c, torch.from_numpy(state.codes[i])), f"{where}: codes of moment {i}"
            assert same(s, torch.from_numpy(state.scales[i])), f"{where}: scales of moment {i}"


def main() -> None:
    torch.set_num_threads(1)
    hypers = (
        oracle.Hyper(lr=1e-2, weight_decay=0.1, momentum=0.9, dampening=0.1, maximize=True, grad_scale=3.0),
        oracle.Hyper(lr=1e-3, momentum=0.9, nesterov=True),
    )
    for rule in RULES:
        for shape in SHAPES:
            for i, param_dtype in enumerate(DTYPES):
                for j, grad_dtype in enumerate(DTYPES):
                    check(rule, shape, param_dtype, grad_dtype, hypers[(i + j) % 2])


if __name__ == "__main__":
    main()
