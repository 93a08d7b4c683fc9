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
# One block, ragged blocks, more than one trailing dimension, 1-D pieces, no rows; short LoRA rows (parts of a vector, one
# and two vectors of each ISA; groups of rows and some left over), single elements.
SHAPES = (
    *((5, 256), (3, 300), (2, 3, 129), (700,), (1, 513), (0, 32), (3, 0)),
    *((67, 1), (35, 2), (18, 4), (9, 8), (11, 16), (7, 32), (3, 64), (5, 7), (6, 24)),
)


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


def check_two_steps(rule: oracle.Rule, p: torch.Tensor, grad: torch.Tensor, h: oracle.Hyper, where: str) -> None:
    """Two steps of one fp32 parameter by the same gradient, bit for bit."""
    state = oracle.State.zeros(tuple(p.shape), rule)
    codes = [torch.from_numpy(c.copy()) for c in state.codes]
    scales = [torch.from_numpy(s.copy()) for s in state.scales]
    for count in (1, 2):
        expected, state = oracle.step(rule, p.numpy(), grad.numpy(), state, h, count)
        call(rule, [p], [grad], [(codes, scales)], h, [torch.tensor(float(count))])
        assert same(p, torch.from_numpy(expected)), f"{where}, step {count}: parameter"
        for i in range(len(codes)):
            assert same(codes[i], torch.from_numpy(state.codes[i])), f"{where}, step {count}: codes of moment {i}"
            assert same(scales[i], torch.from_numpy(state.scales[i])), f"{where}, step {count}: scales of moment {i}"


EXTREME_SHAPES = ((4, 300), (64, 8), (66, 2), (9, 16), (10, 12))
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-30, 1e-20, 3e38, -3.4e38, 1.0, float("inf"), float("nan"))


def check_extreme_values(rule: oracle.Rule, shape: tuple[int, int]) -> None:
    """Subnormal, tiny, huge and non-finite gradients and parameters; scales above 2**126."""
    special = torch.tensor(SPECIAL)
    generator = torch.Generator().manual_seed(0)
    h = oracle.Hyper(lr=1e-3, weight_decay=0.01, momentum=0.5)
    for top in range(2, len(special) + 1):
        grad = special[torch.randint(0, top, shape, generator=generator)]
        p = special[torch.randint(0, min(top, 10), shape, generator=generator)]
        check_two_steps(rule, p, grad, h, f"{rule} {shape}, first {top} of SPECIAL")


def check_lone_values(rule: oracle.Rule) -> None:
    """Rows with one gradient apart: not finite, or so large that others leave the least code (zeros leave none)."""
    generator = torch.Generator().manual_seed(2)
    lone = (float("nan"), float("inf"), -float("inf"), 3e38, 1e5, -1e5)
    shape = (2 * len(lone), 300)
    p = torch.randn(shape, generator=generator)
    grad = torch.randn(shape, generator=generator)
    grad[:, ::7] = 0.0
    for row in range(shape[0]):  # either vector of a pair, whole groups and what is left of a row
        grad[row, (5 + 37 * row) % shape[1]] = lone[row % len(lone)]
    h = oracle.Hyper(lr=1e-3, weight_decay=0.01, momentum=0.5)
    check_two_steps(rule, p, grad, h, f"{rule}, lone values")


def check_stochastic_rounding(dtype: torch.dtype, shape: tuple[int, int], decade: int) -> None:
    """From zero parameters, so that -gradient is what gets rounded; subnormal fp16 and overflow included."""
    generator = torch.Generator().manual_seed(decade)
    grad = torch.randn(shape, generator=generator) * 10.0**decade
    grad.flatten()[:6] = torch.tensor([0.0, 7e4, 65519.0, -65535.0, float("inf"), float("nan")])
    grad.flatten()[-120:-118] = torch.tensor([float("-inf"), float("nan")])  # behind whole vectors of finite ones
    p = torch.zeros(shape, dtype=dtype)
    seed, step, offset = -(2**62) + 12345, 7, 2**35 - 301  # the 64-bit counter carries inside
    state = oracle.State.zeros(shape, "sgd")
    codes, scales = ([torch.from_numpy(x[0].copy())] for x in (state.codes, state.scales))
    h = oracle.Hyper(lr=1.0, momentum=0.0)  # the buffer is the gradient
    call("sgd", [p], [grad], [(codes, scales)], h, [torch.tensor(float(step))], element_offsets=[offset], seed=seed)
    name = "bfloat16" if dtype == torch.bfloat16 else "float16"
    for i, x in enumerate((-grad).flatten().tolist()):
        expected = torch.tensor(oracle.round_stochastic(x, name, oracle.random_bits(offset + i, step, seed)))
        assert same(p.flatten()[i].float(), expected), f"{dtype} {shape}, element {i}: {x}"


def main() -> None:
    torch.set_num_threads(1)
    for rule in RULES:
        for shape in EXTREME_SHAPES:
            check_extreme_values(rule, shape)
        check_lone_values(rule)
    for dtype in (torch.bfloat16, torch.float16):
        for shape, decade in (((3, 301), -5), ((40, 8), 0), ((9, 20), 4)):
            check_stochastic_rounding(dtype, shape, decade)
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
