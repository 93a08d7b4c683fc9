"""Clock cycles that llvm-mca predicts for the hot CPU kernels, on CPUs that need not be here, beside measured ones.

    python benchmarks/predicted_cycles.py [--only adamw] [--json OUT.json]      # needs llvm-mca (Debian's llvm-22)

A kernel is single-stepped as instruction_counts.py does it, and all that it executed is handed to llvm-mca, which knows a
CPU's units, latencies and window, and takes the best of caches, branches and fetching. A cell is the cycles of one core for
16 elements (weights or parameters), and in brackets those of its busiest unit, which no order of the same instructions could
beat. "here": measured on this machine, data in L2, the fastest of 200 runs; that is how far a prediction can be trusted.
Left out: kernels of many tokens, which products bound (each row of bench_linear.py has that floor, and LLVM 22 takes Zen 4's
dot products for three times as long as they are); LLVM's models of Ice Lake's and Sapphire Rapids' servers, which lack the
second unit of 512 bits that these CPUs have; Skylake's has it.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import instruction_counts
from instruction_counts import run

# An instruction set, LLVM's name of a CPU whose best it is, and the heading of the column.
COLUMNS = (
    ("avx2", "znver3", "avx2, Zen 3"),
    ("avx2", "znver4", "avx2, Zen 4"),
    ("avx512_vnni", "skylake-avx512", "avx512_vnni, Skylake"),
    ("avx512", "znver4", "avx512, Zen 4"),
)
ROWS = 12
ELEMENTS = 16
BOUND_BY_PRODUCTS = ("M=64", "int8_linear")
CASE_OF_ALL = "quantize bf16 to int8"  # every instruction set has it


def llvm_mca() -> str:
    """The newest llvm-mca of this machine: older ones do not know Zen 4."""
    names = ["llvm-mca", *(f"llvm-mca-{version}" for version in range(40, 15, -1))]
    found = [(version_of(path), path) for name in names if (path := shutil.which(name))]
    if not found or max(found)[0] < 16:
        raise SystemExit("no llvm-mca of version 16 or later: install LLVM (Debian: llvm-22)")
    return max(found)[1]


def version_of(tool: str) -> int:
    version = re.search(r"LLVM version (\d+)", run([tool, "--version"]))
    assert version is not None
    return int(version[1])


@functools.cache
def instructions_of(program: Path) -> dict[int, str]:
    """Instructions by their addresses."""
    lines = run(["objdump", "-d", "--no-show-raw-insn", str(program)]).splitlines()
    found = filter(None, (re.match(r"\s*([0-9a-f]+):\s+([^#<]+)", line) for line in lines))
    return {int(line[1], 16): line[2].strip() for line in found}


def executed(program: Path, case: str, rows: int = ROWS) -> tuple[int, list[str]]:
    """(elements, the instructions that the case executes, in order, as an assembler reads them)."""
    elements, *addresses = run([str(program), case, str(rows), "trace"]).split()
    code = instructions_of(program)
    return int(elements), [assembly(code.get(int(address, 16), "nop")) for address in addresses]


def assembly(instruction: str) -> str:
    """A jump goes on with the next line; calls, returns and what the C library does are single instructions."""
    if re.match(r"j[a-z]+ ", instruction):
        return "jmp 1f" if instruction.startswith("jmp") else "jne 1f"
    return "nop" if re.match(r"(call|ret|leave|push|pop|bnd|notrack|endbr)", instruction) else instruction


def predicted(tool: str, cpu: str, source: Path) -> tuple[int, float]:
    """(all cycles, those of the busiest unit)."""
    said = run([tool, "-mtriple=x86_64", f"-mcpu={cpu}", "-iterations=1", "-instruction-info=0", str(source)])
    cycles = re.search(r"Total Cycles:\s+(\d+)", said)
    pressure = re.search(r"Resource pressure per iteration:\n.*\n(.*)\n", said)
    assert cycles is not None
    assert pressure is not None
    return int(cycles[1]), max(float(x) for x in pressure[1].split() if x != "-")


def runs_here(program: Path) -> bool:
    done = subprocess.run([str(program), CASE_OF_ALL, str(ROWS)], capture_output=True, check=False)
    return done.returncode != -signal.SIGILL


def cell(tool: str, cpu: str, program: Path, case: str, folder: Path) -> str:
    elements, instructions = executed(program, case)
    if not elements:
        return "-"
    source = folder / "executed.s"
    source.write_text("\n".join([*instructions, "1:", ""]))
    cycles, busiest = (n * ELEMENTS / elements for n in predicted(tool, cpu, source))
    return f"{cycles:.2f} ({busiest:.2f})"


def measured(program: Path, case: str) -> str:
    elements, *cycles = map(int, run([str(program), case, str(ROWS), "time"]).split())
    return f"{cycles[0] * ELEMENTS / elements:.2f}" if cycles else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write the table as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = {isa: instruction_counts.build(isa, folder) for isa, _, _ in COLUMNS}
        every = run([str(programs["avx2"])]).splitlines()
        cases = [case for case in every if args.only in case and not any(text in case for text in BOUND_BY_PRODUCTS)]
        if not cases:
            parser.error(f"--only {args.only!r} is in the name of no case")
        tool = llvm_mca()
        if missing := [isa for isa, program in programs.items() if not runs_here(program)]:
            raise SystemExit(f"this CPU has no {', '.join(missing)}: what it cannot run cannot be single-stepped")
        head = ["kernel", *(heading for _, _, heading in COLUMNS), *(f"{isa}, here" for isa in programs)]
        print(f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}")
        rows = []
        for case in cases:
            cells = [cell(tool, cpu, programs[isa], case, folder) for isa, cpu, _ in COLUMNS]
            rows.append([case, *cells, *(measured(program, case) for program in programs.values())])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
    if args.json:
        import harness  # torch is only needed to say where this ran

        title = (
            f"Clock cycles of one core for {ELEMENTS} elements that llvm-mca {version_of(tool)} predicts; in brackets of "
            "the busiest unit; here: measured, data in cache"
        )
        harness.save_table("predicted_cycles", title, head, rows, args.json)


if __name__ == "__main__":
    main()
