"""What nvcc and ptxas made of the CUDA kernels, without a GPU: registers, spills, occupancy, instructions per element.

    python benchmarks/sass_counts.py [--only linear] [--json OUT.json]

Compiles csrc/cuda/*.cu for sm_90 with the flags of setup.py, reads ptxas' figures, and disassembles (nvdisasm of the
toolkit, of $NVDISASM, or of the triton package, which carries one). Instructions are counted along one way through the loop
that does the work: the one with the most wide accesses, shared memory, shuffles, products and tensor cores and no slow path
of a division; loops inside it count once. "issue at the floor" is the share of all issue slots (132 multiprocessors x 4 x
1.8 GHz) that the kernel needs where its bytes move at 4.3 TB/s, or its tensor cores do 474 TFLOP/s (790 by wgmma),
whichever takes longer: above 100 % it cannot reach that floor, below about 60 % issue slots are not its problem. `make gpu`
measures the same kernels on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sass_cases import CASES, Case

ROOT = Path(__file__).resolve().parent.parent
ISSUE = 132 * 4 * 1.8e9 * 32  # thread instructions a second, H200
COLD = r"CALL|FCHK|(LDG|STG)\S*\.U8"  # the slow ends of divisions, and rows that no wide access fits


def nvdisasm() -> str:
    """Path of a disassembler."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else None
    for path in (
        os.environ.get("NVDISASM"),
        shutil.which("nvdisasm"),
        "/usr/local/cuda/bin/nvdisasm",
        beside and str(beside),
    ):
        if path and Path(path).is_file():
            return path
    raise SystemExit("no nvdisasm: set $NVDISASM, or install a CUDA toolkit or triton, which carry one")


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compiled(stem: str, folder: Path) -> tuple[str, str]:
    """(what ptxas said, disassembly) of one source file."""
    cubin = str(folder / f"{stem}.cubin")
    arch = ["-gencode=arch=compute_90a,code=sm_90a", "-DHALFBYTE_HAVE_SM90A"] if "wgmma" in stem else ["-arch=sm_90"]
    flags = ["-std=c++20", "-O3", "-fmad=false", *arch, "-Xptxas=-v", "-cubin"]
    said = run([os.environ.get("NVCC", "nvcc"), *flags, str(ROOT / "csrc" / "cuda" / f"{stem}.cu"), "-o", cubin])
    return said, run([nvdisasm(), "-c", cubin])


@dataclass
class Kernel:
    """ptxas' figures of one kernel instance."""

    name: str
    registers: int
    shared: int
    spills: int

    def residents(self, threads: int) -> int:
        """CTAs a multiprocessor of sm_90 holds: 65536 registers by 8 a thread, 227 KB with 1 KB a CTA, 2048 threads."""
        registers = -(-self.registers // 8) * 8 * threads
        return min(65536 // registers, (227 * 1024) // (self.shared + 1024), 2048 // threads, 32)


def kernels_of(said: str) -> Iterator[Kernel]:
    for part in said.split("Compiling entry function '")[1:]:
        name, rest = part.split("'", 1)
        shared = re.search(r"(\d+) bytes smem", rest)
        registers = re.search(r"Used (\d+) registers", rest)
        assert registers is not None
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", rest))
        yield Kernel(name, int(registers[1]), int(shared[1]) if shared else 0, spills)


class Function:
    """Instructions of one kernel and where each may go on."""

    def __init__(self, listing: str) -> None:
        self.text: list[str] = []
        labels: dict[str, int] = {}
        for line in listing.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(self.text)
            elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
                self.text.append(instruction[1])
        self.next: list[list[int]] = []
        for i, text in enumerate(self.text):
            target = re.search(r"\bBRA(\.U)?\s.*`\((\.L_x_\d+)\)", text)  # not BRA.DIV: the way of diverged warps
            ends = re.match(r"(BRA(\.U)? [^P]|EXIT|RET)", text) and "P" not in text.split("`")[0].replace("BRA", "")
            self.next.append([labels[target[2]]] if target and target[2] in labels else [])
            if not ends and i + 1 < len(self.text):
                self.next[-1].append(i + 1)

    def loops(self) -> Iterator[tuple[int, int]]:
        """(head, tail) of every loop; a loop may have several branches back, the last one is its tail."""
        tails: dict[int, int] = {}
        for i, targets in enumerate(self.next):
            for target in targets:
                if target <= i and "BRA" in self.text[i]:
                    tails[target] = i
        yield from tails.items()

    def way(self, head: int, tail: int, hot: str) -> list[str]:
        """The instructions of the way from head to tail with the most hot ones, and the fewest others."""
        worst = (-(10**6), 0)
        best: dict[int, tuple[int, int]] = {tail: (0, 0)}
        follow: dict[int, int] = {}
        for i in range(tail, head - 1, -1):
            if i != tail:
                options = [(best.get(n, worst), n) for n in self.next[i] if i < n <= tail]
                score, chosen = max(options, default=(worst, -1))
                if score == worst:
                    continue
                best[i], follow[i] = score, chosen
            met, others = best[i]
            text = self.text[i] + " "
            best[i] = (met + bool(re.search(hot, text)) - 10 * bool(re.search(COLD, text)), others - 1)
        at, taken = head, []
        if head not in follow:
            return []  # code of diverged warps jumps back from behind the kernel's end
        while at != tail:
            taken.append(self.text[at])
            at = follow[at]
        return [*taken, self.text[tail]]


def function_of(listing: str, symbol: str) -> Function:
    """The kernel whose mangled name matches."""
    for part in re.split(r"^\.text\.", listing, flags=re.MULTILINE)[1:]:
        if re.search(symbol, part.split(":", 1)[0]):
            return Function(part)
    raise SystemExit(f"no kernel matches {symbol}")


def count(case: Case, listing: str) -> tuple[int, float]:
    """Instructions and elements of one turn of a thread."""
    function = function_of(listing, case.symbol)
    for head, tail in sorted(function.loops(), key=lambda loop: loop[1] - loop[0]):
        taken = function.way(head, tail, case.hot)
        if any(re.search(case.loop, text) for text in taken):
            break
    else:
        raise SystemExit(f"{case.name}: no loop holds {case.loop}")
    return len(taken), case.elements * sum(bool(re.search(case.unit, text)) for text in taken)


THREADS = {"optimizer": 128}  # of a CTA; 256 elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="source files whose name contains this")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "sass-sm90.json")
    args = parser.parse_args()
    stems = [path.stem for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu")) if args.only in path.stem]
    if not stems:
        parser.error(f"--only {args.only!r} is in the name of no source file of csrc/cuda")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        outputs = dict(zip(stems, pool.map(lambda stem: compiled(stem, Path(folder)), stems), strict=True))
    figures, counts = [], []
    for stem, (said, _) in outputs.items():
        kernels = list(kernels_of(said))
        threads = THREADS.get(stem, 256)
        residents = [kernel.residents(threads) for kernel in kernels]
        figures.append(
            [
                stem,
                len(kernels),
                f"{min(k.registers for k in kernels)} .. {max(k.registers for k in kernels)}",
                f"{min(k.shared for k in kernels)} .. {max(k.shared for k in kernels)}",
                sum(k.spills for k in kernels),
                f"{min(residents)} .. {max(residents)}",
                f"{min(residents) * threads} .. {max(residents) * threads}",
            ]
        )
    for case in CASES:
        if case.file not in outputs:
            continue
        instructions, elements = count(case, outputs[case.file][1])
        each = instructions / elements
        needed = each * case.floor / ISSUE
        slots = ISSUE / case.floor
        counts.append([case.name, instructions, f"{elements:g}", f"{each:.2f}", f"{slots:.1f}", f"{100 * needed:.0f} %"])
    tables = [
        {
            "title": "ptxas: registers a thread, shared memory and spills in bytes, CTAs and threads a multiprocessor holds",
            "columns": ["source", "kernels", "registers", "shared", "spills", "CTAs", "threads"],
            "rows": figures,
        },
        {
            "title": "SASS: instructions of one turn of a thread, the elements it handles, and the issue slots that leaves",
            "columns": ["kernel", "instructions", "elements", "per element", "slots at the floor", "issue at the floor"],
            "rows": counts,
        },
    ]
    for table in tables:
        print(f"\n{table['title']}")
        for row in [table["columns"], *table["rows"]]:
            print("  ".join(f"{value!s:<42}" if i == 0 else f"{value!s:>14}" for i, value in enumerate(row)))
    if args.only:
        return
    release = re.search(r"release ([\d.]+)", run([os.environ.get("NVCC", "nvcc"), "--version"]))
    commit = run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    version = release[1] if release else "of an unknown version"
    where = f"nvcc {version} for sm_90, compiled and not run (`make gpu` measures these kernels); commit {commit}."
    environment = {"cpu": "none: compiled for sm_90", "where": where, "commit": commit}
    notes = [f"- **{case.name}**: {case.note}" for case in CASES]
    args.json.write_text(
        json.dumps({"benchmark": "sass", "environment": environment, "tables": tables, "notes": notes}, indent=1) + "\n"
    )
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
