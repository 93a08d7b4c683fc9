"""What nvcc and ptxas made of the CUDA kernels, without a GPU: registers, spills, occupancy, instructions per element.

    python benchmarks/sass_counts.py [--only linear] [--json OUT.json]

Compiles csrc/cuda/*.cu for sm_90 with the flags of setup.py, reads ptxas' figures, and disassembles (nvdisasm of the toolkit,
of $NVDISASM, or of the triton package, which carries one). Instructions are counted along one way through the loop that does
the work: the one that touches the most vector memory, shuffles and tensor cores, and the shortest of these; loops inside it
count once. "issue at the floor" is the share of all issue slots (132 multiprocessors x 4 x 1.8 GHz) that the kernel needs where
its bytes move at 4.3 TB/s: above 100 % it cannot reach the memory floor, and below about 60 % issue slots are not its problem.
`make gpu` measures the same kernels on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
ISSUE = 132 * 4 * 1.8e9 * 32  # thread instructions a second, H200
COPY = 4.3e12  # bytes a second, H200
HOT = r"(LDG|STG)\S*\.(64|128)|LDS|SHFL|HMMA|IDP|STG\.E |LDG\.E "


@dataclass(frozen=True)
class Case:
    """One kernel instance whose work is counted.

    Attributes:
        name: as shown.
        file: stem of the source.
        symbol: regular expression of the mangled name.
        unit: regular expression of the instruction that stands for `elements` of a thread.
        elements: see `unit`.
        bytes: moved per element at least.
        loop: regular expression of an instruction in the loop that does the work; the smallest such loop is taken.
        note: what stands between the kernel and its floor.
    """

    name: str
    file: str
    symbol: str
    unit: str
    elements: float
    bytes: float
    loop: str
    note: str


BF16 = "13__nv_bfloat16"
CASES = [
    Case(
        "dequantize nf4 to bf16", "dequantize", f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE0ELb0E", r"STG\.E\.128", 8, 2.5625,
        "STG", "SHF and SHFL make a value, FMUL and half an F2FP the result: 3.4 of the instructions a weight; the rest is "
        "addressing, once per 32 weights. Issue is no limit; what remains is to keep 32 KB in flight, which 4 loads a lane at "
        "full occupancy do.",
    ),
    Case(
        "dequantize nf4-dq to bf16", "dequantize", f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE1ELb0E", r"STG\.E\.128", 8, 2.52,
        "STG", "As nf4, plus a conversion and an FFMA per 8 weights for the scale.",
    ),
    Case(
        "dequantize int8 to bf16", "dequantize", f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE2ELb0E", r"STG\.E\.128", 8, 3.0,
        "STG", "The byte conversion runs at a quarter of the rate (16 a clock), which is still twice what the bytes need.",
    ),
    Case(
        "dequantize fp8 to bf16", "dequantize", f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE3ELb0E", r"STG\.E\.128", 8, 3.0,
        "STG", "Codes are moved into floats by integer arithmetic, the same on every architecture; the conversion instruction of "
        "sm_89 would save 3 of them.",
    ),
    Case(
        "quantize bf16 to nf4", "quantize", f"quantize_blocks_kernelI{BF16}Lb0ELb1E", r"LDG\.E\.128", 8, 2.5625, r"LDG\.E\.128",
        "One product, one bucket, one comparison a value; the block's absmax is 3 shuffles, which the way below counts once.",
    ),
    Case(
        "quantize bf16 to int8, pass 2", "quantize", f"quantize_rows_8bit_kernelI{BF16}Lb0E", r"STG\.E\.64", 8, 3.0, r"STG\.E\.64",
        "Pass 1 reads the row for its absmax, pass 2 again, from L2: both are one way over the row.",
    ),
    Case(
        "linear nf4 bf16, M <= 8", "linear_small", f"linear_small_kernelI{BF16}Lb0ELi1E", "HMMA", 8, 0.5625, "HMMA",
        "A dot product of bytes makes the address, a shared load the two values: 1 instruction a weight, and a tensor core "
        "instruction per 8. Half of the issue slots are left at the floor, so latency decides: 2 KB in flight a warp, 16 warps.",
    ),
    Case(
        "linear nf4 bf16, M <= 16", "linear_small", f"linear_small_kernelI{BF16}Lb0ELi2E", "HMMA", 4, 0.5625, "HMMA",
        "The same decoding feeds a second tensor core instruction and a second set of sums.",
    ),
    Case(
        "linear nf4-dq bf16, M <= 8", "linear_small", f"linear_small_kernelI{BF16}Lb1ELi1E", "HMMA", 8, 0.52, "HMMA",
        "As nf4, plus the scales' decoding, per 32 weights of a lane.",
    ),
    Case(
        "linear_backward_input nf4 bf16, M <= 8", "linear_backward_small", f"linear_backward_small_kernelI{BF16}Lb0ELi1E", "HMMA", 8,
        0.5625, "HMMA", "The forward's decoding plus half a product with the scales a weight and the interleaving of two rows' "
        "nibbles. Rows are 16-row steps apart, so 4 addresses a step are made of 64 bits each.",
    ),
    Case(
        "linear_backward_input nf4 bf16, M <= 16", "linear_backward_small", f"linear_backward_small_kernelI{BF16}Lb0ELi2E", "HMMA", 4,
        0.5625, "HMMA", "As above with twice the sums: 128 registers, no spills.",
    ),
    Case(
        "int8_linear by dp4a, 8 tokens", "int8_linear", f"int8_linear_kernelI{BF16}", "IDP", 0.5, 1.0, "IDP",
        "Every token's codes are loaded again for each row, from L1. It is the way of M <= 16 and of shapes that "
        "aten::_int_mm refuses.",
    ),
    Case(
        "fp8_linear: tokens bf16 to e4m3", "fp8_linear", f"fp8_operands_kernelI{BF16}", r"LDG\.E\.128", 8, 3.0, r"LDG\.E\.128",
        "Read once, kept in registers between the absmax and the codes. The encoder is integer arithmetic.",
    ),
    Case(
        "AdamW, 8-bit moments, bf16 parameters", "optimizer", "optimizer_kernelILNS_13OptimizerRuleE0E", r"STG\.E\.64", 4, 10.06,
        r"STG\.E\.64", "Two correctly rounded divisions and a square root a parameter, two encoders. Stochastic rounding is off "
        "on this way.",
    ),
]


def nvdisasm() -> str:
    """Path of a disassembler."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else None
    for path in (os.environ.get("NVDISASM"), shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm", beside and str(beside)):
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
    flags = ["-std=c++20", "-O3", "-fmad=false", "-arch=sm_90", "-Xptxas=-v", "-cubin"]
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
        """CTAs a multiprocessor of sm_90 holds: 65536 registers in groups of 8 a thread, 227 KB with 1 KB a CTA, 2048 threads."""
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
        """(head, tail) of every backward branch."""
        for i, targets in enumerate(self.next):
            for target in targets:
                if target <= i and "BRA" in self.text[i]:
                    yield target, i

    def way(self, head: int, tail: int) -> list[str]:
        """The instructions of the way from head to tail with the most hot ones, and the fewest others."""
        worst = (-1, 0)
        best: dict[int, tuple[int, int]] = {tail: (0, 0)}
        follow: dict[int, int] = {}
        for i in range(tail, head - 1, -1):
            if i != tail:
                options = [(best.get(n, worst), n) for n in self.next[i] if i < n <= tail]
                score, chosen = max(options, default=(worst, -1))
                if score == worst:
                    continue
                best[i], follow[i] = score, chosen
            hot, others = best[i]
            best[i] = (hot + bool(re.search(HOT, self.text[i] + " ")), others - 1)
        at, taken = head, []
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
    around = [
        (head, tail)
        for head, tail in function.loops()
        if any(re.search(case.loop, text) for text in function.text[head : tail + 1])
    ]
    if not around:
        raise SystemExit(f"{case.name}: no loop holds {case.loop}")
    taken = function.way(*min(around, key=lambda loop: loop[1] - loop[0]))
    return len(taken), case.elements * sum(bool(re.search(case.unit, text)) for text in taken)


THREADS = {"optimizer": 128}  # of a CTA; 256 elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="source files whose name contains this")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "sass-sm90.json")
    args = parser.parse_args()
    stems = [path.stem for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu")) if args.only in path.stem]
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
        needed = each * COPY / case.bytes / ISSUE
        counts.append([case.name, instructions, f"{elements:g}", f"{each:.2f}", f"{ISSUE / (COPY / case.bytes):.1f}", f"{100 * needed:.0f} %"])
    tables = [
        {
            "title": "ptxas: registers a thread, bytes of shared memory and of spills, CTAs and threads a multiprocessor holds",
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
    where = f"nvcc {release[1] if release else '?'} for sm_90, compiled and not run; `make gpu` measures these kernels; commit {commit}."
    environment = {"cpu": "none: compiled for sm_90", "where": where, "commit": commit}
    notes = [f"- **{case.name}**: {case.note}" for case in CASES]
    args.json.write_text(
        json.dumps({"benchmark": "sass", "environment": environment, "tables": tables, "notes": notes}, indent=1) + "\n"
    )
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
