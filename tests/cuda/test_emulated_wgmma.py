"""The emulated wgmma itself: its addresses against what others generate, and that it notices mistakes of a kernel."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte
from halfbyte.formats import Format

from .conftest import HERE, ROOT, Emulated, compiled, linked
from .products import SCHEDULES, packed_product, scheduled
from .test_emulated_linear_backward_wgmma import check as check_backward
from .test_emulated_linear_wgmma import check


def address(emulated: Any, descriptor: int, n: int, k: int) -> int:
    emulated.c.wgmma_address_of.restype = ctypes.c_uint32
    return int(emulated.c.wgmma_address_of(ctypes.c_uint64(descriptor), n, k))


def test_a_tile_stored_and_described_as_triton_does_is_read_as_it_is(emulated: Any) -> None:
    """From Triton 3.9's PTX of a product of K-major bf16 tiles for sm_90.

    Thread i stores the 16 bytes of row i / 8, unit i % 8 at (16 i & 2032) ^ (2 i & 112), and of 16 rows further at + 2048;
    the descriptor is (start >> 4 & 0x7FFF) | 0x4000004000000000, with 2 added to the start for each 16 elements along k.
    """
    start, where = 3072, {}
    for rows in range(0, 256, 16):
        for i in range(128):
            at = start + rows * 128 + ((16 * i & 2032) ^ (2 * i & 112))
            for e in range(8):
                where[rows + i // 8, i % 8 * 8 + e] = at + 2 * e
    for step in range(4):
        triton = ((start >> 4) & 0x7FFF) + 2 * step | 0x4000004000000000
        for n in (*range(17), 100, 255):
            for k in range(16):
                assert address(emulated, triton, n, k) == where[n, 16 * step + k]


def test_our_descriptor_is_that_of_triton_and_cutlass(emulated: Any) -> None:
    """Fields of CUTLASS' GmmaDescriptor (mma_sm90_desc.hpp); the leading offset means nothing: CUTLASS has 1, Triton 0."""
    emulated.c.swizzled_descriptor_of.restype = ctypes.c_uint64
    for start in (1024, 3072, 200 * 1024):
        ours = emulated.c.swizzled_descriptor_of(start)
        assert ours & ~(0x3FFF << 16) == start >> 4 | 0x4000004000000000
        fields = [(ours >> bit) & mask for bit, mask in ((0, 0x3FFF), (16, 0x3FFF), (32, 0x3FFF), (49, 7), (62, 3))]
        assert fields == [start // 16, 1, 64, 0, 1]


@pytest.mark.parametrize(("mode", "bits"), [(0, 0), (1, 3), (2, 2), (3, 1)])
def test_addresses_are_those_of_the_canonical_layouts(emulated: Any, mode: int, bits: int) -> None:
    """Those of CUTLASS, mma_traits_sm90_gmma.hpp, in units of 16 bytes.

    Swizzle<bits,4,3> o ((8,m),2) : ((2^bits,SBO),1), and ((8,m),2) : ((1,SBO),LBO) without a swizzle.
    """
    start, leading, stride = 4096, 2048, 8192
    descriptor = start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62
    for n in range(64):
        for k in range(16):
            along = k // 8 * (leading if mode == 0 else 16)
            linear = start + n % 8 * 16 * 2**bits + n // 8 * stride + along
            row = linear // 128 % 2**bits
            assert address(emulated, descriptor, n, k) == (linear ^ row * 16) + k % 8 * 2
    if mode == 0:  # the one mode in which the leading offset counts
        assert address(emulated, descriptor ^ 1 << 16, 0, 8) != address(emulated, descriptor, 0, 8)


def test_matrices_loaded_transposed_are_what_a_tensor_core_takes(emulated: Any) -> None:
    """As Triton and others use ldmatrix.x4.trans for row-major B: registers 2 i and 2 i + 1 are columns 8 i .. 8 i + 7."""
    a, b, d = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.zeros(16, 16)
    emulated.call("emulated_row_major_product", a, b, d)
    torch.testing.assert_close(d.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


FENCE = "    fence_async_proxy();\n"
ARRIVED = "    __syncthreads();  // the next stage has arrived, the one before has been read by everyone\n"
FILL = "    fill(Constant<(Part + S::kSlots - 1) % kParts>(), before, s + (S::kSlots - 1) * kGroups);\n"
DECODE = "    decode(s + kGroups + group, next);\n"
FAULTS = {  # of both kernels
    "no wait at the end": ("  wgmma_wait<0>(sums);\n", ""),
    "a wait for one group too few": ("wgmma_wait<1>", "wgmma_wait<2>"),
    "no commit": ("    wgmma_commit();\n", ""),
    "no wgmma.fence": ("    wgmma_fence(sums, now);\n", "    if (s == begin) wgmma_fence(sums, now);\n"),
    "copies of the next step not waited for": ("copy_async_wait<S::kSlots - 3>", "copy_async_wait<S::kSlots - 2>"),
    "copies of the first step not waited for": ("copy_async_wait<S::kSlots - 2>", "copy_async_wait<S::kSlots - 1>"),
    "no fence.proxy.async": (FENCE + ARRIVED, ARRIVED),
    "fence.proxy.async before the wait": (
        "    copy_async_wait<S::kSlots - 3>();\n" + FENCE,
        FENCE + "    copy_async_wait<S::kSlots - 3>();\n",
    ),
    "fence.proxy.async after the barrier": (FENCE + ARRIVED, ARRIVED + FENCE),
    "no barrier in a step": (ARRIVED, ""),
    "no barrier before the sums leave": ("  __syncthreads();  // the rings have been read by everyone\n", ""),
    "a slot filled before the barrier": (ARRIVED + FILL, FILL + ARRIVED),
    "a slot filled one step early": (
        FILL,
        "    fill(Constant<(Part + S::kSlots - 1) % kParts>(), (before + 1) % S::kSlots, s + S::kSlots * kGroups);\n",
    ),
    "input not swizzled": ("(unit ^ (token % 8)) * 16", "unit * 16"),
    "input swizzled by too little": ("(unit ^ (token % 8)) * 16", "(unit ^ (token % 4)) * 16"),
    "ring not at a multiple of 1024": ("(0u - shared_address(shared)) % kSwizzledPattern", "0"),
    "stride between patterns": ("uint64_t(kSwizzledPattern >> 4) << 32", "uint64_t(kSwizzledRow >> 4) << 32"),
    "mode of the swizzle": ("uint64_t(1) << 62", "uint64_t(2) << 62"),
    "advance along k": ("kDescriptorK16 = 32 >> 4", "kDescriptorK16 = 16 >> 4"),
    "weights decoded into registers in use": (
        DECODE,
        "    decode(s + kGroups + group, now);\n    memcpy(next, now, sizeof now);\n",
    ),
    "codes read before their barrier": (ARRIVED + FILL + DECODE, DECODE + ARRIVED + FILL),
    "two slots of codes too few": ("- 1) / Weights::kSteps + 1;", "- 1) / Weights::kSteps - 1;"),
}
FORWARD_FAULTS = {
    "another place of a unit of codes": ("(unit ^ (row % 8)) * 16, tile", "unit * 16, tile"),
    "codes of the quad before": ("const int at = step * kStepRow;", "const int at = (step - 4 * (step > 0)) * kStepRow;"),
    "another step of the quad": ("(step % 4 * 2 + half)", "((step + 1) % 4 * 2 + half)"),
    "scales of the first quad": ("(uint32_t(step) >> a.block_shift) & ~3u;", "(uint32_t(step) >> a.block_shift) & ~7u;"),
    "another scale of the quad's": ("uint32_t(step) >> a.block_shift & 3u;", "uint32_t(step) >> a.block_shift & 1u;"),
    "scales of another row": ("return thread / 32 * kScaleLanes", "return thread / 64 * kScaleLanes"),
    "the first rows copied for others": ("thread / kUnits + i * kCopiedRows) + uint32_t", "thread / kUnits) + uint32_t"),
    "one group's sums alone": ("add_rn(of_group[0], of_group[kTurned])", "of_group[0]"),
    "both groups the same steps": ("tokens, begin + group);", "tokens, begin);"),
}
BACKWARD_FAULTS = {
    "units of codes not where they are read": ("(unit_ ^ (row_ / 2 % 4)) * 16", "unit_ * 16"),
    "another unit of codes": ("(mine ^ (lane / 2 % 4)) * 16", "(mine ^ (lane / 4 % 4)) * 16"),
    "the other warpgroup's byte": ("0x1111u * uint32_t(thread / 128 % 2)", "0x1111u * uint32_t(1 - thread / 128 % 2)"),
    "nibbles not interleaved": ("(one & 0xF0F0F0F0u) | ((two >> 4) & 0x0F0F0F0Fu)", "one"),
    "rows in the wrong order": ("low, high, 0x5410)", "low, high, 0x4510)"),
    "one scale for two rows": ("mul_rn(pair.y, scale.y)", "mul_rn(pair.y, scale.x)"),
    "another unit's scales": ("mine * kPitch)", "(3 - mine) * kPitch)"),
    "another block's byte": ("(first + uint32_t(32 * mine)) >> a.block_shift) % 4", "first >> a.block_shift) % 4"),
    "columns where they are not": ("8 * (output % 2) + g", "8 * (1 - output % 2) + g"),
    "scales of the first step": ("scales_ + ahead, within", "scales_, within"),
    "step and low exchanged": ("step.y, low.y", "low.y, step.y"),
    "half of a lane's rows": ("from_ + half * 32 * kRow", "from_"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        *itertools.product(("wgmma", "backward wgmma"), FAULTS),
        *(("wgmma", fault) for fault in FORWARD_FAULTS),
        *(("backward wgmma", fault) for fault in BACKWARD_FAULTS),
    ],
)
def test_every_seeded_fault_shows(emulated: Any, kernel: str, fault: str, tmp_path: Path) -> None:
    right, wrong = (FAULTS | FORWARD_FAULTS | BACKWARD_FAULTS)[fault]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=shutil.ignore_patterns("cpu"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "cuda").symlink_to(HERE)
    source = f"linear_{kernel.replace(' ', '_')}.cu"
    paths = [tmp_path / "csrc/cuda" / name for name in (source, "wgmma_pipeline.h", "wgmma.h")]
    texts = {path: path.read_text() for path in paths}
    assert sum(text.count(right) for text in texts.values()) == 1
    for path, text in texts.items():
        path.write_text(text.replace(right, wrong))
    changed = compiled(tmp_path / "csrc/cuda" / source, tmp_path / f"{source}.o")
    sources = [*(ROOT / "csrc" / "cuda").glob("*.cu"), *HERE.glob("*.cpp")]
    objects = [ROOT / "build" / "emulated_cuda" / f"{source.name}.o" for source in sources]  # of the emulated fixture
    others = [path for path in objects if path.name != changed.name]
    faulty = Emulated(linked([changed, *others], tmp_path / "faulty.so"))
    generator = torch.Generator().manual_seed(0)
    # Forward: two groups, 5 quads, the last of 3 steps. Backward: one group, a last step of 56 rows, blocks of which a tile
    # has several.
    sizes, names, holding = ((120, 1216, 130, 1216), ["nf4"], check)
    if kernel == "backward wgmma":
        sizes, names, holding = ((200, 1080, 1080, 144), ["nf4:32", "nf4-dq:32"], check_backward)
    m, reduction, n, k = sizes
    x = torch.randn(m, reduction, generator=generator).bfloat16()
    weight = torch.randn(n, k, generator=generator)
    problems = [(halfbyte.quantize(weight, name), Format.parse(name)) for name in names]

    def holds(kernels: Emulated, reverse: bool, late: bool) -> bool:
        with scheduled(kernels, reverse, late):
            try:
                for packed, fmt in problems:
                    holding(packed_product(kernels, kernel, x, packed, fmt, k), x, packed, fmt)
            except (AssertionError, RuntimeError):
                return False
        return True

    assert all(holds(emulated, *schedule) for schedule in SCHEDULES)
    found = [schedule for schedule in SCHEDULES if not holds(faulty, *schedule)]
    print(f"{kernel}, {fault}: shows with (reversed threads and copies at once, products late) {found}")
    assert found
