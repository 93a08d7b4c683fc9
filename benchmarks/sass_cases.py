"""What sass_counts.py counts: instances of the CUDA kernels, and what stands between each and its floor."""

from __future__ import annotations

from dataclasses import dataclass

COPY = 4.3e12  # bytes a second, H200
WGMMA = 790e12  # flop a second of cuBLAS, H200
MMA = 0.6 * WGMMA  # of mma.sync (csrc/cuda/linear_route.h)
HOT = r"(LDG|STG)\S*\.(64|128)|LDS|SHFL|HMMA|IDP|FMUL|STG\.E |LDG\.E "


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
            symbol=rf"wgmma_kernelI.*{weights}I{BF16}Lb{int('dq' in name)}ELi\dEEE.*Li{tokens}E",
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
            (*FORWARD, "nf4", 256, "shared memory comes first (linear_wgmma.cu); one CTA, all its shared memory dynamic."),
            (*FORWARD, "nf4-dq", 256, "as nf4, plus two scales' decoding a step."),
            (*BACKWARD, "nf4", 128, "as the forward, plus the interleaving of two rows' nibbles and a scale for each row."),
            (*BACKWARD, "nf4", 256, "shared memory and L2 come first here too; one CTA, all its shared memory dynamic."),
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
