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
WGMMA = 790e12  # flop a second of cuBLAS, H200
MMA = 0.6 * WGMMA  # of mma.sync (csrc/cuda/linear_route.h)
HOT = r"(LDG|STG)\S*\.(64|128)|LDS|SHFL|HMMA|IDP|FMUL|STG\.E |LDG\.E "
COLD = r"CALL|FCHK|(LDG|STG)\S*\.U8"  # the slow ends of divisions, and rows that no wide access fits


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
        hot: what the way through the loop should meet.
        tokens: rows of input that an element (a weight) meets on tensor cores.
        flops: of the tensor core instructions, a second.
    """

    name: str
    file: str
    symbol: str
    unit: str
    elements: float
    bytes: float
    loop: str
    note: str
    hot: str = HOT
    tokens: int = 0
    flops: float = MMA

    @property
    def floor(self) -> float:
        """Elements a second at the floor."""
        return min(COPY / self.bytes, self.flops / (2 * self.tokens) if self.tokens else float("inf"))


BF16 = "13__nv_bfloat16"
FORWARD = "linear", ("linear_wgmma", "RowWeights")
BACKWARD = "linear_backward_input", ("linear_backward_wgmma", "ColumnWeights")
CASES = [
    Case(
        name="dequantize nf4 to bf16",
        file="dequantize",
        symbol=f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE0ELb0ELi1E",
        unit=r"STG\.E\.128",
        elements=8,
        bytes=2.5625,
        loop="STG",
        note="a shift and a shuffle make a value, a product and half a packing the result: 3.4 of the instructions a "
        "weight; the rest is addressing, once per 32 weights. Issue is no limit; what remains is latency: 4 loads"
        " of codes and of scales a lane are in flight at full occupancy, 32 KB of codes a multiprocessor.",
    ),
    Case(
        name="dequantize nf4-dq to bf16",
        file="dequantize",
        symbol=f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE1ELb0ELi1E",
        unit=r"STG\.E\.128",
        elements=8,
        bytes=2.52,
        loop="STG",
        note="as nf4, plus a conversion and a fused product per 8 weights for the scale.",
    ),
    Case(
        name="dequantize int8 to bf16",
        file="dequantize",
        symbol=f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE2ELb0ELi1E",
        unit=r"STG\.E\.128",
        elements=8,
        bytes=3.0,
        loop="STG",
        note="conversions of bytes run at 16 a clock, over twice what the bytes need.",
    ),
    Case(
        name="dequantize fp8 to bf16",
        file="dequantize",
        symbol=f"dequantize_segments_kernelI{BF16}LNS1_6SchemeE3ELb0ELi1E",
        unit=r"STG\.E\.128",
        elements=8,
        bytes=3.0,
        loop="STG",
        note="codes are moved into floats by integer arithmetic, the same on every architecture.",
    ),
    Case(
        name="quantize bf16 to nf4",
        file="quantize",
        symbol=f"quantize_segments_kernelI{BF16}Lb0ELb0ELi1E",
        unit=r"LDG\.E\.128",
        elements=8,
        bytes=2.5625,
        loop=r"LDG\.E\.128",
        note="over its issue slots at the floor, so 1.2 times the floor is the best it can do. Per value: unpacking, "
        "the maximum, a product, the bucket, two shuffles (threshold, rank), a comparison, two to pack: 10; the "
        "exact reciprocal, its check and the scale per 8 values are most of the rest.",
    ),
    Case(
        name="quantize bf16 to int8, second pass",
        file="quantize",
        symbol=f"quantize_rows_8bit_kernelI{BF16}Lb0ELi1E",
        unit=r"STG\.E\.64",
        elements=8,
        bytes=3.0,
        loop=r"STG\.E\.64",
        note="the first pass reads the row for its absmax, the second again, from L2.",
    ),
    Case(
        name="linear nf4 bf16, M <= 8",
        file="linear_small",
        symbol=f"linear_small_kernelI{BF16}Lb0ELi1E",
        unit="HMMA",
        elements=8,
        bytes=0.5625,
        loop="HMMA",
        note="a dot product of bytes makes the address and a shared load the two values of a byte: 1 instruction a "
        "weight; a tensor core instruction per 8. Half of the issue slots are free at the floor, shared memory is"
        " half busy, so latency decides: 2 KB a warp in flight, 16 warps a multiprocessor.",
    ),
    Case(
        name="linear nf4 bf16, M <= 16",
        file="linear_small",
        symbol=f"linear_small_kernelI{BF16}Lb0ELi2E",
        unit="HMMA",
        elements=4,
        bytes=0.5625,
        loop="HMMA",
        note="the same decoding feeds a second tensor core instruction and a second set of sums.",
    ),
    Case(
        name="linear nf4-dq bf16, M <= 8",
        file="linear_small",
        symbol=f"linear_small_kernelI{BF16}Lb1ELi1E",
        unit="HMMA",
        elements=8,
        bytes=0.52,
        loop="HMMA",
        note="as nf4, plus the scales' decoding per 32 weights of a lane.",
    ),
    Case(
        name="linear nf4 bf16, M = 32",
        file="linear_tiled",
        symbol=f"linear_tiled_kernelI{BF16}Lb0ELi4E",
        unit="HMMA",
        elements=2,
        bytes=0.5625,
        loop="HMMA",
        note="still bound by reading; shared memory, 32 cycles for 1024 weights (look-ups, input), is as busy as it can be.",
        tokens=32,
    ),
    Case(
        name="linear nf4 bf16, M = 64",
        file="linear_tiled",
        symbol=f"linear_tiled_kernelI{BF16}Lb0ELi8E",
        unit="HMMA",
        elements=1,
        bytes=0.5625,
        loop="HMMA",
        note="bound by tensor cores and, almost as much, by shared memory (linear_tiled.cu counts both); one CTA of 256 "
        "threads a multiprocessor, 96 KB of shared memory (64 of them dynamic, not in the first table).",
        tokens=64,
    ),
    Case(
        name="linear nf4 bf16, M = 128",
        file="linear_tiled",
        symbol=f"linear_tiled_kernelI{BF16}Lb0ELi16E",
        unit="HMMA",
        elements=0.5,
        bytes=0.5625,
        loop="HMMA",
        note="as M = 64; decoding is shared by twice the tokens.",
        tokens=128,
    ),
    *(
        Case(
            name=f"{op} {name} bf16, M = {tokens}, wgmma",
            file=file,
            symbol=f"wgmma_kernelI.*{weights}E{BF16}Lb{int('dq' in name)}ELi{tokens}E",
            unit="HGMMA",
            elements=8,
            bytes=0.5625,
            loop="HGMMA",
            note=note,
            hot=HOT + "|HGMMA|LDGSTS|LDSM",
            tokens=tokens,
            flops=WGMMA,
        )
        for op, (file, weights), name, tokens, note in (
            (*FORWARD, "nf4", 128, "two floats looked up, two products, a conversion make two weights; half of the slots."),
            (*FORWARD, "nf4", 256, "shared memory and L2 come first (linear_wgmma.cu); one CTA, 216 KB, all dynamic."),
            (*FORWARD, "nf4-dq", 256, "as nf4, plus two scales' decoding a step."),
            (*BACKWARD, "nf4", 128, "as the forward, plus the interleaving of two rows' nibbles and a scale for each row."),
            (*BACKWARD, "nf4", 256, "shared memory and L2 come first here too; one CTA, 219 KB, all dynamic."),
            (*BACKWARD, "nf4-dq", 256, "as nf4, plus 16 scales' decoding a step."),
        )
    ),
    Case(
        name="linear_backward_input nf4 bf16, M <= 8",
        file="linear_backward",
        symbol=f"linear_backward_kernelI{BF16}Lb0ELi1E",
        unit="HMMA",
        elements=8,
        bytes=0.5625,
        loop="HMMA",
        note="the forward's decoding, half a product with the scales a weight, the interleaving of two rows' nibbles, "
        "and 64-bit addresses of 4 rows and their scales per 64 weights. Three quarters of its issue slots at the "
        "floor: expect 60 to 70 % of it; decoding and multiplying apart moves 8 times the bytes.",
    ),
    Case(
        name="linear_backward_input nf4 bf16, M <= 16",
        file="linear_backward",
        symbol=f"linear_backward_kernelI{BF16}Lb0ELi2E",
        unit="HMMA",
        elements=4,
        bytes=0.5625,
        loop="HMMA",
        note="as above with twice the sums.",
    ),
    Case(
        name="linear_backward_input nf4 bf16, a group of 32",
        file="linear_backward",
        symbol=f"linear_backward_kernelI{BF16}Lb0ELi4E",
        unit="HMMA",
        elements=2,
        bytes=0.5625,
        loop="HMMA",
        note="each group of 32 rows of gradients decodes for itself: at its tensor cores' floor it fills the issue slots.",
        tokens=32,
    ),
    Case(
        name="int8_linear by dp4a, 8 tokens",
        file="int8_linear",
        symbol=f"int8_linear_kernelI{BF16}",
        unit="IDP",
        elements=0.5,
        bytes=1.0,
        loop="IDP",
        note="every token's codes are loaded again for each row, from L1: the way of M <= 16 and of shapes that "
        "aten::_int_mm refuses.",
    ),
    Case(
        name="fp8_linear, tokens bf16 to e4m3",
        file="fp8_linear",
        symbol=f"fp8_operands_kernelI{BF16}",
        unit=r"STG\.E\.64",
        elements=8,
        bytes=3.0,
        loop=r"BAR\.SYNC",
        note="read once, kept in registers between the absmax and the codes; two values a conversion.",
    ),
    Case(
        name="AdamW, 8-bit moments, bf16 parameters",
        file="optimizer",
        symbol="optimizer_kernelILNS_13OptimizerRuleE0E",
        unit=r"STG\.E\.64",
        elements=4,
        bytes=10.06,
        loop=r"STG\.E\.64",
        note="the way of whole blocks of bf16 parameters and gradients. Slightly over its issue slots at the floor: 20 ms "
        "for 8e9 parameters is the best this count allows (the goal is 22). Per parameter: two encoders of 14 and 12, a "
        "square root of 7 and a division of 6 (the exact ones' own steps, with one check for 8 of them), the rule, two "
        "look-ups of 2, and 12 of reductions, reciprocals, addressing and branches.",
        hot=r"STG\S*\.64",
    ),
]


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
