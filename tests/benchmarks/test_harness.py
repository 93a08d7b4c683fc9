"""benchmarks/harness.py: the order of turns, what of them is timed, and what a case is called with."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness", ROOT / "benchmarks" / "harness.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module
    spec.loader.exec_module(module)
    return module


def test_turns(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A B B A in turns: one call that is not timed, then 5, or what fits 50 ms; the number of the call never repeats."""
    calls: list[tuple[str, int]] = [("", 0)]
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now, sleep=lambda seconds: None)
    monkeypatch.setattr(harness, "time", clock)

    def quick(i: int) -> None:
        nonlocal now
        now += 0.001 if calls[-1][0] == "quick" else 0.1  # what a case would pay after another one
        calls.append(("quick", i))

    def slow(i: int) -> None:
        nonlocal now
        now += 0.0625
        calls.append(("slow", i))

    timings = harness.interleave({"quick": harness.Case(quick), "slow": harness.Case(slow)}, rounds=4, seconds=60)
    once = ["quick", "slow"]
    turns = {"quick": ["quick"] * 6, "slow": ["slow"] * 2}
    order = once + (turns["quick"] + turns["slow"] + turns["slow"] + turns["quick"]) * 2
    assert [name for name, _ in calls[1:]] == order
    for name in once:
        numbers = [i for other, i in calls[1:] if other == name]
        assert numbers == list(range(len(numbers)))
    assert (timings["quick"].samples, timings["slow"].samples) == (20, 4)
    assert timings["quick"].high == pytest.approx(0.001)
    assert timings["slow"].best == pytest.approx(0.0625)


def test_seconds_end_a_comparison_after_three_rounds(harness: ModuleType) -> None:
    calls: list[int] = []
    timings = harness.interleave({"only": harness.Case(calls.append)}, rounds=1000, seconds=0.0)
    assert timings["only"].samples == 3 * harness.TURN_CALLS
    assert calls == list(range(1 + 3 * (1 + harness.TURN_CALLS)))


def test_turns_in_which_a_host_took_time_are_not_quiet(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10, 10, 11, 13, 13, 13])  # before and after each of three turns: the second one lost time
    monkeypatch.setattr(harness, "_stolen", lambda: next(ticks))
    monkeypatch.setattr(harness, "_runnable", lambda: 1)
    timings = harness.interleave({"only": harness.Case(lambda i: None)}, rounds=3)
    assert timings["only"].samples == 3 * harness.TURN_CALLS
    assert timings["only"].quiet == 2 * harness.TURN_CALLS


def test_the_write_floor_writes_what_outputs_are_like(harness: ModuleType) -> None:
    """Every line another, and hardly a zero: some CPUs write lines of zeros several times as fast."""
    library, target = harness._Floors.library(), harness.aligned(1 << 14, torch.uint8).zero_()
    library.floor_write(ctypes.c_void_p(target.data_ptr()), ctypes.c_int64(1 << 14), ctypes.c_int(1))
    lines = target.view(-1, 64)
    assert len(lines.unique(dim=0)) == len(lines)
    assert (lines == 0).float().mean() < 0.02
    assert (lines.view(torch.int64) != 0).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_matrix_product_is_faster_than_the_products_floor(harness: ModuleType, dtype: str) -> None:
    """Sums that a compiler keeps in memory would halve the floor's rate, and flatter every kernel."""
    dense = torch.randn(512, 512, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        floor = harness._Floors.case(f"{dtype} products", 512**3)
        cases = {"product": harness.Case(lambda _: dense @ dense), "floor": floor}
        timings = harness.interleave(cases, rounds=12)
    finally:
        torch.set_num_threads(threads)
    assert timings["floor"].best < 1.1 * timings["product"].best
