"""The raw ops: hypothesis against the oracle, lists, counters, opcheck, and errors by their text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import halfbyte.ops.optimizer as ops
from halfbyte import reference_optimizer as oracle
from halfbyte.optim.dynamic_map import row_blocks

_spec = importlib.util.spec_from_file_location("optimizer_grid", Path(__file__).with_name("grid.py"))
assert _spec is not None
assert _spec.loader is not None
grid = importlib.util.module_from_spec(_spec)
sys.modules["optimizer_grid"] = grid
_spec.loader.exec_module(grid)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def arguments(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    """Everything but the hyper-parameters of adamw8bit_step_ on one parameter."""
    rows, _, blocks = row_blocks(shape)
    return [
        [torch.randn(shape).to(dtype)],
        [torch.randn(shape).to(dtype)],
        [torch.full(shape, 127, dtype=torch.uint8)],
        [torch.zeros(rows, blocks)],
        [torch.zeros(shape, dtype=torch.uint8)],
        [torch.zeros(rows, blocks)],
        [torch.tensor(1.0)],
    ]


shapes = st.one_of(
    st.tuples(st.integers(0, 4), st.integers(0, 530)),
    st.tuples(st.integers(1, 40), st.integers(1, 20)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 150)),
    st.tuples(st.integers(0, 600)),
)
hypers = st.builds(
    oracle.Hyper,
    lr=st.floats(1e-6, 1.0),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.floats(0, 1),
    momentum=st.floats(0, 0.99),
    dampening=st.floats(0, 1),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    grad_scale=st.sampled_from([1.0, 3.0, 65536.0]),
)

# Parameters overflow; a weight decay that is 0 in float32 must not make NaN of them.
TINY_DECAY = oracle.Hyper(lr=1.0, beta1=0.5, beta2=0.0, weight_decay=1e-117)
# A weight that is subnormal in float32 is 0, whatever the scale that it is multiplied with.
TINY_BETA = oracle.Hyper(lr=1.0, beta1=1.5e-39, beta2=1.5e-39)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(grid.RULES), shapes, st.sampled_from(DTYPES), st.sampled_from(DTYPES), hypers)
@example("adam", (9,), torch.float16, torch.float32, TINY_DECAY)
@example("adamw", (3, 3), torch.float32, torch.float32, TINY_BETA)
@example("lion", (1, 9), torch.float32, torch.float32, TINY_BETA)
def test_equals_the_oracle(
    rule: oracle.Rule, shape: tuple[int, ...], param_dtype: torch.dtype, grad_dtype: torch.dtype, h: oracle.Hyper
) -> None:
    grid.check(rule, shape, param_dtype, grad_dtype, h)


@pytest.mark.parametrize("shape", grid.EXTREME_SHAPES)
@pytest.mark.parametrize("rule", grid.RULES)
def test_extreme_values_equal_the_oracle(rule: oracle.Rule, shape: tuple[int, int]) -> None:
    grid.check_extreme_values(rule, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("decade", [-7, -5, -3, 0, 4])
def test_stochastic_rounding_equals_the_oracle(dtype: torch.dtype, decade: int) -> None:
    grid.check_stochastic_rounding(dtype, (3, 301), decade)


def test_denormals_mode_is_restored() -> None:
    tiny = torch.tensor(1e-40)
    ops.adamw8bit_step_(*arguments((64, 300)), **HYPER)
    assert float(tiny * 1) == float(tiny) != 0


def test_lists_equal_single_calls_whatever_the_threads() -> None:
    """Tensors of very different sizes in one call, their own step counts, 1 to 5 threads."""
    sizes = [(3, 5), (700, 300), (0, 4), (1, 100_000), (300, 8), (40_000,), (1, 1)]
    torch.manual_seed(0)
    inputs = [arguments(shape, DTYPES[i % 3]) for i, shape in enumerate(sizes)]
    for i, one in enumerate(inputs):
        one[6][0].fill_(i + 1)
    expected = [[[t.clone() for t in column] for column in one] for one in inputs]
    for one in expected:
        ops.adamw8bit_step_(*one, **HYPER)
    previous = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            columns: list[list[torch.Tensor]] = [[] for _ in range(7)]
            for one in inputs:
                for column, entry in zip(columns, one, strict=True):
                    column.append(entry[0].clone())
            ops.adamw8bit_step_(*columns, **HYPER)
            for c, column in enumerate(columns):
                for i, got in enumerate(column):
                    assert torch.equal(got, expected[i][c][0])
    finally:
        torch.set_num_threads(previous)


def test_empty_lists_do_nothing() -> None:
    ops.adamw8bit_step_([], [], [], [], [], [], [], **HYPER)
    ops.lion8bit_step_([], [], [], [], [], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0)


def test_found_inf_writes_nothing() -> None:
    args = arguments((4, 300))
    before = [[t.clone() for t in column] for column in args]
    ops.adamw8bit_step_(*args, **HYPER, found_inf=torch.tensor(1.0))
    for column, old in zip(args, before, strict=True):
        assert torch.equal(column[0], old[0])
    ops.adamw8bit_step_(*args, **HYPER, found_inf=torch.tensor(0.0))
    assert not torch.equal(args[0][0], before[0][0])


def test_version_counters_of_everything_written() -> None:
    args = arguments((4, 300))
    weight = args[0][0].requires_grad_()
    product = (weight * weight).sum()
    versions = [column[0]._version for column in args]
    with torch.no_grad():
        ops.adamw8bit_step_(*args, **HYPER)
    assert [column[0]._version - old for column, old in zip(args, versions, strict=True)] == [1, 0, 1, 1, 1, 1, 0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_opcheck() -> None:
    args = arguments((4, 300))
    two, one = args, [*args[:4], args[6]]
    rest = {"lr": 0.1, "weight_decay": 0.1}
    for name in ("adamw8bit_step_", "adam8bit_step_"):
        torch.library.opcheck(getattr(torch.ops.halfbyte, name).default, tuple(two), HYPER)
    torch.library.opcheck(torch.ops.halfbyte.lion8bit_step_.default, tuple(one), {**rest, "beta1": 0.9, "beta2": 0.9})
    torch.library.opcheck(
        torch.ops.halfbyte.sgd8bit_step_.default,
        tuple(one),
        {**rest, "momentum": 0.9, "dampening": 0.0, "nesterov": True},
    )


def spoiled(column: int, value: torch.Tensor) -> list[list[torch.Tensor]]:
    args = arguments((4, 300))
    args[column] = [value]
    return args


@pytest.mark.parametrize(("args", "hyper", "text"), [
    (spoiled(0, torch.zeros(4, 300).double()), {}, "params must be float32, bfloat16 or float16, got float64"),
    (spoiled(0, torch.zeros(300, 4).t()), {}, r"params\[0\] must be contiguous, got shape \(4, 300\)"),
    (spoiled(1, torch.zeros(4, 300, dtype=torch.int32)), {}, "grads must be float32, bfloat16 or float16, got int32"),
    (spoiled(1, torch.zeros(4, 299)), {}, r"grads\[0\] must have params\[0\]'s shape \(4, 300\), got \(4, 299\)"),
    (spoiled(1, torch.zeros(300, 4).t()), {}, r"grads\[0\] must be contiguous"),
    (spoiled(2, torch.zeros(4, 300)), {}, r"codes\[0\] must be uint8, got float32"),
    (spoiled(2, torch.zeros(4, 301, dtype=torch.uint8)), {}, r"codes\[0\] must have params\[0\]'s shape"),
    (spoiled(3, torch.zeros(4, 1)), {}, r"scales\[0\] must have shape \(4, 2\) for a parameter of shape \(4, 300\)"),
    (spoiled(3, torch.zeros(8)), {}, r"scales\[0\] must have shape \(4, 2\)"),
    (spoiled(5, torch.zeros(4, 2, dtype=torch.float64)), {}, r"scales\[0\] must be float32, got float64"),
    (spoiled(6, torch.tensor(0.0)), {}, r"steps\[0\] must be the count of this step, from 1 to 2\^24, got 0"),
    (spoiled(6, torch.tensor(float("nan"))), {}, "got nan"),
    (spoiled(6, torch.tensor(1)), {}, "steps must be one float32, got int64"),
    (spoiled(6, torch.ones(2)), {}, r"steps must be one float32, got float32 of shape \(2,\)"),
    (arguments((4, 300)), {"beta1": 1.0}, "beta1 must be from 0 to below 1, got 1"),
    (arguments((4, 300)), {"eps": -1.0}, "eps must not be negative, got -1"),
    (arguments((4, 300)), {"weight_decay": -1.0}, "weight_decay must not be negative"),
    (arguments((4, 300)), {"found_inf": torch.zeros(2)}, "found_inf must be one float32"),
    (arguments((4, 300)), {"grad_scale": torch.zeros((), dtype=torch.float64)}, "grad_scale must be one float32"),
    (arguments((4, 300)), {"element_offsets": [1, 2]}, "element_offsets must be empty or have one entry per param"),
    (spoiled(0, torch.zeros(())), {}, r"grads\[0\] must have params\[0\]'s shape \(\)"),
])  # fmt: skip
def test_errors_name_the_argument(args: list[list[torch.Tensor]], hyper: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"halfbyte::adamw8bit_step_: .*{text}"):
        ops.adamw8bit_step_(*args, **{**HYPER, **hyper})


def test_list_lengths() -> None:
    args = arguments((4, 300))
    args[1] = []
    with pytest.raises(ValueError, match="grads must have one entry per parameter, 1, got 0"):
        ops.adamw8bit_step_(*args, **HYPER)
    args = arguments((4, 300))
    args[6] = [torch.tensor(1.0)] * 2
    with pytest.raises(ValueError, match="steps must have one entry for all parameters or one per parameter, 1, got 2"):
        ops.adamw8bit_step_(*args, **HYPER)
    with pytest.raises(TypeError, match="every list must hold tensors only, got NoneType"):
        ops.adamw8bit_step_([None], *arguments((4, 300))[1:], **HYPER)  # type: ignore[list-item]


ROWS = 70  # one group and some of the shortest rows with AVX-512


@pytest.mark.parametrize("rule", grid.RULES)
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_short_rows_in_groups_are_as_alone(rule: oracle.Rule, width: int) -> None:
    """Zeros, NaN, Inf, the smallest and the largest numbers in some of the rows that one pass takes together."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        param = torch.randn(ROWS, width, generator=generator).to(dtype)
        grad = grid.gradient((ROWS, width), dtype, generator)
        largest = torch.finfo(dtype).max
        for row, value in enumerate((0.0, None, float("nan"), None, None, float("inf"), largest, 1e-38, None, None, 0.0)):
            if value is not None:
                grad[row] = value
        state = oracle.State.zeros((ROWS, width), rule)
        codes = [torch.from_numpy(c.copy()) for c in state.codes]
        scales = [torch.from_numpy(s.copy()) for s in state.scales]
        apart = [
            (param[i : i + 1].clone(), [c[i : i + 1].clone() for c in codes], [s[i : i + 1].clone() for s in scales])
            for i in range(ROWS)
        ]
        for count in (1.0, 2.0):
            steps, h = [torch.tensor(count)], oracle.Hyper(lr=1e-2, weight_decay=0.1, momentum=0.9)
            grid.call(rule, [param], [grad], [(codes, scales)], h, steps, seed=5)
            for i, (p, c, s) in enumerate(apart):
                offset = [i * width]
                grid.call(rule, [p], [grad[i : i + 1].clone()], [(c, s)], h, steps, seed=5, element_offsets=offset)
        for i, (p, c, s) in enumerate(apart):
            assert grid.same(param[i : i + 1], p)
            assert all(torch.equal(a[i : i + 1], b) for a, b in zip(codes, c, strict=True))
            assert all(grid.same(a[i : i + 1], b) for a, b in zip(scales, s, strict=True))
