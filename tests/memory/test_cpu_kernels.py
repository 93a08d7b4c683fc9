"""What a plan says of products on the CPU (halfbyte/memory/cpu_kernels.py) against the workspace and torch's profiler."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfbyte.formats import Format
from halfbyte.memory.cpu_kernels import cpu_memory
from halfbyte.memory.tracker import StorageTracker
from halfbyte.testing import random_packed

OPS = torch.ops.halfbyte
ROOT = Path(__file__).parents[2]
TOKENS = (1, 3, 4, 7, 20, 64, 130, 513, 2000)
SHAPES = ((192, 576), (64, 100), (1536, 576))
RANK = 8


def allocated(call: Callable[[], object]) -> int:
    """Most bytes of torch's CPU allocator at any moment of a call, above those before it."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    changes = []
    pending = list(recorded.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(itertools.accumulate(size for _, size in sorted(changes)), default=0)


def products(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of every op, nf4 where the format is free."""
    format = Format.parse("nf4")
    packed, sizes = random_packed(format, rows, columns), (format.id, format.block_size, columns)
    x, grad = torch.randn(tokens, columns).to(dtype), torch.randn(tokens, rows).to(dtype)
    int8, fp8 = (random_packed(Format.parse(name), rows, columns) for name in ("int8", "fp8"))
    return {
        "linear": (x, packed, None, *sizes),
        "linear_backward_input": (grad, packed, *sizes),
        "int8_linear": (x, int8, None, columns),
        "fp8_linear": (x, fp8, None, columns),
    }


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_call_takes_what_is_planned(rows: int, columns: int, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        for name, arguments in products(tokens, rows, columns, dtype).items():
            op, planned = getattr(OPS, name), cpu_memory(f"halfbyte.{name}.default", arguments)
            OPS.clear_workspace()
            took = allocated(lambda op=op, arguments=arguments: op(*arguments))
            result = tokens * (columns if name == "linear_backward_input" else rows) * dtype.itemsize
            assert planned == (OPS.workspace_bytes(), took - result), (name, tokens)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_keep_what_is_planned_for_each(dtype: torch.dtype) -> None:
    for (rows, columns), tokens in itertools.product(SHAPES, TOKENS):
        for name, arguments in products(tokens, rows, columns, dtype).items():
            planned = cpu_memory(f"halfbyte.{name}.default", arguments)
            assert planned is not None
            OPS.clear_workspace()
            getattr(OPS, name)(*arguments)
            assert OPS.workspace_bytes() in (planned[0], 2 * planned[0]), (name, tokens)


def shared_bytes(tokens: int, rows: int, columns: int) -> int:
    """Of tokens that int8_linear prepares for the whole call: what a thread prepares for itself lies in its scratch."""
    arguments = products(tokens, rows, columns, torch.float32)["int8_linear"]
    planned = cpu_memory("halfbyte.int8_linear.default", arguments)
    assert planned is not None
    return planned[1]


@pytest.mark.usefixtures("two_threads")
def test_two_threads_share_out_tokens_of_narrow_layers_and_rows_of_wide_ones() -> None:
    assert shared_bytes(128, 192, 576) == 0
    assert shared_bytes(64, 4096, 4096) >= 64 * 4096


@pytest.mark.usefixtures("one_thread")
def test_one_thread_prepares_all_tokens_for_the_call() -> None:
    assert shared_bytes(128, 192, 576) >= 128 * 576


FIRST_CALLS = """
import json
import threading
import torch
from halfbyte.testing import random_packed
from halfbyte.formats import Format
from halfbyte.memory.cpu_kernels import cpu_memory

OPS, format, taken = torch.ops.halfbyte, Format.parse("nf4"), []
ROWS, COLUMNS = 96, 64

def first_call(name, tokens, dtype):  # of a thread whose pool of workers is new
    inputs = torch.randn(tokens, COLUMNS if name == "linear" else ROWS).to(dtype)
    packed = random_packed(format, ROWS, COLUMNS)
    arguments = inputs, packed, *[None] * (name == "linear"), format.id, format.block_size, COLUMNS
    planned, _ = cpu_memory(f"halfbyte.{name}.default", arguments)
    getattr(OPS, name)(*arguments)
    taken.append((name, tokens, str(dtype), planned, OPS.workspace_bytes()))

for name in ("linear", "linear_backward_input"):
    for tokens in (64, 256, 512):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            OPS.clear_workspace()
            thread = threading.Thread(target=first_call, args=(name, tokens, dtype))
            thread.start()
            thread.join()
print(json.dumps([torch.get_num_threads(), taken]))
"""


def test_first_calls_keep_what_is_planned_for_each_thread() -> None:
    """Nobody has called torch.set_num_threads there: a new worker that asks torch for the number of threads is told 1."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FIRST_CALLS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    threads, taken = json.loads(done.stdout.splitlines()[-1])
    assert threads == 2
    assert len(taken) == 18
    for name, tokens, dtype, planned, kept in taken:
        assert kept in (planned, 2 * planned), (name, tokens, dtype)


@pytest.mark.usefixtures("one_thread")
def test_lora_takes_what_is_planned_and_its_own_matrices() -> None:
    """Of the branch, what is left out, in float32 and whole vectors: A, B, x A^T, what is made of them, and 64 rows more."""
    for (rows, columns), tokens in itertools.product(SHAPES, (3, 130, 600)):
        x, packed, _, *sizes = products(tokens, rows, columns, torch.bfloat16)["linear"]
        down, up = torch.randn(RANK, columns).bfloat16(), torch.randn(rows, RANK).bfloat16()
        low = torch.randn(tokens, RANK).bfloat16()
        grad = torch.randn(tokens, rows).bfloat16()
        calls: dict[str, tuple[Any, ...]] = {
            "lora_linear": (x, packed, None, down, up, 1.0, [], *sizes),
            "lora_linear_backward_input": (grad, packed, low, down, *sizes),
        }
        for name, arguments in calls.items():
            planned = cpu_memory(f"halfbyte.{name}.default", arguments)
            assert planned is not None
            OPS.clear_workspace()
            took = allocated(lambda name=name, arguments=arguments: getattr(OPS, name)(*arguments))
            result = tokens * (rows if name == "lora_linear" else columns) * 2
            branch = 2 * 4 * (rows + columns + 2 * tokens + 64 + 512) * 16
            assert OPS.workspace_bytes() == planned[0], (name, tokens)
            assert planned[1] <= took - result <= planned[1] + branch, (name, tokens)


def test_a_masked_branch_is_added_afterwards() -> None:
    grad, packed, *sizes = products(64, 192, 576, torch.float32)["linear_backward_input"]
    low, down = torch.randn(64, 256), torch.randn(256, 576)  # so many that the scratch holds more for them
    mask = torch.zeros(64, 72, dtype=torch.uint8)
    plain = cpu_memory("halfbyte.linear_backward_input.default", (grad, packed, *sizes))
    name = "halfbyte.lora_linear_backward_input.default"
    assert cpu_memory(name, (grad, packed, low, down, *sizes, mask)) == plain
    assert cpu_memory(name, (grad, packed, low, down, *sizes, None)) != plain


def test_other_ops_are_no_products() -> None:
    assert cpu_memory("halfbyte.dequantize.default", ()) is None


def test_the_tracker_keeps_the_largest_and_counts_temporaries_during_the_call() -> None:
    arguments: list[tuple[Tensor, ...]] = [products(m, 192, 576, torch.float32)["linear"] for m in (20, 2000, 3)]
    planned = [cpu_memory("halfbyte.linear.default", each) or (0, 0) for each in arguments]
    tracker = StorageTracker()
    outputs = []
    with tracker:
        for each in arguments:
            outputs.append(OPS.linear(*each))
    assert tracker.kept == max(kept for kept, _ in planned) > 0
    sizes = [output.nbytes for output in outputs]
    assert tracker.peak == max(sum(sizes[: i + 1]) + temporary for i, (_, temporary) in enumerate(planned))


def test_on_other_instruction_sets(other_isa: Any) -> None:
    other_isa.tests("tests/memory/test_cpu_kernels.py", "planned")
