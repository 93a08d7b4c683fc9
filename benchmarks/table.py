"""Writes benchmarks/README.md, its tables/ and those of other pages from the committed results, the rows we lose included.

    python benchmarks/table.py          # rewrites them
    python benchmarks/table.py --check  # fails if they are not what the results give
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from readme_tables import FLOORS, HERE, filled

HEAD = """# Benchmarks

`make bench` runs `bench_*.py` on this machine: every result is verified first, then the peers take turns in one
process, on buffers that no cache holds, with the floors in the same rounds: as many bytes copied, read or written, or
as many products of numbers that are in registers. A turn is a call that is not timed, then up to 5 in a row that are.
Times are medians of quiet samples, or the lower quintile where fewer than 5 were quiet. "times ours" is that row's time
over halfbyte's in the same rounds, a backward's over halfbyte's backward: **below 1 we lose**. Before commit 8e51d0d
two rows on the same buffers, such as forward and backward, ours or dense, found them in a large last-level cache in
every second round: of those results the linear, lora, int8_linear and quantize sections show less than weights from
memory cost.

`gpu_check.py` (`make gpu`) does the same on a GPU: "gpu". What the compiler made of the CUDA kernels is under "sass"
(`sass_counts.py`); what llvm-mca makes of the CPU kernels, for CPUs that were not at hand, under "predicted_cycles".

Each table of turns has a page of its own, per instruction set and CPU: "linear" (amx) is
[tables/linear-amx.md](tables/linear-amx.md). Under "losses" is which of them say that a peer is faster. These pages are
made from `results/*.json` by `python benchmarks/table.py`.
"""


def heading(result: dict[str, Any]) -> list[str]:
    """Hardware and versions."""
    env = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env.get("versions", {}).items())
    torch_isa = f" (torch: {env['torch_isa']})" if env.get("forced_isa") and "torch_isa" in env else ""
    where = env.get("where") or (
        f"{env['cpu']}, {env['isa']}{torch_isa}, {env['threads']} threads; {versions}; commit {env['commit']}."
    )
    return [where, ""]


def plain(result: dict[str, Any]) -> str:
    """A benchmark that is one finished table (harness.save_table), or several, as Markdown."""
    lines = [f"## {result['benchmark']}", "", *heading(result)]
    for table in result.get("tables", [result]):
        rows = [[str(value) for value in row] for row in [table["columns"], *table["rows"]]]
        rule = "|---|" + "---:|" * (len(rows[0]) - 1)
        head, *body = [f"| {' | '.join(row)} |" for row in rows]
        lines += [table["title"], "", head, rule, *body, ""]
    return "\n".join([*lines, *result.get("notes", []), *[""] * ("notes" in result)])


def is_peer(name: str) -> bool:
    """Whether a row is a peer: neither ours, nor a floor, nor the time of an empty call."""
    return not name.startswith("halfbyte") and name not in (*FLOORS, "nothing")


def times_ours(comparison: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """A comparison's rows, each with its time over ours: a peer's backward over our backward, else over our first row."""
    times = {row["name"]: row["median"] for row in comparison["rows"]}
    first = next(time for name, time in times.items() if name.startswith("halfbyte"))
    found = []
    for row in comparison["rows"]:
        ours = times["halfbyte backward"] if is_peer(row["name"]) and "backward" in row["name"] else first
        found.append((row, row["median"] / ours))
    return found


def comparisons(name: str, result: dict[str, Any]) -> str:
    """A benchmark's interleaved comparisons as a page."""
    calls = result.get("turn_calls")
    turns = f"Up to {calls} timed calls a turn." if calls else "Older: one call a turn, timed."
    lines = [
        f"# {result['benchmark']} ({name.partition('-')[2]})",
        "",
        *heading(result),
        f"{turns} How it was measured: [../README.md](../README.md).",
        "",
        "| work | case | ms | low .. high | times ours | quiet samples |",
        "|---|---|---:|---|---:|---:|",
    ]
    for comparison in result["comparisons"]:
        title = comparison["title"]
        for row, ratio in times_ours(comparison):
            shown = f"**{ratio:.2f}**" if is_peer(row["name"]) and ratio < 1 else f"{ratio:.2f}"
            ms = f"{row['median'] * 1e3:.3f} | {row['low'] * 1e3:.3f} .. {row['high'] * 1e3:.3f}"
            lines.append(f"| {title} | {row['name']} | {ms} | {shown} | {row['quiet']} of {row['samples']} |")
            title = ""
    return "\n".join(lines) + "\n"


def losses(results: dict[str, dict[str, Any]]) -> str:
    """Which pages have rows where a peer is faster: how many of them, and the least of its time over ours.

    Args:
        results: those with comparisons, by the name of their page.
    """
    what = "Rows where the peer is faster, of those that it is in, and the least of its time over ours."
    lines = ["## losses", "", what, "", "| page | commit | peer: rows where it is faster |", "|---|---|---|"]
    for name, result in results.items():
        ratios: dict[str, list[float]] = {}
        for comparison in result["comparisons"]:
            for row, ratio in times_ours(comparison):
                if is_peer(row["name"]):
                    ratios.setdefault(row["name"], []).append(ratio)
        lost = [
            f"{peer}: {sum(r < 1 for r in found)} of {len(found)} ({min(found):.2f})"
            for peer, found in ratios.items()
            if min(found) < 1
        ]
        page = f"[{name}](tables/{name}.md)"
        lines.append(f"| {page} | {result['environment']['commit']} | {'; '.join(lost) or 'none'} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Every page that the results give."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}
    by_turns = {name: result for name, result in results.items() if "comparisons" in result}
    tables = [plain(result) for name, result in results.items() if name not in by_turns]
    made = {HERE / "tables" / f"{name}.md": comparisons(name, result) for name, result in by_turns.items()}
    made[HERE / "README.md"] = "\n".join([HEAD, losses(by_turns), *tables])
    return made | {page: filled(page.read_text()) for page in (HERE.parent / "README.md", HERE.parent / "docs/callbacks.md")}


def main() -> None:
    """Rewrites or checks the pages."""
    made = pages()
    left = [path for path in (HERE / "tables").glob("*.md") if path not in made]
    wrong = left + [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        if wrong:
            names = ", ".join(str(path.relative_to(HERE.parent)) for path in wrong)
            raise SystemExit(f"not what the results give: {names}; run python benchmarks/table.py")
        return
    (HERE / "tables").mkdir(exist_ok=True)
    for path in wrong:
        path.unlink() if path in left else path.write_text(made[path])


if __name__ == "__main__":
    main()
