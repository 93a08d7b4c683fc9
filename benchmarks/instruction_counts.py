"""Instructions per element of the hot CPU kernels, per instruction set: repeatable on any machine, however busy.

    python benchmarks/instruction_counts.py [--isa avx2] [--only linear]

Counts are callgrind's (valgrind) for plain C++ and AVX2. Valgrind knows no AVX-512: there a child is single-stepped
through the kernel, which gives the same number where both work (`--check` shows it on AVX2). Two sizes are run and
subtracted, so that setting up does not count. "element" is a weight (linear: for all M tokens together), or a parameter
of an optimizer. Runs the kernels alone, without torch, from the objects that `pip install -e .` left under build/.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ISAS = ("scalar", "avx2", "avx512")
ROWS = (24, 72)  # whole panels of 12 and of 192 would be even better, and take the stepper minutes


def build(isa: str, folder: Path) -> Path:
    """The driver linked with one instruction set's kernels."""
    kernels = ROOT / "build" / "objects" / "cpu" / f"isa_{isa}.cpp.o"
    if not kernels.is_file():
        raise SystemExit(f"{kernels.relative_to(ROOT)} does not exist: build halfbyte in this checkout first")
    program = folder / f"instructions-{isa}"
    source = str(ROOT / "benchmarks" / "instructions.cpp")
    table = f"-DHALFBYTE_TABLE=halfbyte_kernels_{isa}"
    subprocess.run(["g++", "-std=c++20", "-O2", "-no-pie", table, source, str(kernels), "-o", str(program)], check=True)
    return program


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def stepped(program: Path, case: str, rows: int) -> tuple[int, int]:
    """(elements, instructions) by single-stepping."""
    elements, *steps = map(int, run([str(program), case, str(rows), "count"]).split())
    return elements, sum(steps)  # none where the instruction set has no such kernel


def collected(program: Path, case: str, rows: int) -> tuple[int, int]:
    """(elements, instructions) by callgrind."""
    tool = ["valgrind", "--tool=callgrind", "--toggle-collect=measured", "--callgrind-out-file=/dev/null"]
    said = run([*tool, str(program), case, str(rows)])
    elements = re.search(r"^(\d+)$", said, re.MULTILINE)
    instructions = re.search(r"Collected : (\d+)", said)
    assert elements is not None
    assert instructions is not None
    return int(elements[1]), int(instructions[1])


def per_element(program: Path, case: str, isa: str) -> float | None:
    """Instructions per element; None where the instruction set has no such kernel."""
    count = collected if isa in ("scalar", "avx2") else stepped  # what valgrind knows
    (few, less), (many, more) = (count(program, case, rows) for rows in ROWS)
    return (more - less) / (many - few) if many > few else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=",".join(ISAS), help="instruction sets, comma-separated")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--check", action="store_true", help="compare both ways of counting on AVX2, then stop")
    parser.add_argument("--json", type=Path, help="where to write the table as JSON")
    args = parser.parse_args()
    isas = args.isa.split(",")
    with tempfile.TemporaryDirectory() as folder:
        if args.check:
            program = build("avx2", Path(folder))
            for case in ("quantize bf16 to nf4", "linear nf4 M=1 in fp32"):
                print(case, *(count(program, case, ROWS[1]) for count in (collected, stepped)))
            return
        programs = {isa: build(isa, Path(folder)) for isa in isas}
        cases = [name for name in run([str(programs[isas[0]])]).splitlines() if args.only in name]
        if not cases:
            parser.error(f"--only {args.only!r} is in the name of no case")
        print(f"| instructions per element | {' | '.join(isas)} |\n|---|{'---:|' * len(isas)}")
        table: dict[str, dict[str, float | None]] = {}
        for case in cases:
            table[case] = {isa: per_element(programs[isa], case, isa) for isa in isas}
            shown = ("-" if value is None else f"{value:.2f}" for value in table[case].values())
            print(f"| {case} | {' | '.join(shown)} |", flush=True)
    if args.json:
        import harness  # torch is only needed to say where this ran

        title = "Instructions per element (a weight, or a parameter of an optimizer), whatever the machine is busy with"
        rows = [[case, *("-" if n is None else f"{n:.2f}" for n in counts.values())] for case, counts in table.items()]
        harness.save_table("instructions", title, ["kernel", *isas], rows, args.json)


if __name__ == "__main__":
    main()
