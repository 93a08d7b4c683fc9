"""The harness of every CPU benchmark here: verify first, then time the peers interleaved, in one run, against floors.

    args = harness.arguments(__doc__)                       # --threads --rounds --seconds --only --json
    report = harness.Report("dequantize", args)             # sets threads, prints hardware and versions
    weights = harness.rotate(make_weight, weight_bytes)     # copies enough to fall out of the last-level cache
    report.compare(
        "nf4 -> bf16, 4096 x 4096",
        {"halfbyte": Case(lambda i: op(weights[i]), bytes=n), "bitsandbytes": Case(...)},
        verify=check,                                       # raises when a result is wrong; runs before any timing
        baseline="bitsandbytes",                            # printed as a ratio: how often `halfbyte` fits into a peer
        floors={"copy": n},                                 # "copy", "read", "write": bytes moved; timed in the same rounds
    )
    report.save()                                           # JSON: environment, every row, every percentile; whole runs

A round gives each case one turn, the next round in the other order (A B B A): drift of the machine hits all of them alike.
A turn is a call that is not timed, for what the turn before left behind (a core that slept through a single thread, another
library's threads that still spin), then up to 5 timed ones in a row, as a training step calls it, or 50 ms of them. A case
gets the number of the call to pick its buffers with. A sample is *quiet* when nothing else was runnable before the turn and
after the call, and no host took CPU time from this virtual machine during the turn; a case's time is the median of its
quiet samples, or the lower quintile of all samples when fewer than 5 were quiet (a busy machine only ever adds time). With
`--threads 1` the clock is the thread's own CPU time, which other processes do not add to: the better measurement on a
machine that is not idle. Times are seconds, sizes bytes, rates per second. Needs torch, and g++ for the floors.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from halfbyte import _library  # registers torch.ops.halfbyte
from halfbyte.checkpoint.folder import replace_file

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("bitsandbytes", "torchao", "optimum-quanto")
TURN_CALLS, TURN_SECONDS = 5, 0.05  # a turn's timed calls: at most so many, none after so long
# Hold torch's own kernels, oneDNN and MKL to what a machine of a forced instruction set has; bitsandbytes has no switch.
HELD_TO_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
HELD = {"scalar": HELD_TO_AVX2, "avx2": HELD_TO_AVX2, "avx2_vnni": HELD_TO_AVX2 | {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}}
ONEDNN = {"avx512_base": "AVX512_CORE", "avx512_vnni": "AVX512_CORE_VNNI", "avx512": "AVX512_CORE_BF16"}
HELD |= {isa: {"ONEDNN_MAX_CPU_ISA": name} for isa, name in ONEDNN.items()}
# What floors.cpp may use there; -march=native elsewhere.
FLOOR_FLAGS = {"avx2": ["-march=x86-64-v3"], "avx2_vnni": ["-march=x86-64-v3", "-mavxvnni"]}
FLOOR_FLAGS |= {"avx512_base": ["-march=x86-64-v4"], "avx512_vnni": ["-march=x86-64-v4", "-mavx512vnni"]}
# Some 10 ms of work or more: a virtual CPU that slept shares another one's core for the first few.
LEAST_PRODUCTS = 2**32

# (N, K) of the linear layers in a decoder block of SmolLM2-135M: where a call costs as much as a matrix.
SMALL_BLOCK = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One thing to time: `run(i)` does the work `times` times, on buffer set `i`.

    `bytes` it must move and `flops` it must do each time; 0: unknown.
    """

    run: Callable[[int], object]
    bytes: int = 0
    flops: int = 0
    times: int = 1


@dataclass(frozen=True)
class Timing:
    """Seconds: `median` as in the module's docstring, the 20th and 80th percentile and the best of all samples."""

    median: float
    low: float
    high: float
    best: float
    samples: int
    quiet: int


def arguments(doc: str | None, argv: Sequence[str] | None = None, **extra: Any) -> argparse.Namespace:
    """The command line every benchmark shares. `extra`: name -> add_argument keywords for a benchmark's own options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="threads for every library (default: as torch starts)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds per comparison")
    parser.add_argument("--seconds", type=float, default=20.0, help="stop a comparison after this long (at least 3 rounds)")
    parser.add_argument("--only", default="", help="run only comparisons whose title contains this")
    parser.add_argument(
        "--json", type=Path, help="where to write (default: benchmarks/results/NAME-ISA.json; with --only nowhere)"
    )
    for name, keywords in extra.items():
        parser.add_argument(f"--{name}", **keywords)
    args = parser.parse_args(argv)
    wanted = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    wanted |= HELD.get(os.environ.get("HALFBYTE_CPU_ISA", ""), {})
    if argv is None and any(os.environ.get(name) != value for name, value in wanted.items()):
        # torch and peers' OpenMP runtimes read these when they are loaded and never again.
        os.environ |= wanted
        os.execv(sys.executable, [sys.executable, *sys.argv])
    return args


def cpu_model() -> str:
    """The CPU's own name for itself, with x86's numbers: clouds call every generation "AMD EPYC"."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return fields["model name"] + numbers


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0 (32 MiB where the system does not say)."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * units[s[-1]] for s in sizes), default=32 << 20)


def environment() -> dict[str, Any]:
    """Everything a number depends on: CPU, ISA in use, threads, versions, commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PEERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # Results are no input: those that an earlier benchmark wrote do not make this one's commit another.
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results", ":!benchmarks/README.md"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cpu": cpu_model(),
        "isa": _library.cpu_isa(),
        "forced_isa": os.environ.get("HALFBYTE_CPU_ISA", ""),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_level_cache": last_level_cache(),
        "versions": versions,
        "commit": commit + ("+changes" if dirty else ""),
    }


class Rotated(Generic[T]):
    """Items that are used in turn: after the last index comes the first item again."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = list(items)

    def __getitem__(self, i: int) -> T:
        return self.items[i % len(self.items)]

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def rotate(make: Callable[[int], T], item_bytes: int) -> Rotated[T]:
    """`make(0), make(1), ...`: enough items that using them in turn finds none in the last-level cache (at least 2)."""
    return Rotated(make(i) for i in range(max(2, 1 + -(-2 * last_level_cache() // max(1, item_bytes)))))


def reuse_memory() -> None:
    """From here on, freed memory is handed out again with its pages, for every library in the process (glibc).

    By default a tensor of 32 MiB comes from fresh pages, and each first touch of 4 KiB costs about as much as writing 30:
    that measures the system, not a kernel. Time what users see before this call, kernels after it.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL("libc.so.6")
    if not (libc.mallopt(m_mmap_threshold, 1 << 30) and libc.mallopt(m_trim_threshold, (1 << 31) - 1)):
        raise OSError("mallopt refused")


def aligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """(count,) zeros of `dtype`, touched, on a 64-byte boundary."""
    nbytes = count * dtype.itemsize
    raw = torch.zeros(nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    return raw[start : start + nbytes].view(dtype)


class _Floors:
    """Bandwidths and rates of multiplication, from floors.cpp (compiled on first use)."""

    _library: ctypes.CDLL | None = None

    @classmethod
    def library(cls) -> ctypes.CDLL:
        if cls._library is None:
            target = Path(tempfile.mkdtemp(prefix="halfbyte-floors-")) / "floors.so"
            source = Path(__file__).with_name("floors.cpp")
            compiler = os.environ.get("CXX", "g++")
            target_flags = FLOOR_FLAGS.get(os.environ.get("HALFBYTE_CPU_ISA", ""), ["-march=native"])
            flags = ["-std=c++20", "-O3", *target_flags, "-shared", "-fPIC", "-pthread"]
            subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
            cls._library = ctypes.CDLL(str(target))
        return cls._library

    @classmethod
    def case(cls, kind: str, nbytes: int) -> Case:
        """`nbytes`: of "copy" read and written together; of "... products" their number."""
        library, threads = cls.library(), torch.get_num_threads()
        if kind.endswith(" products"):
            times = -(-LEAST_PRODUCTS // nbytes)
            multiply, count = getattr(library, f"floor_{kind.replace(' ', '_')}"), ctypes.c_int64(nbytes * times)
            return Case(lambda _: multiply(count, ctypes.c_int(threads)), flops=2 * nbytes, times=times)
        length = nbytes // (2 if kind == "copy" else 1) // (256 * threads) * (256 * threads)
        if length == 0:
            raise ValueError(f"a {kind} floor needs at least {512 * threads} bytes, got {nbytes}")
        def fresh(_: int) -> torch.Tensor:
            return aligned(length, torch.uint8)

        # An op's output takes the same memory at every call (`reuse_memory`), and so does "write".
        sources: Rotated[torch.Tensor] = Rotated([]) if kind == "write" else rotate(lambda i: fresh(i).random_(), length)
        targets = sources if kind == "read" else Rotated([fresh(0)]) if kind == "write" else rotate(fresh, length)
        size, pool = ctypes.c_int64(length), ctypes.c_int(threads)

        def source(i: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(sources[i].data_ptr())

        def target(i: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(targets[i].data_ptr())

        if kind == "read":
            return Case(lambda i: library.floor_read(source(i), size, pool), length)
        if kind == "write":
            return Case(lambda i: library.floor_write(target(i), size, pool), length)

        def copy(i: int) -> None:
            library.floor_copy(source(i), target(i), size, pool)

        copy(0)
        if not torch.equal(sources[0], targets[0]):
            raise AssertionError("the copy floor did not copy")
        return Case(copy, 2 * length)


def _runnable() -> int:
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])


def _stolen() -> int:
    """10 ms of CPU time, summed over the CPUs, that a host has taken from this virtual machine."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])


def interleave(cases: Mapping[str, Case], rounds: int = 20, seconds: float = 20.0) -> dict[str, Timing]:
    """A turn for every case per round, every other round backwards: `rounds` times (at least 3), or for so many seconds."""
    alone = torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in cases}
    quiet: dict[str, list[float]] = {name: [] for name in cases}
    calls = {name: itertools.count() for name in cases}
    for name, case in cases.items():
        case.run(next(calls[name]))
    started = time.perf_counter()
    for i in range(rounds):
        if i >= 3 and time.perf_counter() - started > seconds:
            break
        for name, case in list(cases.items())[:: -1 if i % 2 else 1]:
            for _ in range(4):  # give a passing process 16 ms to finish
                if before := alone or _runnable() <= 1:
                    break
                time.sleep(0.004)
            case.run(next(calls[name]))
            stolen, undisturbed = _stolen(), []
            turn = time.perf_counter()
            for call in itertools.islice(calls[name], TURN_CALLS):
                begin = clock()
                case.run(call)
                elapsed = (clock() - begin) / case.times
                samples[name].append(elapsed)
                if before and (alone or _runnable() <= 2):  # our own pool may still be spinning down
                    undisturbed.append(elapsed)
                if time.perf_counter() - turn > TURN_SECONDS:
                    break
            if _stolen() == stolen:
                quiet[name] += undisturbed
    return {name: _timing(samples[name], quiet[name]) for name in cases}


def _timing(samples: list[float], quiet: list[float]) -> Timing:
    ordered = sorted(samples)
    low, high = ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5]
    median = statistics.median(quiet) if len(quiet) >= 5 else low
    return Timing(median, low, high, ordered[0], len(samples), len(quiet))


def in_child(script: str, *arguments: str, timeout: float = 1800, **environment: str) -> dict[str, Any]:
    """Runs `script` in a process of its own, whose memory is nobody else's; returns the JSON on the last line it prints.

    `environment` is added to this process's.
    """
    command = [sys.executable, script, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout, env=os.environ | environment
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes results, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")


def save(content: Mapping[str, Any], path: Path | None, only: str) -> Path | None:
    """Writes what a benchmark measured and prints where.

    Args:
        content: "benchmark", its name; "environment"; "comparisons" or "rows".
        path: None: benchmarks/results/NAME-ISA.json, which holds whole runs.
        only: the part that was asked for; "": all.

    Returns:
        The path; None: nothing was written, because a part must not take a whole run's place.

    Raises:
        SystemExit: nothing was measured; nothing is written.
    """
    name = content["benchmark"]
    if not (content.get("comparisons") or content.get("rows")):
        raise SystemExit(f"--only {only!r} is in the title of no comparison of {name}: nothing was measured or written")
    if path is None and only:
        print(f"\nnot written: --only {only!r} measured a part of {name} (--json FILE keeps it)")
        return None
    path = path or ROOT / "benchmarks" / "results" / f"{name}-{content['environment']['isa']}.json"
    write_json(path, content)
    print(f"\nwrote {path}")
    return path


def save_table(
    name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], path: Path | None, only: str = ""
) -> None:
    """Prints a table and writes it as JSON with the environment; `table.py` puts it into README.md.

    Args:
        name: of the benchmark.
        title: what was measured, in one sentence with its units.
        columns: headings; the first one names the row.
        rows: strings and numbers, one per column.
        path, only: as `save` has them.
    """
    content = {"benchmark": name, "environment": environment(), "title": title}
    print(f"\n{title}")
    for row in [columns, *rows]:
        print("  ".join(f"{value!s:<40}" if i == 0 else f"{value!s:>16}" for i, value in enumerate(row)))
    save(content | {"columns": [*columns], "rows": [[*r] for r in rows]}, path, only)


class Report:
    """Collects comparisons, prints each as a table and writes all of them as JSON."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        if args.threads:
            torch.set_num_threads(args.threads)
        self.name, self.args = name, args
        self.environment = environment()
        self.comparisons: list[dict[str, Any]] = []
        env = self.environment
        versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
        print(
            f"# {name}: {env['cpu']}, {env['isa']}, {env['threads']} threads, commit {env['commit']}; {versions}", flush=True
        )

    def compare(
        self,
        title: str,
        cases: Mapping[str, Case],
        *,
        verify: Callable[[], object],
        baseline: str | None = None,
        floors: Mapping[str, int] | None = None,
    ) -> dict[str, Timing]:
        """Verifies, times `cases` and the floors interleaved, prints and records a table.

        Args:
            title: the workload, with shape and dtypes.
            cases: by name; ours are called "halfbyte" or start with "halfbyte ".
            verify: raises when any case computes something wrong. Called before anything is timed.
            baseline: the case whose time over each row's time is printed.
            floors: "copy", "read" or "write" -> bytes that this workload has to move, "bf16 products" (fp32, int8) -> how
                many of them it takes; rates are shares of the slowest.

        Returns:
            A Timing per case and floor; empty when --only excludes this title.
        """
        if self.args.only not in title:
            return {}
        verify()
        floors = dict(floors or {})
        everything = dict(cases) | {kind: _Floors.case(kind, nbytes) for kind, nbytes in floors.items()}
        timings = interleave(everything, self.args.rounds, self.args.seconds)
        floor = max(floors, key=lambda kind: timings[kind].median) if floors else None
        rows: list[dict[str, Any]] = []
        for name, timing in timings.items():
            case, row = everything[name], {"name": name, **asdict(timings[name])}
            if case.bytes:
                row["bytes_per_second"] = case.bytes / timing.median
            if case.flops:
                row["flops_per_second"] = case.flops / timing.median
            if baseline is not None:
                row["speedup"] = timings[baseline].median / timing.median
            if floor is not None and name.startswith("halfbyte"):
                row["share_of_floor"] = timings[floor].median / timing.median
            rows.append(row)
        self.comparisons.append({"title": title, "baseline": baseline, "floor": floor, "rows": rows})
        self._print(title, baseline, floor, rows)
        return timings

    def _print(self, title: str, baseline: str | None, floor: str | None, rows: list[dict[str, Any]]) -> None:
        print(f"\n## {title}")
        for row in rows:
            text = f"  {row['name']:28s} {row['median'] * 1e3:9.3f} ms  [{row['low'] * 1e3:.3f} .. {row['high'] * 1e3:.3f}]"
            if "bytes_per_second" in row:
                text += f" {row['bytes_per_second'] / 1e9:7.1f} GB/s"
            if "flops_per_second" in row:
                text += f" {row['flops_per_second'] / 1e9:8.1f} GFLOP/s"
            if "share_of_floor" in row:
                text += f" {row['share_of_floor'] * 100:5.0f} % of {floor}"
            if "speedup" in row:
                text += f"  {row['speedup']:7.2f}x over {baseline}"
            print(text + f"  ({row['quiet']} of {row['samples']} quiet)")
        sys.stdout.flush()

    def save(self) -> Path | None:
        """Writes the JSON, as the function `save` does."""
        content = {
            "benchmark": self.name,
            "environment": self.environment,
            "turn_calls": TURN_CALLS,
            "comparisons": self.comparisons,
        }
        return save(content, self.args.json, self.args.only)
