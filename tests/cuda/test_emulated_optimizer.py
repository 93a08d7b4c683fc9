"""The optimizer kernel of csrc/cuda, run on the CPU, against the CPU ops and the oracle: bit for bit."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte import reference_optimizer as oracle

RULES = {"adamw": 0, "adam": 1, "lion": 2, "sgd": 3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Rows narrower than a warp's 256 elements (several rows a warp), ragged last blocks, 1-D, single elements, whole blocks.
# The last one is a bf16 matrix with bf16 gradients and whole blocks only, which takes a way of its own.
SHAPES = [(64, 16), (33, 8), (9, 1), (7, 100), (5, 128), (3, 576), (2, 257), (1000,), (1, 1), (4, 2, 96), (6, 512)]
SHAPES += [(0, 16), (3, 40), (5, 768)]


def state(shape: tuple[int, ...], two: bool, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Random codes and scales of every kind: normal, zero, tiny, NaN, negative, with a subnormal reciprocal."""
    rows, _, blocks = oracle.num_blocks(shape)
    moments = []
    for _ in range(2 if two else 1):
        scales = torch.rand(rows, blocks, generator=generator) * 10.0 ** torch.randint(
            -12, 3, (rows, blocks), generator=generator
        )
        if rows > 2:
            scales[1, 0], scales[2, -1] = 0.0, float("nan")
        if rows > 4:
            scales[3, 0], scales[4, -1] = -scales[3, 0], 2e38
        moments.append((torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8), scales))
    return moments


class Problem:
    """A list of parameters with gradients and state, and both ways of stepping it."""

    def __init__(self, rule: str, shapes: list[tuple[int, ...]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rule = rule
        self.params, self.grads, self.state = [], [], []
        for i, shape in enumerate(shapes):
            self.params.append(torch.randn(shape, generator=generator).to(DTYPES[i % 3]))
            grad = torch.randn(shape, generator=generator) * 10.0 ** (i % 5 - 3)
            if grad.numel() > 900:
                grad.view(-1)[5] = float("inf")
            self.grads.append(grad.to(DTYPES[(i // 3) % 3]))
            self.state.append(state(shape, rule in ("adamw", "adam"), generator))
        self.offsets = [7 * i for i in range(len(shapes))]
        self.hyper = {
            "lr": 3e-3,
            "beta1": 0.9,
            "beta2": 0.99,
            "eps": 1e-8,
            "weight_decay": 0.02,
            "momentum": 0.8,
            "dampening": 0.1,
        }

    def copy(self) -> Problem:
        other = object.__new__(Problem)
        other.__dict__ = dict(self.__dict__)
        other.params = [p.clone() for p in self.params]
        other.state = [[(c.clone(), s.clone()) for c, s in moments] for moments in self.state]
        return other

    def step_cpu(self, step: float, **kwargs: Any) -> None:
        """The CPU op."""
        h = {
            k: v
            for k, v in self.hyper.items()
            if k
            in {
                "adamw": {"lr", "beta1", "beta2", "eps", "weight_decay"},
                "adam": {"lr", "beta1", "beta2", "eps", "weight_decay"},
                "lion": {"lr", "beta1", "beta2", "weight_decay"},
                "sgd": {"lr", "weight_decay", "momentum", "dampening"},
            }[self.rule]
        }
        if self.rule == "sgd":
            h["nesterov"] = kwargs.pop("nesterov", False)
        lists = [[m[i][j] for m in self.state] for i in range(len(self.state[0])) for j in range(2)]
        op = getattr(torch.ops.halfbyte, f"{self.rule}8bit_step_")
        op(self.params, self.grads, *lists, [torch.tensor(step)], element_offsets=self.offsets, **h, **kwargs)

    def step_emulated(
        self,
        emulated: Any,
        step: float,
        seed: int | None = None,
        nesterov: bool = False,
        maximize: bool = False,
        lr_tensor: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> int:
        """The CUDA kernel; returns the number of launches."""
        count = len(self.params)

        def pointers(tensors: list[Tensor]) -> Any:
            return (ctypes.c_void_p * count)(*[t.data_ptr() for t in tensors])

        def ints(values: list[int], kind: Any = ctypes.c_int64) -> Any:
            return (kind * count)(*values)

        shapes = [oracle.num_blocks(tuple(p.shape)) for p in self.params]
        moments = [[m[i][j] for m in self.state] for i in range(len(self.state[0])) for j in range(2)]
        states = [pointers(m) for m in moments] + [None] * (4 - len(moments))
        step_tensor = torch.tensor(step)
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening")
        flags = (seed is not None) * 1 + nesterov * 2 + maximize * 4
        scalars = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (lr_tensor, grad_scale, found_inf)]
        status = emulated.c.emulated_optimizer(
            RULES[self.rule],
            ctypes.c_int64(count),
            pointers(self.params),
            ints([DTYPE_IDS[p.dtype] for p in self.params], ctypes.c_int),
            pointers(self.grads),
            ints([DTYPE_IDS[g.dtype] for g in self.grads], ctypes.c_int),
            *states,
            ints([s[0] for s in shapes]),
            ints([s[1] for s in shapes]),
            ints(self.offsets),
            ctypes.c_void_p(step_tensor.data_ptr()),
            (ctypes.c_double * 7)(*[self.hyper[n] for n in names]),
            ctypes.c_int64(seed or 0),
            flags,
            *scalars,
        )
        if status > 0:
            raise RuntimeError(f"CUDA error {status}")
        return -status

    def assert_equal(self, other: Problem) -> None:
        for i, (p, q) in enumerate(zip(self.params, other.params, strict=True)):
            assert torch.equal(p.isnan(), q.isnan()), i
            assert torch.equal(p.nan_to_num(0.5), q.nan_to_num(0.5)), (i, p.shape, p.dtype)
            for (c, s), (d, t) in zip(self.state[i], other.state[i], strict=True):
                assert torch.equal(c, d), (i, p.shape)
                assert torch.equal(s.isnan(), t.isnan()), i
                assert torch.equal(s.nan_to_num(0.5), t.nan_to_num(0.5)), i


@pytest.mark.parametrize("rule", RULES)
def test_step_equals_the_cpu_op(emulated: Any, rule: str) -> None:
    ours = Problem(rule, SHAPES)
    theirs = ours.copy()
    for step in (1.0, 2.0, 3.0, 1000.0):
        assert ours.step_emulated(emulated, step) == 1
        theirs.step_cpu(step)
        ours.assert_equal(theirs)


@pytest.mark.parametrize("rule", RULES)
def test_stochastic_rounding_equals_the_cpu_op(emulated: Any, rule: str) -> None:
    ours = Problem(rule, SHAPES, seed=1)
    theirs = ours.copy()
    for step in (1.0, 2.0):
        ours.step_emulated(emulated, step, seed=-5)
        theirs.step_cpu(step, seed=-5)
        ours.assert_equal(theirs)


def test_values_read_on_the_device_equal_the_cpu_op(emulated: Any) -> None:
    ours = Problem("sgd", SHAPES, seed=2)
    theirs = ours.copy()
    inputs = {"lr_tensor": torch.tensor(0.25), "grad_scale": torch.tensor(3.0), "found_inf": torch.tensor(0.0)}
    ours.step_emulated(emulated, 2.0, nesterov=True, maximize=True, **inputs)
    theirs.step_cpu(2.0, nesterov=True, maximize=True, **inputs)
    ours.assert_equal(theirs)


def test_found_inf_writes_nothing(emulated: Any) -> None:
    ours = Problem("adamw", SHAPES)
    before = ours.copy()
    ours.step_emulated(emulated, 1.0, found_inf=torch.tensor(1.0))
    ours.assert_equal(before)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), 2.0**25])
def test_bad_step_counts_stop_the_kernel(emulated: Any, step: float) -> None:
    with pytest.raises(RuntimeError, match="CUDA error 710"):  # cudaErrorAssert
        Problem("lion", [(8, 16)]).step_emulated(emulated, step)


def test_long_lists_take_a_launch_per_336_tensors(emulated: Any) -> None:
    ours = Problem("adamw", [(3, 16), (2, 40)] * 224)
    theirs = ours.copy()
    assert ours.step_emulated(emulated, 1.0) == 2
    theirs.step_cpu(1.0)
    ours.assert_equal(theirs)


def test_the_order_of_threads_does_not_matter(emulated: Any) -> None:
    ours = Problem("adam", SHAPES, seed=3)
    theirs = ours.copy()
    ours.step_emulated(emulated, 5.0)
    emulated.reversed_threads(True)
    try:
        theirs.step_emulated(emulated, 5.0)
    finally:
        emulated.reversed_threads(False)
    ours.assert_equal(theirs)


def tables(emulated: Any, shapes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    out = np.zeros((64, 3), dtype=np.int64)
    rows, lengths = (np.array(column, dtype=np.int64) for column in zip(*shapes, strict=True))
    emulated.c.optimizer_tables.restype = ctypes.c_int64
    arrays = [ctypes.c_void_p(a.ctypes.data) for a in (rows, lengths, out)]
    count = emulated.c.optimizer_tables(ctypes.c_int64(len(shapes)), *arrays, ctypes.c_int64(64))
    return [tuple(map(int, row)) for row in out[:count]]


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1)],
        [(4096, 4096)] * 1000,
        [(2**33, 16)],
        [(2**40, 1), (5, 5)],
        [(3, 2**37)],
        [(1, 2**38 - 256)],
        [(0, 16), (16, 0), (1, 1)],
    ],
)
def test_tables_cover_huge_lists(emulated: Any, shapes: list[tuple[int, int]]) -> None:
    parts = tables(emulated, shapes)
    assert sum(blocks for _, _, blocks in parts) == sum(n * -(-k // 256) for n, k in shapes)
    assert all(entries <= 336 and tasks < 2**31 for entries, tasks, _ in parts)


@pytest.mark.parametrize("signed", [True, False])
def test_moment_encoder_equals_the_oracle(emulated: Any, signed: bool) -> None:
    """All codebook values and midpoints with their neighbours, and 10^5 random floats."""
    values = oracle.dynamic_map(signed).astype(np.float64)
    special = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    around = (special.view(np.int32)[:, None] + np.arange(-6, 7, dtype=np.int32)).reshape(-1).view(np.float32)
    random = np.random.default_rng(0).uniform(-1 if signed else 0, 1, 50_000) * 10.0 ** np.random.default_rng(1).uniform(
        -9, 0, 50_000
    )
    x = np.concatenate([around, random.astype(np.float32)])
    x = oracle.flush(np.ascontiguousarray(x[(np.abs(x) <= 1) & ~np.isnan(x)]))
    codes = np.zeros(len(x), dtype=np.uint8)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, codes)]
    emulated.c.encode_moments(pointers[0], ctypes.c_int64(len(x)), int(signed), pointers[1])
    expected = oracle.nearest_code(x, signed)
    wrong = np.flatnonzero(codes != expected)
    assert len(wrong) == 0, (x[wrong[:5]], codes[wrong[:5]], expected[wrong[:5]])
