"""Calls of linear and linear_backward_input on the CPU: shapes, errors, what they keep between calls, threads at once."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from .oracle import DTYPES, FP4, FP4_DQ, FP8, INT8, NF4, NF4_DQ, assert_within, make, ops, tokens_like


def test_shapes_strides_and_empties() -> None:
    K, rows = 100, 9
    packed, weight = make(rows, K, NF4, 64)
    x = tokens_like((2, 3, K), torch.float32)
    assert ops.linear(x, packed, None, NF4, 64, K).shape == (2, 3, rows)
    assert ops.linear(x[0, 0], packed, None, NF4, 64, K).shape == (rows,)
    assert ops.linear(x[:0], packed, None, NF4, 64, K).shape == (0, 3, rows)
    assert ops.linear(x, packed[:0], None, NF4, 64, K).shape == (2, 3, 0)
    assert ops.linear_backward_input(x[..., :rows], packed, NF4, 64, K).shape == (2, 3, K)
    assert torch.equal(ops.linear_backward_input(x[..., :0], packed[:0], NF4, 64, K), torch.zeros(2, 3, K))
    strided = tokens_like((K, 6), torch.float32).T
    assert_within(ops.linear(strided, packed[::2], None, NF4, 64, K), strided, weight[::2].T)
    spread = torch.zeros(rows, 2 * packed.shape[1], dtype=torch.uint8)
    spread[:, 1 : 1 + packed.shape[1]] = packed
    assert_within(ops.linear(strided, spread[:, 1 : 1 + packed.shape[1]], None, NF4, 64, K), strided, weight.T)
    one_off = torch.cat([torch.zeros(1, dtype=torch.uint8), packed.flatten()])[1:].view_as(packed)  # no alignment at all
    bias = tokens_like((2 * rows,), torch.float32)[::2]
    assert_within(ops.linear(strided, one_off, bias, NF4, 64, K), strided, weight.T, bias)


def test_raw_ops_record_nothing_inside() -> None:
    """A kernel that calls aten with grad mode on would add its own nodes to the graph of the registered formula."""
    packed, weight = make(8, 64, NF4, 64)
    x = tokens_like((64, 5), torch.float32).T.requires_grad_()  # not contiguous: the kernel copies it
    grad = tokens_like((5, 8), torch.float32)
    ops.linear(x, packed, None, NF4, 64, 64).backward(grad)
    assert x.grad is not None
    assert_within(x.grad, grad, weight)
    g = tokens_like((8, 5), torch.float32).T.requires_grad_()
    ops.linear_backward_input(g, packed, NF4, 64, 64).backward(x.detach())
    assert g.grad is not None
    assert_within(g.grad, x.detach(), weight.T)
    assert torch.is_grad_enabled()


def test_errors_name_the_argument() -> None:
    packed, _ = make(8, 64, NF4, 64)
    x = tokens_like((2, 64), torch.float32)
    with pytest.raises(ValueError, match=r"linear: input's last dimension must be in_features=64, got shape \(2, 32\)"):
        ops.linear(x[:, :32], packed, None, NF4, 64, 64)
    with pytest.raises(ValueError, match=r"halfbyte::linear: bias must have shape \(8,\), got \(9,\)"):
        ops.linear(x, packed, torch.zeros(9), NF4, 64, 64)
    with pytest.raises(ValueError, match="bias must have input's dtype float32, got bfloat16"):
        ops.linear(x, packed, torch.zeros(8, dtype=torch.bfloat16), NF4, 64, 64)
    with pytest.raises(ValueError, match="was it quantized with another format"):
        ops.linear(x, packed, None, INT8, 0, 64)
    with pytest.raises(ValueError, match="grad_output's last dimension must be out_features=8"):
        ops.linear_backward_input(x, packed, NF4, 64, 64)
    with pytest.raises(ValueError, match="input must be float32, bfloat16 or float16, got float64"):
        ops.linear(x.double(), packed, None, NF4, 64, 64)


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def test_workspace_is_bounded_and_released() -> None:
    ops.clear_workspace()
    assert ops.workspace_bytes() == 0
    K, copies = 1024, 64
    packed, _ = make(256, K, NF4, 64)
    packed = packed.repeat(copies, 1)  # 16384 rows: 64 MiB as fp32
    x, grad = tokens_like((8, K), torch.float32), tokens_like((8, 256 * copies), torch.float32)
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM = what is resident now
        before = _peak_kib()
    for _ in range(2):
        for tokens in (1, 8, 40):
            ops.linear(x[:1].expand(tokens, K), packed, None, NF4, 64, K)
            ops.linear_backward_input(grad[:1].expand(tokens, -1), packed, NF4, 64, K)
    many = tokens_like((512, K), torch.float32)  # 2 threads keep what they prepare: 256 tokens, 1 MiB, backward less
    ops.linear_backward_input(ops.linear(many, packed[:256], None, NF4, 64, K), packed[:256], NF4, 64, K)
    kept = ops.workspace_bytes()
    assert 0 < kept <= torch.get_num_threads() * 4 * 2**20
    if Path("/proc/self/clear_refs").exists():
        assert _peak_kib() - before < 32 * 1024, "a dense weight would be 64 MiB"
    ops.clear_workspace()
    assert ops.workspace_bytes() == 0
    assert ops.linear(x, packed, None, NF4, 64, K).isfinite().all()


def test_concurrent_calls_and_clears() -> None:
    K, rows = 300, 120
    packed, _ = make(rows, K, NF4, 64)
    x = tokens_like((40, K), torch.float32)
    expected = ops.linear(x, packed, None, NF4, 64, K)
    wrong: list[str] = []
    done = threading.Event()

    def call() -> None:
        for _ in range(30):
            if not torch.equal(ops.linear(x, packed, None, NF4, 64, K), expected):
                wrong.append("differs")

    def clear() -> None:
        while not done.is_set():
            ops.clear_workspace()

    callers = [threading.Thread(target=call) for _ in range(3)]
    clearer = threading.Thread(target=clear)
    for thread in (*callers, clearer):
        thread.start()
    for thread in callers:
        thread.join()
    done.set()
    clearer.join()
    assert not wrong
    ops.clear_workspace()
    assert ops.workspace_bytes() == 0  # ended threads took theirs along


@contextmanager
def where_memory_ends(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """A copy of `matrix` (uint8) whose last byte lies before a page that may not be read."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    before = -(-matrix.numel() // page) * page
    memory = mmap.mmap(-1, before + page)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + before
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=matrix.numel(), offset=before - matrix.numel())
    copy.copy_(matrix.flatten())
    assert libc.mprotect(end, page, 0) == 0  # PROT_NONE
    yield copy.view_as(matrix)
    assert libc.mprotect(end, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("K", [1, 64, 129, 192, 576, 1057, 4225])
@pytest.mark.parametrize(
    ("format", "block_size"),
    [(NF4, 32), (NF4, 64), (FP4, 128), (NF4, 4096), (NF4_DQ, 32), (FP4_DQ, 64), (INT8, 0), (FP8, 0)],
)
def test_what_follows_a_weight_is_not_read(format: int, block_size: int, K: int) -> None:
    """Not past its memory, which would end this process; nor is what lies there (a scale of NaN) part of any result."""
    rows = 21
    packed, _ = make(rows, K, format, block_size)
    followed = torch.cat([packed, torch.full_like(packed, 0xFF)])[:rows]
    with where_memory_ends(packed) as last:
        for M in (1, 4, 9, 40, 515):
            for dtype in DTYPES:
                x, grad = tokens_like((M, K), dtype), tokens_like((M, rows), dtype)
                output, back = (
                    ops.linear(x, last, None, format, block_size, K),
                    ops.linear_backward_input(grad, last, format, block_size, K),
                )
                assert output.isfinite().all() and back.isfinite().all()
                assert torch.equal(output, ops.linear(x, followed, None, format, block_size, K))
                assert torch.equal(back, ops.linear_backward_input(grad, followed, format, block_size, K))


def test_everything_here_under_another_isa(other_isa: Any) -> None:
    other_isa.tests(__file__)
