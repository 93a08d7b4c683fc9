"""Writes benchmarks/README.md from the committed results, the rows we lose included.

    python benchmarks/table.py          # rewrites benchmarks/README.md
    python benchmarks/table.py --check  # fails if it is not what the results give
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEAD = """# Benchmarks

`make bench` runs `bench_*.py` on this machine: every result is verified first, then the peers run interleaved in one
process, on buffers rotated past the last-level cache, with the floors (copy, read) in the same rounds. Times are medians of
quiet samples, or the lower quintile where fewer than 5 were quiet. "times ours" is that row's time over halfbyte's in the
same rounds: **below 1 we lose**.

`gpu_check.py` (`make gpu`) does the same on a GPU; nobody has run it yet.

This file is made from `results/*.json` by `python benchmarks/table.py`.
"""


def table(result: dict[str, Any]) -> str:
    """One benchmark's comparisons as Markdown."""
    env = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    head = [
        f"## {result['benchmark']}",
        "",
        f"{env['cpu']}, {env['isa']}, {env['threads']} threads; {versions}; commit {env['commit']}.",
    ]
    if "tables" in result:  # not timings: the benchmark says what its columns are
        return "\n".join([*head, *(line for part in result["tables"] for line in _given(part))]) + "\n"
    lines = [
        *head,
        "",
        "| work | case | ms | low .. high | times ours | quiet samples |",
        "|---|---|---:|---|---:|---:|",
    ]
    for comparison in result["comparisons"]:
        ours = next(row["median"] for row in comparison["rows"] if row["name"].startswith("halfbyte"))
        title = comparison["title"]
        for row in comparison["rows"]:
            ratio = row["median"] / ours
            is_peer = not row["name"].startswith("halfbyte") and row["name"] not in ("copy", "read")
            shown = f"**{ratio:.2f}**" if is_peer and ratio < 1 else f"{ratio:.2f}"
            ms = f"{row['median'] * 1e3:.3f} | {row['low'] * 1e3:.3f} .. {row['high'] * 1e3:.3f}"
            lines.append(f"| {title} | {row['name']} | {ms} | {shown} | {row['quiet']} of {row['samples']} |")
            title = ""
    return "\n".join(lines) + "\n"


def _given(part: dict[str, Any]) -> list[str]:
    """A table with the columns it brings; all but the first two are numbers."""
    rule = "|".join("---" if i < 2 else "---:" for i in range(len(part["columns"])))
    rows = [" | ".join(row) for row in [part["columns"], *part["rows"]]]
    return ["", f"{part['title']}:", "", f"| {rows[0]} |", f"|{rule}|", *(f"| {row} |" for row in rows[1:])]


def main() -> None:
    """Rewrites or checks benchmarks/README.md."""
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    text = "\n".join([HEAD, *(table(result) for result in results)])
    target = HERE / "README.md"
    if "--check" in sys.argv:
        if target.read_text() != text:
            raise SystemExit("benchmarks/README.md is not what the results give: run python benchmarks/table.py")
    else:
        target.write_text(text)


if __name__ == "__main__":
    main()
