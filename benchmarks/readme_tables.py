"""The tables of README.md, made from the committed results: what stands between `<!-- table: NAME -->` and `<!-- end -->`.

    python benchmarks/table.py          # rewrites them, with benchmarks/README.md and benchmarks/tables/
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Rows of a comparison that are no peer: bandwidths, and rates of multiplication. Nothing that reads, writes or multiplies as
# much can take less time than the strict ones; a copy writes another share of its bytes than the work does.
STRICT_FLOORS = ("read", "write", "bf16 products", "fp32 products", "int8 products")
FLOORS = ("copy", *STRICT_FLOORS)

# What to read: row of the README, results file, title of the comparison, {column: case}. The first column is ours.
SPEED = [
    ("quantize bf16 to nf4", "quantize", "bf16 -> nf4, 4096 x 4096", {}),
    ("dequantize nf4 to bf16", "dequantize", "nf4 -> bf16, 4096 x 4096", {}),
    ("linear nf4, bf16, 1 token", "linear", "linear nf4 bf16 M=1", {"torch": ("dense", "dense")}),
    ("linear nf4, bf16, 64 tokens", "linear", "linear nf4 bf16 M=64", {"torch": ("dense", "dense")}),
    ("linear nf4, bf16, 512 tokens", "linear", "linear nf4 bf16 M=512", {"torch": ("dense", "dense")}),
    ("linear nf4, fp32, 512 tokens", "linear", "linear nf4 fp32 M=512", {"torch": ("dense", "dense")}),
    ("AdamW8bit step, fp32", "optimizer", "AdamW8bit, 4096 x 4096 fp32", {"torch": ("torch fused", "fused, 32-bit state")}),
    ("AdamW8bit step, bf16", "optimizer", "AdamW8bit, 4096 x 4096 bf16", {"torch": ("torch fused", "fused, bf16 state")}),
    ("AdamW8bit step, 448 LoRA matrices of rank 16", "optimizer", "AdamW8bit, 448 LoRA matrices r=16 fp32",
     {"torch": ("torch fused", "fused, 32-bit state")}),
    ("LoRA r=16, forward and backward, nf4, bf16, 16 tokens", "lora", "LoRA r=16 nf4 bf16 M=16, forward + backward",
     {"torch": ("dense", "dense")}),
    ("the same, 512 tokens", "lora", "LoRA r=16 nf4 bf16 M=512, forward + backward", {"torch": ("dense", "dense")}),
    ("the same, fp32, 512 tokens", "lora", "LoRA r=16 nf4 fp32 M=512, forward + backward", {"torch": ("dense", "dense")}),
    ("`int8_linear`, bf16, 128 tokens", "int8_linear", "int8_linear bf16 M=128", {"torch": ("dense", "dense")}),
]
# Row of the README, results file, its ending, column of its table, {column of the README: row of its table}, is more better
TRAINED = {"halfbyte nf4": "halfbyte nf4 bf16", "bitsandbytes nf4": "bitsandbytes nf4 bf16"}
TRAINED["dense bf16"] = "torch dense bf16"
LOADED = {"halfbyte nf4": "halfbyte nf4", "bitsandbytes nf4": "bitsandbytes nf4", "dense bf16": "dense bfloat16"}
LOADED["Quanto int4"] = "quanto int4"
WHOLE = [
    ("Zen 5: LoRA r=8 on SmolLM2-135M, bf16, tokens a second", "finetune", "avx512_zen5", "tokens/s", TRAINED, True),
    ("peak anonymous memory of that run, MB", "finetune", "avx512_zen5", "peak MB", TRAINED, False),
    ("Zen 5: where glibc keeps freed memory, tokens a second", "finetune", "avx512_zen5", "kept: tokens/s", TRAINED, True),
    ("Zen 4: the same run, tokens a second", "finetune", "avx512", "tokens/s", TRAINED, True),
    ("peak anonymous memory of it, MB", "finetune", "avx512", "peak MB", TRAINED, False),
    ("Zen 4: where glibc keeps freed memory, tokens a second", "finetune", "avx512", "kept: tokens/s", TRAINED, True),
    ("peak anonymous memory of this one, MB", "finetune", "avx512", "kept: peak MB", TRAINED, False),
    ("Xeon with AMX: the same run, tokens a second", "finetune", "amx", "tokens/s", TRAINED, True),
    ("peak anonymous memory of it, MB", "finetune", "amx", "peak MB", TRAINED, False),
    ("Xeon with AMX: where glibc keeps freed memory, tokens a second", "finetune", "amx", "kept: tokens/s", TRAINED, True),
    ("peak anonymous memory of this one, MB", "finetune", "amx", "kept: peak MB", TRAINED, False),
    ("Zen 4: loading a 446 M Llama, seconds", "load", "avx512", "seconds", LOADED, False),
    ("peak anonymous memory of that, MiB", "load", "avx512", "peak anonymous MiB", LOADED, False),
]


def load(name: str, isa: str = "avx512") -> dict[str, Any]:
    """The newest committed result of a benchmark."""
    (path,) = sorted((HERE / "results").glob(f"{name}-{isa}.json")) or sorted((HERE / "results").glob(f"{name}.json"))
    return dict(json.loads(path.read_text()))


def table_of(result: dict[str, Any]) -> dict[str, Any]:
    """The table of a result that has one."""
    (table,) = result.get("tables", [result])
    return dict(table)


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table; numbers are right-aligned."""
    numeric = [all(re.fullmatch(r"[*+\-\d.,]*(?: .*)?", row[i]) for row in rows) for i in range(len(columns))]
    rule = "".join("---:|" if number else "---|" for number in numeric)
    return "\n".join([f"| {' | '.join(columns)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)])


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.9995 else f"{seconds * 1e3:.0f}"


def speed(isa: str = "avx512") -> str:
    """One line per op; ours is bold where a peer is faster."""
    rows = []
    for label, file, title, peers in SPEED:
        (found,) = (c for c in load(file, isa)["comparisons"] if c["title"] == title)
        times = {row["name"]: row["median"] for row in found["rows"]}
        torch, note = peers.get("torch", (None, ""))
        if torch:  # on CPUs without bf16 units torch is faster in fp32, or measured there alone
            torch = min((name for name in (torch, f"{torch} in fp32") if name in times), key=lambda name: times[name])
            note += " in fp32" if torch.endswith("in fp32") else ""
        others = [times.get("bitsandbytes"), times[torch] if torch else None]
        ours = milliseconds(times["halfbyte"])
        lost = any(other is not None and other < times["halfbyte"] for other in others)
        shown = [milliseconds(t) if t is not None else "" for t in others]
        rows.append([label, f"**{ours}**" if lost else ours, shown[0], f"{shown[1]} {note}".strip()])
    version = load("quantize", isa)["environment"]["versions"]["bitsandbytes"]
    return markdown(["milliseconds", "halfbyte", f"bitsandbytes {version}", "torch"], rows)


# Row of the README, title of the comparison, torch's case and what it is. Of microseconds, those of a graph where there is
# one.
GPU = [
    ("quantize bf16 to nf4, 1.07e9 weights", "quantize bf16 -> nf4 1.07e9", None),
    ("dequantize nf4 to bf16, 14336 x 4096", "dequantize nf4 14336x4096", None),
    ("linear nf4, 8192 x 8192, 1 token", "linear nf4 M=1 8192x8192", ("bf16 cuBLAS", "dense bf16")),
    ("the same, 16 tokens", "linear nf4 M=16 8192x8192", ("bf16 cuBLAS", "dense bf16")),
    ("linear nf4, 14336 x 4096, 64 tokens", "linear nf4 M=64 14336x4096", ("bf16 cuBLAS", "dense bf16")),
    ("the same, 128 tokens", "linear nf4 M=128 14336x4096", ("bf16 cuBLAS", "dense bf16")),
    ("the same, 256 tokens", "linear nf4 M=256 14336x4096", ("bf16 cuBLAS", "dense bf16")),
    ("the same, 512 tokens", "linear nf4 M=512 14336x4096", ("bf16 cuBLAS", "dense bf16")),
    ("LoRA r=16, 4096 x 4096, forward and backward, 4096 tokens", "QLoRA linear fwd+bwd r=16 M=4096",
     ("bf16 LoRA", "dense bf16")),
    ("`fp8_linear`, 4096 x 4096, 4096 tokens", "fp8_linear M=4096 4096x4096", ("bf16 cuBLAS", "dense bf16")),
    ("`int8_linear`, 4096 x 4096, 4096 tokens", "int8_linear M=4096 4096x4096", ("bf16 cuBLAS", "dense bf16")),
    ("AdamW8bit step, 2.15e9 bf16 parameters", "AdamW8 2.15e9 bf16", ("torch fused", "fused, bf16 state")),
    ("AdamW8bit step, 448 LoRA matrices of rank 16", "AdamW8 448 LoRA tensors", ("torch fused", "fused, bf16 state")),
    ("the same, in a graph", "AdamW8 448 LoRA tensors, captured", ("torch fused", "fused, bf16 state")),
]


def significant(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def gpu() -> str:
    """One line per op on a GPU; ours is bold where a peer is faster."""
    result, rows = load("gpu-h100"), []
    for label, title, torch in GPU:
        times = {row["who"]: row["graph"] or row["event"] for row in result["rows"] if row["title"] == title}
        others = [times.get("bitsandbytes"), times[torch[0]] if torch else None]
        lost = any(other is not None and other < times["halfbyte"] for other in others)
        ours, *shown = (significant(t) if t is not None else "" for t in (times["halfbyte"], *others))
        rows.append([label, f"**{ours}**" if lost else ours, shown[0], f"{shown[1]} {torch[1]}" if torch else ""])
    columns = ["microseconds", "halfbyte", f"bitsandbytes {result['versions']['bitsandbytes']}", f"torch {result['torch']}"]
    return markdown(columns, rows)


def gpu_training() -> str:
    """LoRA steps of an 8B-shaped model on a GPU."""
    steps = load("gpu-h100")["results"]["train_8b"]
    names = {"halfbyte": "halfbyte nf4", "bitsandbytes": "bitsandbytes nf4", "bf16": "dense bf16"}
    rows = [[names[who], *(significant(step[name]) for name in ("tokens_per_s", "peak_gb"))] for who, step in steps.items()]
    return markdown(["8B-shaped model, LoRA r=16, 4 x 2048 tokens", "tokens/s", "peak GB"], rows)


def whole_runs() -> str:
    """Training and loading, from start to end."""
    columns = ["halfbyte nf4", "bitsandbytes nf4", "dense bf16", "Quanto int4"]
    rows = []
    for label, file, ending, column, cases, more in WHOLE:
        table = table_of(load(file, ending))
        at = table["columns"].index(column)
        cells = {row[0]: row[at] for row in table["rows"]}
        values = [cells[cases[c]] if c in cases else "" for c in columns]
        peers = [float(value) for value in values[1:] if value]
        best = max(peers) if more else min(peers)
        if (float(values[0]) < best) if more else (float(values[0]) > best):
            values[0] = f"**{values[0]}**"
        rows.append([label, *values])
    return markdown(["", *columns], rows)


def accuracy() -> str:
    """Perplexity by format, and what calibration changes."""
    rows = [[row[0], row[1], row[2]] for row in table_of(load("perplexity"))["rows"]]
    return markdown(["SmolLM2-135M", "perplexity", "MB of parameters, the rest in float32"], rows)


def calibration() -> str:
    """Loss on held-out pages of calibrated and plain weights."""
    cases = {row[0]: row[:3] for row in table_of(load("calibration-smollm2"))["rows"]}
    wanted = ("dense", "nf4 absmax", "nf4 calibrated, same domain", "nf4 calibrated, Python source", "bitsandbytes nf4")
    rows = [cases[name] for name in wanted if name in cases]
    return markdown(["SmolLM2-135M, held-out pages", "nats per token", "over dense"], rows)


def plans() -> str:
    """The largest errors of the planner, by kind of run."""
    worst: dict[str, tuple[float, int]] = {}
    for case, _, _, error in table_of(load("plan"))["rows"]:
        kind = next((key.upper() for key in ("ddp", "fsdp1", "fsdp2") if f" {key} x" in case), "one process")
        largest, count = worst.get(kind, (0.0, 0))
        worst[kind] = (max(largest, abs(float(error))), count + 1)
    on_gpu = [abs(row["error"]) for row in load("gpu-h100")["results"]["plan"] if "error" in row]
    worst["an H100: one process, DDP and FSDP2 of one rank"] = (100 * max(on_gpu), len(on_gpu))
    rows = [[kind, str(count), f"{error:.1f} %"] for kind, (error, count) in worst.items()]
    return markdown(["predicted against measured peak", "set-ups", "largest error"], rows)


def memory() -> str:
    """Measured peaks of training steps of a small Llama, two ranks where sharded."""
    table = load("sharding")["tables"][0]
    wanted = ["model", "strategy", "model MB", "packed MB per rank", "peak MB training"]
    at = [table["columns"].index(name) for name in wanted]
    rows = [[row[i] for i in at[1:]] for row in table["rows"] if row[0] == "Llama"]
    return markdown([f"{wanted[0]}: Llama, nf4, LoRA", *wanted[2:]], rows)


def callbacks() -> str:
    """What each callback changes."""
    table = table_of(load("callbacks"))
    return markdown(table["columns"], table["rows"])


def support() -> str:
    """What works where; each line names the tests that prove it."""
    rows = [[row["what"], row["cpu"], row["cuda"]] for row in json.loads((HERE / "support.json").read_text())]
    return markdown(["", "CPU", "CUDA"], rows)


TABLES = {
    "support": support,
    "speed": speed,
    "speed amx": lambda: speed("amx"),
    "speed avx512_zen5": lambda: speed("avx512_zen5"),
    "speed avx2_zen2": lambda: speed("avx2_zen2"),
    "speed avx512_vnni": lambda: speed("avx512_vnni"),
    "whole runs": whole_runs,
    "gpu": gpu,
    "gpu training": gpu_training,
    "accuracy": accuracy,
    "calibration": calibration,
    "plans": plans,
    "memory": memory,
    "callbacks": callbacks,
}


def filled(text: str) -> str:
    """The README with every table made anew.

    Raises:
        KeyError: a marker names no table.
    """
    return re.sub(
        r"(<!-- table: ([\w ]+) -->\n).*?(\n<!-- end -->)", lambda m: m[1] + TABLES[m[2]]() + m[3], text, flags=re.DOTALL
    )
