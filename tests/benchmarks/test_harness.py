"""benchmarks/harness.py, timing.py, floors.py: the order of turns, what of them is timed, what a case is called with."""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]


def benchmark_module(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    return benchmark_module("harness")


@pytest.fixture(scope="module")
def timing() -> ModuleType:
    return benchmark_module("timing")


@pytest.fixture(scope="module")
def floors() -> ModuleType:
    return benchmark_module("floors")


@pytest.fixture(autouse=True)
def emptied(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each time that caches would have been emptied."""
    times: list[None] = []
    monkeypatch.setattr(timing, "empty_caches", lambda: times.append(None))
    return times


def test_no_case_finds_in_a_cache_what_a_call_has_read(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch, emptied: list[None]
) -> None:
    """Neither its own calls nor those of another one on the same buffers, between two times that caches are emptied."""
    monkeypatch.setattr(timing, "last_level_cache", lambda: 1 << 20)
    assert [len(timing.rotate(lambda i: i, size)) for size in (1, 1 << 16, 1 << 19, 1 << 30)] == [2 * timing.CALLS, 33, 5, 2]
    small = timing.rotate(lambda i: i, 1)
    read: list[list[int]] = []
    monkeypatch.setattr(timing, "empty_caches", lambda: (emptied.append(None), read.append([])))

    def reads(item: Callable[[int], int]) -> Callable[[int], None]:
        return lambda i: read[-1].append(item(i)) if read else None

    cases = {"one": timing.Case(reads(lambda i: small[i])), "other": timing.Case(reads(small.apart))}
    timing.interleave(cases, rounds=2 * timing.ROUNDS, seconds=60)
    assert len(emptied) == 2
    for calls in read:
        assert len(calls) == len(set(calls)) == 2 * timing.ROUNDS * (1 + timing.TURN_CALLS)


def test_emptying_reads_more_than_a_cache_holds(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "last_level_cache", lambda: 1 << 20)
    timing._other_data.cache_clear()
    assert timing._other_data().nbytes == 2 << 20
    timing._other_data.cache_clear()


def test_turns(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A B B A in turns: one call that is not timed, then 5, or what fits 50 ms; the number of the call never repeats."""
    calls: list[tuple[str, int]] = [("", 0)]
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now, sleep=lambda seconds: None)
    monkeypatch.setattr(timing, "time", clock)

    def quick(i: int) -> None:
        nonlocal now
        now += 0.001 if calls[-1][0] == "quick" else 0.1  # what a case would pay after another one
        calls.append(("quick", i))

    def slow(i: int) -> None:
        nonlocal now
        now += 0.0625
        calls.append(("slow", i))

    cases = {"quick": timing.Case(quick), "slow": timing.Case(slow, times=4)}
    timings = timing.interleave(cases, rounds=4, seconds=60)
    once = ["quick", "slow"]
    turns = {"quick": ["quick"] * 6, "slow": ["slow"] * 2}
    order = once + (turns["quick"] + turns["slow"] + turns["slow"] + turns["quick"]) * 2
    assert [name for name, _ in calls[1:]] == order
    for name in once:
        numbers = [i for other, i in calls[1:] if other == name]
        assert numbers == list(range(len(numbers)))
    assert (timings["quick"].samples, timings["slow"].samples) == (20, 4)
    assert timings["quick"].high == pytest.approx(0.001)
    assert timings["slow"].best == pytest.approx(0.0625 / 4)  # of one of the 4 times that a call does the work


def test_seconds_end_a_comparison_after_three_rounds(timing: ModuleType) -> None:
    calls: list[int] = []
    timings = timing.interleave({"only": timing.Case(calls.append)}, rounds=1000, seconds=0.0)
    assert timings["only"].samples == 3 * timing.TURN_CALLS
    assert calls == list(range(1 + 3 * (1 + timing.TURN_CALLS)))


def test_turns_in_which_a_host_took_time_are_not_quiet(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10, 10, 11, 13, 13, 13])  # before and after each of three turns: the second one lost time
    monkeypatch.setattr(timing, "_stolen", lambda: next(ticks))
    monkeypatch.setattr(timing, "_runnable", lambda: 1)
    timings = timing.interleave({"only": timing.Case(lambda i: None)}, rounds=3)
    assert timings["only"].samples == 3 * timing.TURN_CALLS
    assert timings["only"].quiet == 2 * timing.TURN_CALLS


def test_the_write_floor_writes_what_outputs_are_like(timing: ModuleType, floors: ModuleType) -> None:
    """Every line another, and hardly a zero: some CPUs write lines of zeros several times as fast."""
    library, target = floors.library(), timing.aligned(1 << 14, torch.uint8).zero_()
    library.floor_write(ctypes.c_void_p(target.data_ptr()), ctypes.c_int64(1 << 14), ctypes.c_int(1))
    lines = target.view(-1, 64)
    assert len(lines.unique(dim=0)) == len(lines)
    assert (lines == 0).float().mean() < 0.02
    assert (lines.view(torch.int64) != 0).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_matrix_product_is_faster_than_the_products_floor(timing: ModuleType, floors: ModuleType, dtype: str) -> None:
    """Sums that a compiler keeps in memory would halve the floor's rate, and flatter every kernel."""
    dense = torch.randn(512, 512, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        floor = floors.floor(f"{dtype} products", 512**3)
        cases = {"product": timing.Case(lambda _: dense @ dense), "floor": floor}
        timings = timing.interleave(cases, rounds=12)
    finally:
        torch.set_num_threads(threads)
    assert timings["floor"].best < 1.1 * timings["product"].best


def test_a_part_does_not_take_the_place_of_a_whole_run(
    harness: ModuleType,
    timing: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a part, or of other sizes, results are printed, with `--json` written; nothing measured is an error."""
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    name, isa = "linear", harness.environment()["isa"]
    whole = tmp_path / "benchmarks" / "results" / f"{name}-{isa}.json"

    def measured(*argv: str) -> Path | None:
        size = {"type": int, "default": 4096, "help": "a benchmark's own option"}
        report = harness.Report(name, harness.arguments("", [*argv, "--rounds", "3"], size=size))
        for title in ("nf4 M=1", "int8 M=1"):
            report.compare(title, {"halfbyte": timing.Case(lambda i: None)}, verify=lambda: None)
        saved = report.save()
        assert saved is None or isinstance(saved, Path)
        return saved

    def titles(path: Path) -> list[str]:
        return [comparison["title"] for comparison in json.loads(path.read_text())["comparisons"]]

    assert measured() == measured("--size", "4096") == whole
    assert titles(whole) == ["nf4 M=1", "int8 M=1"]
    before = whole.read_bytes()
    assert measured("--only", "nf4") is None
    assert "--only 'nf4' measured a part of linear" in capsys.readouterr().out
    assert measured("--size", "64", "--only", "nf4") is None
    assert "--only 'nf4' --size 64 measured a part of linear" in capsys.readouterr().out
    assert measured("--size", "64") is None
    assert "not written: --size 64 measured a part of linear" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--only 'M=99' is in the title of no comparison of linear: nothing was"):
        measured("--only", "M=99")
    with pytest.raises(SystemExit, match="'M=99'"):
        measured("--only", "M=99", "--json", str(whole))
    assert whole.read_bytes() == before
    part = tmp_path / "part.json"
    assert measured("--only", "nf4", "--json", str(part)) == part
    assert titles(part) == ["nf4 M=1"]
    assert whole.read_bytes() == before
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [whole.name, part.name]


def test_a_part_of_a_table_does_not_take_the_place_of_a_whole_one(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    whole = tmp_path / "benchmarks" / "results" / f"plan-{harness.environment()['isa']}.json"
    harness.save_table("plan", "MB", ["case", "planned"], [["llama", 1.0], ["mixer", 2.0]], None)
    before = whole.read_bytes()
    assert json.loads(before)["rows"] == [["llama", 1.0], ["mixer", 2.0]]
    harness.save_table("plan", "MB", ["case", "planned"], [["llama", 3.0]], None, "llama")
    with pytest.raises(SystemExit, match="--only 'bert' is in the title of no comparison of plan"):
        harness.save_table("plan", "MB", ["case", "planned"], [], whole, "bert")
    assert whole.read_bytes() == before
    harness.save_table("plan", "MB", ["case", "planned"], [["llama", 3.0]], whole, "llama")
    assert json.loads(whole.read_text())["rows"] == [["llama", 3.0]]


@pytest.mark.parametrize(
    "name", ["instruction_counts", "predicted_cycles", "sass_counts", "gpu_check", "bench_faults", "bench_sharding"]
)
def test_only_names_something(name: str) -> None:
    """A name that nothing has, in scripts that know all names, is an error that says so; nothing else happens."""
    arguments = ["--only", "nothing-of-that-name", *(["--dry-run"] if name == "gpu_check" else [])]
    arguments += ["--isa", "scalar"] if name == "instruction_counts" else []
    script = ROOT / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "--only 'nothing-of-that-name' is" in done.stderr
