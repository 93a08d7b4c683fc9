"""Writes benchmarks/README.md and the tables of other pages from the committed results, the rows we lose included.

    python benchmarks/table.py          # rewrites them
    python benchmarks/table.py --check  # fails if they are not what the results give
"""

from __future__ import annotations

import json
import sys
from typing import Any

from readme_tables import FLOORS, HERE, filled

HEAD = """# Benchmarks

`make bench` runs `bench_*.py` on this machine: every result is verified first, then the peers take turns in one process, on
buffers that no cache holds, with the floors in the same rounds: as many bytes copied, read or written, or as many
products of numbers that are in registers. A turn is a call that is not timed, then up to 5 in a row that are. Times are
medians of quiet samples, or the lower quintile where fewer than 5 were quiet. "times ours" is that row's time over
halfbyte's in the same rounds: **below 1 we lose**. Before commit 8e51d0d two rows on the same buffers, such as forward and
backward, ours or dense, found them in a large last-level cache in every second round: of those results the linear, lora,
int8_linear and quantize sections show less than weights from memory cost.

`gpu_check.py` (`make gpu`) does the same on a GPU: "gpu". What the compiler made of the CUDA kernels is under "sass"
(`sass_counts.py`); what llvm-mca makes of the CPU kernels, for CPUs that were not at hand, under "predicted_cycles".

This file is made from `results/*.json` by `python benchmarks/table.py`.
"""


def heading(result: dict[str, Any]) -> list[str]:
    """Name, hardware and versions."""
    env = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env.get("versions", {}).items())
    torch_isa = f" (torch: {env['torch_isa']})" if env.get("forced_isa") and "torch_isa" in env else ""
    where = env.get("where") or (
        f"{env['cpu']}, {env['isa']}{torch_isa}, {env['threads']} threads; {versions}; commit {env['commit']}."
    )
    return [f"## {result['benchmark']}", "", where, ""]


def plain(result: dict[str, Any]) -> str:
    """A benchmark that is one finished table (harness.save_table), or several, as Markdown."""
    lines = heading(result)
    for table in result.get("tables", [result]):
        rows = [[str(value) for value in row] for row in [table["columns"], *table["rows"]]]
        rule = "|---|" + "---:|" * (len(rows[0]) - 1)
        head, *body = [f"| {' | '.join(row)} |" for row in rows]
        lines += [table["title"], "", head, rule, *body, ""]
    return "\n".join([*lines, *result.get("notes", []), *[""] * ("notes" in result)])


def comparisons(result: dict[str, Any]) -> str:
    """A benchmark's interleaved comparisons as Markdown."""
    calls = result.get("turn_calls")
    turns = f"Up to {calls} timed calls a turn." if calls else "Older: one call a turn, timed."
    lines = [
        *heading(result),
        turns,
        "",
        "| work | case | ms | low .. high | times ours | quiet samples |",
        "|---|---|---:|---|---:|---:|",
    ]
    for comparison in result["comparisons"]:
        ours = next(row["median"] for row in comparison["rows"] if row["name"].startswith("halfbyte"))
        title = comparison["title"]
        for row in comparison["rows"]:
            ratio = row["median"] / ours
            is_peer = not row["name"].startswith("halfbyte") and row["name"] not in FLOORS
            shown = f"**{ratio:.2f}**" if is_peer and ratio < 1 else f"{ratio:.2f}"
            ms = f"{row['median'] * 1e3:.3f} | {row['low'] * 1e3:.3f} .. {row['high'] * 1e3:.3f}"
            lines.append(f"| {title} | {row['name']} | {ms} | {shown} | {row['quiet']} of {row['samples']} |")
            title = ""
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrites or checks the pages."""
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    made = "\n".join([HEAD, *(comparisons(r) if "comparisons" in r else plain(r) for r in results)])
    pages = [HERE.parent / "README.md", HERE.parent / "docs/callbacks.md"]
    for target, text in ((HERE / "README.md", made), *((page, filled(page.read_text())) for page in pages)):
        if "--check" not in sys.argv:
            target.write_text(text)
        elif target.read_text() != text:
            name = target.relative_to(HERE.parent)
            raise SystemExit(f"{name} is not what the results give: run python benchmarks/table.py")


if __name__ == "__main__":
    main()
