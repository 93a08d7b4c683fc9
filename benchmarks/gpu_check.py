"""One command on a machine with a GPU: check every op, measure floors and every target, take an 8B-shaped training step.

    python benchmarks/gpu_check.py [--json OUT.json] [--only TEXT] [--rounds 20]       (under 8 minutes on an H200)
    python benchmarks/gpu_check.py --dry-run                                           (its plumbing, tiny, on the CPU)

Imports torch and halfbyte; bitsandbytes and torchao are compared with where they are installed. Peers run interleaved in one
process (A B A B), on random data, over buffers rotated past the L2 cache. `event` is the median between CUDA events, host
launch included; `graph` the same work replayed from a CUDA graph: the kernel alone. `of floor` = floor / graph, with the
floor from the copy bandwidth and the bf16 GEMM rate of this run.

The work is done by a child process that writes the JSON after every check and section. A section that raises is recorded
and the next one runs; one that takes the process with it (an illegal address ends the CUDA context), or outlasts its
allowance, is recorded by the parent, which goes on with the rest in a new child. What no longer fits the 8 minutes is listed
as not run. The JSON is a result like those of the other benchmarks (gpu_report.py), which table.py shows where it is
committed as results/gpu-NAME.json.

Memory checks to run beside it, on the cases that reach every kernel:
    compute-sanitizer --tool memcheck python -m pytest tests/cuda/test_on_gpu.py -k "formats or route or lie or misaligned"
    compute-sanitizer --tool racecheck python -m pytest tests/cuda/test_on_gpu.py -k "formats or route"
    compute-sanitizer --tool initcheck python -m pytest tests/cuda/test_on_gpu.py -k "formats or route"
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_checks  # noqa: E402
import gpu_hosts  # noqa: E402
import gpu_plan  # noqa: E402
import gpu_report  # noqa: E402
import gpu_sections  # noqa: E402
import gpu_train  # noqa: E402
import torch  # noqa: E402
from gpu_bench import Bench, Row, floors  # noqa: E402

import halfbyte  # noqa: E402

MINUTES = 8.0


@dataclass(frozen=True)
class Task:
    """One check or section.

    Attributes:
        run: what it does; the returned value goes into the JSON.
        seconds: allowance, several times what is expected; past it the child is ended.
        floors: it fills in the floors that the others compare with, so every child starts with it.
    """

    run: Callable[[Bench], object]
    seconds: float
    floors: bool = False


def checked(name: str) -> Callable[[Bench], None]:
    """The check of that name as a task."""

    def run(b: Bench) -> None:
        torch.manual_seed(0)
        gpu_checks.CHECKS[name](b.device)

    return run


def tasks(cuda: bool, only: str) -> dict[str, Task]:
    """Everything to run, in the order of importance: what the time does not suffice for is at the end."""
    checks = {name: Task(checked(name), 60) for name in gpu_checks.CHECKS if cuda or name not in gpu_checks.CUDA_ONLY}
    sections = {
        "linears": Task(gpu_sections.linears, 120),
        "codec": Task(gpu_sections.codec, 60),
        "optimizers": Task(gpu_sections.optimizers, 90),
        "train_8b": Task(gpu_train.train_8b, 120),
        "qlora_linear": Task(gpu_sections.qlora_linear, 30),
        "linear_routes": Task(gpu_sections.linear_routes, 60),
        "backwards": Task(gpu_sections.backwards, 60),
        "fp8_linear": Task(gpu_sections.fp8_linears, 45),
        "int8_linear": Task(gpu_sections.int8_linears, 45),
        "host_cost": Task(gpu_sections.host_cost, 20),
        "distributed": Task(gpu_train.distributed, 60),
        "plan": Task(lambda b: gpu_plan.check_plans(b.device, b.tiny), 150),
        "hosts": Task(gpu_hosts.hosts, 150),
    }
    opcheck = "opcheck_of_every_sample"  # a minute of Python, which CI runs on the CPU
    last = {opcheck: checks.pop(opcheck)}
    parts = only.split(",")
    chosen = {
        name: task
        for name, task in {**checks, **sections, **last}.items()
        if any(part in name for part in parts) or ("checks" in parts and name not in sections)
    }
    return {"floors": Task(floors, 60, floors=True), **chosen}


def write(path: Path, state: dict[str, Any]) -> None:
    """The JSON as a whole or not at all, however the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(state, indent=1, default=str))
    os.replace(beside, path)


def fail(state: dict[str, Any], name: str, why: str) -> None:
    state["failed"].append(name)
    state["errors"][name] = why
    state["running"] = None
    print(f"  FAILED  {name}\n{why}", flush=True)


def work(args: argparse.Namespace) -> int:
    """The child: every task that the JSON does not know yet."""
    state = json.loads(args.json.read_text())
    device = torch.device("cpu" if args.dry_run else "cuda:0")
    b = Bench(device, 3 if args.dry_run else args.rounds, args.dry_run)
    parent = os.getppid()
    for name, task in tasks(b.cuda, args.only).items():
        if os.getppid() != parent:
            return 1  # interrupted: nobody waits for the rest
        known = name in state["seconds"] or name in state["failed"]
        if known and not (task.floors and "floors" in state["results"]):
            continue
        if known:  # of a child before this one: the same machine, a minute ago
            b.copy, b.gemm = state["results"]["floors"].values()
            continue
        print(f"-- {name}", flush=True)
        state["running"], start = name, time.time()
        write(args.json, state)
        first, left_out = len(b.rows), len(b.left_out)
        try:
            state["results"][name] = task.run(b)
        except Exception as error:
            if hasattr(error, "found"):  # what it has measured belongs into the JSON all the same
                state["results"][name] = error.found
            fail(state, name, traceback.format_exc())
        state["seconds"][name] = time.time() - start
        state["rows"] += [asdict(row) for row in b.rows[first:]]
        state["left_out"] += b.left_out[left_out:]
        state["running"] = None
        write(args.json, state)
    return 0


def supervise(
    command: list[str], path: Path, allowances: dict[str, float], deadline: float, poll: float = 0.5
) -> dict[str, Any]:
    """Runs children until the JSON at `path` knows every task, or the deadline has come.

    Args:
        command: starts a child that goes through the tasks the JSON does not know.
        path: the JSON; `running` names the task the child is at.
        allowances: seconds per task, by name.
        deadline: `time.time()` after which no task goes on.
        poll: seconds between looks.

    Returns:
        The JSON.
    """
    while True:
        child = subprocess.Popen(command)
        seen, since, why = None, time.time(), ""
        while child.poll() is None:
            time.sleep(poll)
            running = json.loads(path.read_text())["running"]
            if running != seen:
                seen, since = running, time.time()
            if time.time() > deadline:
                why = "the time is up"
            elif time.time() - since > allowances.get(str(seen), 120):
                why = f"it took longer than its {allowances.get(str(seen), 120):.0f} s"
            if why:
                child.kill()
        state: dict[str, Any] = json.loads(path.read_text())
        unknown = [name for name in allowances if name not in state["seconds"] and name not in state["failed"]]
        if state["running"] is not None:
            fail(state, state["running"], why or f"the process ended with status {child.returncode}")
        elif unknown and child.returncode == 0:
            fail(state, unknown[0], "the child did not come to it")
        elif unknown and not why:
            fail(state, unknown[0], f"the process ended with status {child.returncode} before it")
        write(path, state)
        unknown = [name for name in unknown if name not in state["failed"]]
        if not unknown or time.time() > deadline:
            state["not_run"] = unknown
            write(path, state)
            return state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    parser.add_argument(
        "--only", default="", help="run only what has one of these in its name, commas between; `checks`: every check"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: proves the script, measures nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU (--dry-run exercises this script without one)", file=sys.stderr)
        return 2
    if args.only != "floors" and len(tasks(not args.dry_run, args.only)) == 1:  # floors are always measured
        parser.error(f"--only {args.only!r} is in the name of no check and no section")
    if args.child:
        return work(args)
    start = time.time()
    state: dict[str, Any] = {
        "device": "dry run on the CPU" if args.dry_run else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "halfbyte": halfbyte._library.build_info(),
        "cpu": gpu_report.cpu_name(),
        "versions": gpu_report.versions(),
        "running": None,
        **{key: {} for key in ("results", "seconds", "errors")},
        **{key: [] for key in ("rows", "failed", "left_out", "not_run")},
    }
    write(args.json, state)
    print(json.dumps({key: state[key] for key in ("device", "torch", "cuda", "python")}))
    slower = 10 if args.dry_run else 1  # nothing is timed on a CPU, which has other work
    allowances = {name: slower * task.seconds for name, task in tasks(not args.dry_run, args.only).items()}
    deadline = start + slower * 60 * args.minutes
    state = supervise([sys.executable, *sys.argv, "--child"], args.json, allowances, deadline)
    print_table([Row(**row) for row in state["rows"]])
    state["total_seconds"] = time.time() - start
    write(args.json, {**gpu_report.described(state), **state})
    print(f"{state['total_seconds']:.0f} s, {len(state['failed'])} failed {state['failed'] or ''}; written to {args.json}")
    if state["not_run"]:
        print(f"not run, the time was up: {state['not_run']}")
    return 1 if state["failed"] or state["not_run"] else 0


def print_table(rows: list[Row]) -> None:
    """The rows again in one place, with every peer's time over ours."""
    ours: dict[str, float] = {}
    for row in rows:
        time_of = row.graph or row.event
        ours.setdefault(row.title, time_of)
        shown = f"{time_of:10.1f} us  {100 * row.floor / time_of:5.1f} % of the floor  {time_of / ours[row.title]:5.2f} x"
        print(f"{row.title:42s} {row.who:26s} {shown}")


if __name__ == "__main__":
    sys.exit(main())
