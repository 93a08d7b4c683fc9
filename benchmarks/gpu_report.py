"""gpu_check.py's JSON as a result like those of the other benchmarks: environment and tables (table.py shows them)."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

PEERS = ("bitsandbytes", "torchao", "transformers", "lightning", "peft")


def cpu_name() -> str:
    """Of the machine that the GPU is in: it launches the kernels."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def times(state: dict[str, Any]) -> dict[str, Any]:
    """Every comparison: host launch included, replayed from a graph, and the graph's time over halfbyte's."""
    ours: dict[str, float] = {}
    rows = []
    for row in state["rows"]:
        best = row["graph"] or row["event"]
        first = row["title"] not in ours
        ratio = best / ours.setdefault(row["title"], best)
        shown = f"**{ratio:.2f}**" if ratio < 1 and not row["who"].startswith("halfbyte") else f"{ratio:.2f}"
        graph = f"{row['graph']:.1f}" if row["graph"] else "-"
        figures = [f"{row['event']:.1f}", graph, f"{row['floor']:.1f}", f"{100 * row['floor'] / best:.0f} %", shown]
        rows.append([row["title"] if first else "", row["who"], *figures])
    columns = ["work", "case", "us", "us in a graph", "floor, us", "of floor", "times ours"]
    title = "Times; floor: bytes over this run's copy, or products over its bf16 GEMM"
    return {"title": title, "columns": columns, "rows": rows}


def tables(state: dict[str, Any]) -> list[dict[str, Any]]:
    """What the JSON of a run holds, for people."""
    results, made = state["results"], []
    if state["rows"]:
        made.append(times(state))
    if "floors" in results:
        made.append({
            "title": "Floors, and host time of a call on tiny tensors",
            "columns": ["what", "value"],
            "rows": [
                ["copy, read and written, TB/s", f"{results['floors']['copy_bytes_per_s'] / 1e12:.2f}"],
                ["bf16 product of 8192 x 8192, TFLOP/s", f"{results['floors']['gemm_flop_per_s'] / 1e12:.0f}"],
                *([f"{name}, us of host time", f"{us:.1f}"] for name, us in (results.get("host_cost") or {}).items()),
            ],
        })  # fmt: skip
    if isinstance(results.get("train_8b"), dict):
        steps = results["train_8b"]
        names = ["tokens_per_s", "step_s", "peak_gb", "build_s", "build_peak_gb"]
        made.append({
            "title": "LoRA r=16 steps of an 8B-shaped model, 4 x 2048 tokens, checkpointed, AdamW8bit of halfbyte in all",
            "columns": ["weights", "tokens/s", "step, s", "peak GB", "built in, s", "peak GB while built"],
            "rows": [[who, *(f"{step[name]:.4g}" for name in names)] for who, step in steps.items()],
        })  # fmt: skip
    if isinstance(results.get("plan"), list):
        rows = []
        for row in results["plan"]:
            known = [f"{row['planned']}", f"{row['measured']}", f"{row['error']:+.2%}"] if "error" in row else ["-"] * 3
            rows.append([row["case"], *known, row["verdict"]])
        columns = ["set-up", "planned, bytes", "measured", "error", "within 10 %"]
        made.append({"title": "`halfbyte.plan` and the allocator's peak", "columns": columns, "rows": rows})
    verdicts = [
        [name, f"{seconds:.1f}", "FAILED" if name in state["failed"] else "passed"]
        for name, seconds in state["seconds"].items()
    ]
    made.append({"title": "Checks and sections", "columns": ["name", "seconds", "verdict"], "rows": verdicts})
    return made


def described(state: dict[str, Any]) -> dict[str, Any]:
    """What turns the JSON of a run into a result."""
    peers = ", ".join(f"{name} {version}" for name, version in state["versions"].items())
    commit = state["halfbyte"]["commit"]
    where = (
        f"{state['device']} in a machine with {state['cpu']}; torch {state['torch']}, CUDA {state['cuda']}"
        f"{', ' + peers if peers else ''}; commit {commit}. `python benchmarks/gpu_check.py`."
    )
    notes = [f"Left out: {text}" for text in state["left_out"]] + [f"Not run: {name}" for name in state["not_run"]]
    environment = {"cpu": state["cpu"], "device": state["device"], "where": where, "commit": commit}
    return {"benchmark": "gpu", "environment": environment, "tables": tables(state), "notes": notes}
