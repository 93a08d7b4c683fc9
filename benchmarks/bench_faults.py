"""What happens when something fails while three ranks load: who notices, how soon, and what is left.

    python benchmarks/bench_faults.py              # about 3 minutes of two cores
    python benchmarks/bench_faults.py --repeats 1 --only "receiver dies,flipped bit"

Three gloo processes load a small checkpoint in buckets of 4 KiB (tests/distributed/faults.py, which the tests run too). Time
is from the fault, or from the start of the load where it was there before, until the last surviving rank has raised or
recovered. Every row is verified: each survivor's message, one collective of the survivors afterwards, SHA-256 of every file
of checkpoint and cache before and after, and the right weights from the next load. A row that is not as it says fails.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/distributed"), str(ROOT / "tests/checkpoint")]

import faults  # noqa: E402
import harness  # noqa: E402
import torch  # noqa: E402


def short(message: str, folder: str) -> str:
    """An error's text without this run's paths and addresses, for one cell of a table."""
    message = re.sub(rf"{re.escape(folder)}/\S*?([^/\s]+)(?=[\s:;,)(]|$)", r"\1", message)
    message = re.sub(r"\[127\.0\.0\.1\]:\d+", "[address]", message).replace("load_quantized: ", "")
    return message if len(message) < 170 else f"{message[:167]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases, separated by commas")
    parser.add_argument(
        "--json", type=Path, help="where to write (default: benchmarks/results/faults.json; with --only nowhere)"
    )
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(faults.FAULTS)
    if unknown := [name for name in names if name not in faults.FAULTS]:
        parser.error(f"--only {','.join(unknown)!r} is no case; cases: {', '.join(faults.FAULTS)}")
    path = args.json or (None if args.only else ROOT / "benchmarks/results/faults.json")
    torch.set_num_threads(1)  # as the ranks have
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        outcomes = faults.run(names, Path(folder), args.repeats)
        for name, outcome in outcomes.items():
            fault = faults.FAULTS[name]
            rows.append(
                [
                    fault.title,
                    "all recover" if fault.text is None else "all survivors raise",
                    f"{statistics.median(outcome.seconds):.2f}",
                    f"{max(outcome.seconds):.2f}",
                    short(outcome.message, folder) or "nothing",
                    "works" + (" among the survivors" if fault.killed else ""),
                    "unharmed",
                ]
            )
    title = (
        f"Three ranks, of {args.repeats} repetitions the median and the worst time until the last surviving rank raised or "
        "recovered; messages as a rank without the fault sees them (or the source's warning)."
    )
    columns = ["fault", "outcome", "s", "worst s", "message", "training group afterwards", "checkpoint and cache on disk"]
    harness.save_table("faults", title, columns, rows, path, args.only)


if __name__ == "__main__":
    main()
