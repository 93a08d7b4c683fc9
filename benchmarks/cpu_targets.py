"""Sets the CPU kernels' targets beside what was measured, per instruction set, from the committed results.

    python benchmarks/cpu_targets.py     # results/{dequantize,...}-{amx,avx512_zen5,...}.json -> cpu-targets.json

A cell says how often our time fits into the peer's, which shares of the floors (a copy of as many bytes, a read or a
write of those that are read or written, as many products in registers, in the same rounds) are reached, and how often the
floor's own time would fit into the peer's: no kernel could be ahead by more. Goals are those of the design for machines
with AVX-512 (with or without AMX) and with AVX2.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from readme_tables import FLOORS, HERE, STRICT_FLOORS

RESULTS = HERE / "results"
# Ending of a result's name: heading of its column. An instruction set, and the kind of CPU where there are two.
COLUMNS = {
    "amx": "amx",
    "avx512_zen5": "avx512, Zen 5",
    "avx512": "avx512, Zen 4",
    "avx512_vnni": "avx512_vnni, Ice Lake",
    "avx512_vnni_xeon": "avx512_vnni, forced on a Xeon with AMX",
    "avx512_vnni_zen4": "avx512_vnni, forced on Zen 4",
    "avx2_zen2": "avx2, Zen 2",
    "avx2": "avx2, Zen 3",
    "avx2_zen4": "avx2, forced on Zen 4",
    "avx2_zen5": "avx2, forced on Zen 5",
    "avx2_vnni": "avx2_vnni, forced on Zen 5",
    "scalar": "scalar",
}


class Target(NamedTuple):
    """One row: where it is measured, against whom, and the goals (AVX-512, AVX2) as ratios over the peer."""

    label: str
    benchmark: str
    title: str
    peer: str
    goals: tuple[str, str]
    ours: str = "halfbyte"


TARGETS = [
    Target("nf4 dequantize to bf16", "dequantize", "nf4 -> bf16, 4096 x 4096", "bitsandbytes", ("2.5x", "14x")),
    Target("nf4 quantize bf16", "quantize", "bf16 -> nf4, 4096 x 4096", "bitsandbytes", ("80x", "80x")),
    *(
        Target(f"linear nf4 M={m} {dtype}", benchmark, f"linear nf4 {dtype} M={m}", peer, goals)
        for benchmark, m, dtype, peer, goals in (
            ("linear", 1, "bf16", "bitsandbytes", ("1.4x", "28x")),
            ("linear", 4, "bf16", "bitsandbytes", ("4x", "17x")),
            ("linear", 16, "bf16", "bitsandbytes", ("4x", "9x")),
            ("linear", 64, "bf16", "bitsandbytes training", ("8x", "8x")),
            ("linear", 512, "bf16", "bitsandbytes training", ("2.4x", "7.5x")),
            ("linear", 1, "bf16", "dense", ("1x", "1.9x")),
            ("linear", 16, "bf16", "dense", ("1x", "1x")),
            ("linear", 64, "bf16", "dense", ("1x", "1x")),
            ("linear", 64, "fp32", "dense", ("1x", "1.3x")),
            ("linear", 512, "bf16", "dense", ("1x", "1x")),
            ("linear", 512, "fp32", "dense", ("1x", "1x")),
            ("linear", 2048, "bf16", "dense", ("1x", "1x")),
        )
    ),
    *(
        Target(f"state {op}, 16.8 M (SGD8bit)", "optimizer", "SGD8bit, 4096 x 4096 fp32", f"bitsandbytes {peer}", goals)
        for op, peer, goals in (
            ("quantize", "quantize_blockwise", ("12x", "18x")),
            ("dequantize", "dequantize_blockwise", ("2.5x", "9x")),
        )
    ),
    Target("AdamW8bit fp32, 16.8 M", "optimizer", "AdamW8bit, 4096 x 4096 fp32", "bitsandbytes", ("29x", "24x")),
    Target("AdamW8bit fp32, 16.8 M", "optimizer", "AdamW8bit, 4096 x 4096 fp32", "torch fused", ("1x", "0.8x")),
    Target("AdamW8bit bf16, 16.8 M", "optimizer", "AdamW8bit, 4096 x 4096 bf16", "torch fused", ("1x", "0.65x")),
]


def rows_of(benchmark: str, ending: str, title: str) -> dict[str, dict[str, Any]]:
    """The rows of one comparison by name; empty where it was not measured."""
    for path in sorted(RESULTS.glob(f"{benchmark}*-{ending}.json")):  # some have their longest rows in a file of their own
        for comparison in json.loads(path.read_text())["comparisons"]:
            if comparison["title"] == title:
                return {row["name"]: row for row in comparison["rows"]}
    return {}


def cell(target: Target, ending: str) -> str:
    """What was measured for one column."""
    rows = rows_of(target.benchmark, ending, target.title)
    if target.ours not in rows or target.peer not in rows:
        return "-"
    ours = rows[target.ours]["median"]
    peers = [target.peer, f"{target.peer} in fp32"]  # torch's bf16 product is the slower one on CPUs without bf16 units
    peer = min(rows[name]["median"] for name in peers if name in rows)
    text = f"{peer / ours:.2f}x"
    for floor in FLOORS:
        if floor in rows and rows[floor]["median"] > 0.1 * ours and target.peer.startswith("bitsandbytes"):
            text += f", {100 * rows[floor]['median'] / ours:.0f} % of {floor}"
    bound = max((rows[floor]["median"] for floor in STRICT_FLOORS if floor in rows), default=0.0)
    if ours / 2 < bound < ours:  # where ours is shorter, the floor's threads took longer to start than the work takes
        text += f" (at most {peer / bound:.2f}x)"
    return text


def main() -> None:
    """Writes results/cpu-targets.json."""
    columns = ["work", "over", "goal amx, avx512*", "goal avx2", *(f"measured {heading}" for heading in COLUMNS.values())]
    rows = [[t.label, t.peer, *t.goals, *(cell(t, ending) for ending in COLUMNS)] for t in TARGETS]
    sources = {path.name: json.loads(path.read_text())["environment"] for path in RESULTS.glob("*-*.json")}
    used = {name: env for name, env in sources.items() if name.removesuffix(".json").split("-")[-1] in COLUMNS}

    def seen(ending: str, key: str) -> str:
        return "/".join(sorted({str(env[key]) for name, env in used.items() if name.endswith(f"-{ending}.json")}))

    machines = "; ".join(
        f"{heading}: {seen(ending, 'cpu')}, {seen(ending, 'threads')} threads" for ending, heading in COLUMNS.items()
    )
    title = (
        "Targets of the CPU kernels beside the measured ratios (peer's time over ours) and shares of the floors; at most: "
        "what the slowest floor allows, where ours takes less than twice its time. Results of "
        f"the other sections. {machines}; columns that say so, and scalar, are forced on a machine that has more: "
        "halfbyte by HALFBYTE_CPU_ISA, torch by its own switches, bitsandbytes, which has none, not at all; \"dense\" is "
        "the faster of torch's products in bf16 and in fp32; a state is quantized and decoded in a whole step of SGD8bit."
    )
    environment = next(env for name, env in sorted(used.items()) if name.endswith("-avx512_zen5.json"))
    content = {"benchmark": "cpu-targets", "environment": environment, "title": title, "columns": columns, "rows": rows}
    (RESULTS / "cpu-targets.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
