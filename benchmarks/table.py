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
    lines = [
        f"## {result['benchmark']}",
        "",
        f"{env['cpu']}, {env['isa']}, {env['threads']} threads; {versions}; commit {env['commit']}.",
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


def loading_table(result: dict[str, Any]) -> str:
    """The figures of bench_loading.py as Markdown."""
    env = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    low, high = env["load_average"]
    about = (
        f"A random Llama of {result['parameters'] / 1e6:.0f} M parameters in bf16 to nf4 on {result['ranks']} ranks "
        f"(`bench_loading.py`); {env['cpu']}, {env['isa']}, 1 thread per rank; {versions}; commit {env['commit']}. "
        f"Other work ran on the machine (load average {low:.0f} to {high:.0f} on {env['cores']} cores): times are upper "
        f"bounds, memory does not depend on it."
    )
    lines = [
        "## loading",
        "",
        about,
        "",
        "| case | s, slowest rank | peak anonymous MiB per rank | kept MiB per rank |",
        "|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        peaks, kept = (" / ".join(f"{size / 2**20:.0f}" for size in row[key]) for key in ("peak_bytes", "kept_bytes"))
        lines.append(f"| {row['case']} | {sorted(row['seconds'])[len(row['seconds']) // 2]:.2f} | {peaks} | {kept} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrites or checks benchmarks/README.md."""
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    text = "\n".join([HEAD, *(loading_table(r) if r["benchmark"] == "loading" else table(r) for r in results)])
    target = HERE / "README.md"
    if "--check" in sys.argv:
        if target.read_text() != text:
            raise SystemExit("benchmarks/README.md is not what the results give: run python benchmarks/table.py")
    else:
        target.write_text(text)


if __name__ == "__main__":
    main()
