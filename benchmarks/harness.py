"""The harness of every CPU benchmark here: verify first, then time the peers interleaved, in one run, against floors.

    args = harness.arguments(__doc__)                       # --threads --rounds --seconds --only --json
    report = harness.Report("dequantize", args)             # sets threads, prints hardware and versions
    weights = timing.rotate(make_weight, weight_bytes)      # copies enough to fall out of the last-level cache
    report.compare(
        "nf4 -> bf16, 4096 x 4096",
        {"halfbyte": Case(lambda i: op(weights[i]), bytes=n), "bitsandbytes": Case(...)},
        verify=check,                                       # raises when a result is wrong; runs before any timing
        baseline="bitsandbytes",                            # printed as a ratio: how often `halfbyte` fits into a peer
        floors={"copy": n},                                 # "copy", "read", "write": bytes moved; timed in the same rounds
    )
    report.save()                                           # JSON: environment, every row, every percentile; whole runs

Cases are timed by turns (timing.py), and floors as cases of their own (floors.py). Times are seconds, sizes bytes, rates per
second. Needs torch, and g++ for the floors.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from floors import floor
from timing import ROUNDS, TURN_CALLS, Case, Timing, interleave, last_level_cache

from halfbyte import _library  # registers torch.ops.halfbyte
from halfbyte.checkpoint.folder import replace_file

ROOT = Path(__file__).resolve().parent.parent
MADE = ("results", "tables", "README.md")  # by benchmarks and from their results: no part of what is measured
PEERS = ("bitsandbytes", "torchao", "optimum-quanto")
# Hold torch's own kernels, oneDNN and MKL to what a machine of a forced instruction set has; bitsandbytes has no switch.
HELD_TO_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
HELD = {"scalar": HELD_TO_AVX2, "avx2": HELD_TO_AVX2, "avx2_vnni": HELD_TO_AVX2 | {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}}
ONEDNN = {"avx512_base": "AVX512_CORE", "avx512_vnni": "AVX512_CORE_VNNI", "avx512": "AVX512_CORE_BF16"}
HELD |= {isa: {"ONEDNN_MAX_CPU_ISA": name} for isa, name in ONEDNN.items()}
# (N, K) of the linear layers in a decoder block of SmolLM2-135M: where a call costs as much as a matrix.
SMALL_BLOCK = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]


def arguments(doc: str | None, argv: Sequence[str] | None = None, **extra: Any) -> argparse.Namespace:
    """The command line every benchmark shares.

    Args:
        doc, argv: as `argparse` has them.
        extra: name -> add_argument keywords for a benchmark's own options.

    Returns:
        The options, and `part`: those that ask for something other than the whole benchmark, as they were given; "": none.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="threads for every library (default: as torch starts)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds per comparison")
    parser.add_argument("--seconds", type=float, default=20.0, help="stop a comparison after this long (at least 3 rounds)")
    parser.add_argument("--only", default="", help="run only comparisons whose title contains this")
    parser.add_argument(
        "--json", type=Path, help="where to write (default: benchmarks/results/NAME-ISA.json, of a part nowhere)"
    )
    for name, keywords in extra.items():
        parser.add_argument(f"--{name}", **keywords)
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in ("only", *extra)}
    args.part = " ".join(f"--{name} {value!r}" for name, value in given.items() if value != parser.get_default(name))
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
        [*git, "status", "--porcelain", "-uno", "--", ".", *(f":!benchmarks/{made}" for made in MADE)],
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


def save(content: Mapping[str, Any], path: Path | None, only: str, part: str = "") -> Path | None:
    """Writes what a benchmark measured and prints where.

    Args:
        content: "benchmark", its name; "environment"; "comparisons" or "rows".
        path: None: benchmarks/results/NAME-ISA.json, which holds whole runs.
        only: what titles had to contain; "": all were measured.
        part: options that asked for a part, or for other sizes; "": `only` says it.

    Returns:
        The path; None: nothing was written, because a part must not take a whole run's place.

    Raises:
        SystemExit: nothing was measured; nothing is written.
    """
    name = content["benchmark"]
    if not (content.get("comparisons") or content.get("rows")):
        raise SystemExit(f"--only {only!r} is in the title of no comparison of {name}: nothing was measured or written")
    part = part or (f"--only {only!r}" if only else "")
    if path is None and part:
        print(f"\nnot written: {part} measured a part of {name} (--json FILE keeps it)")
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
        everything = dict(cases) | {kind: floor(kind, nbytes) for kind, nbytes in floors.items()}
        timings = interleave(everything, self.args.rounds, self.args.seconds)
        slowest = max(floors, key=lambda kind: timings[kind].median) if floors else None
        rows: list[dict[str, Any]] = []
        for name, timing in timings.items():
            case, row = everything[name], {"name": name, **asdict(timings[name])}
            if case.bytes:
                row["bytes_per_second"] = case.bytes / timing.median
            if case.flops:
                row["flops_per_second"] = case.flops / timing.median
            if baseline is not None:
                row["speedup"] = timings[baseline].median / timing.median
            if slowest is not None and name.startswith("halfbyte"):
                row["share_of_floor"] = timings[slowest].median / timing.median
            rows.append(row)
        self.comparisons.append({"title": title, "baseline": baseline, "floor": slowest, "rows": rows})
        self._print(title, baseline, slowest, rows)
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
        return save(content, self.args.json, self.args.only, self.args.part)
