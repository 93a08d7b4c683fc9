"""What ptxas says about the kernels: minutes of compiling, hence slow."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .conftest import cuda_home

ROOT = Path(__file__).resolve().parents[2]
# Registers a thread that the launch bounds and the loads in flight were planned with.
LIMITS = {
    "dequantize": 48,
    "dropout": 32,
    "error_feedback": 80,
    "fp8_linear": 64,
    "int8_linear": 80,
    "linear_backward": 255,
    "linear_backward_wgmma": 252,
    "linear_single": 80,
    "linear_small": 128,
    "linear_tiled": 255,
    "linear_wgmma": 240,
    "optimizer": 102,
    "quantize": 80,  # of lists; one tensor's kernels have 64
}
# Bytes: two groups for 128 rows of input have 128 registers a thread, and -dq reloads what it needs at the end.
SPILLS = {"linear_wgmma": 12}


def test_every_kernel_file_has_a_limit() -> None:
    assert {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")} == set(LIMITS)


# As setup.py has them (WGMMA_FILES).
PLAIN = ["-gencode=arch=compute_90,code=sm_90"]
WITH_WGMMA = ["-gencode=arch=compute_90a,code=sm_90a", "-DHALFBYTE_HAVE_SM90A"]
HOPPER = {"linear_wgmma": WITH_WGMMA, "linear_backward_wgmma": WITH_WGMMA}


@pytest.mark.slow
@pytest.mark.parametrize("stem", LIMITS)
def test_registers_and_spills_as_planned(stem: str, tmp_path: Path) -> None:
    home = cuda_home()
    assert home is not None
    command = [
        f"{home}/bin/nvcc",
        "-std=c++20",
        "-O3",
        "-fmad=false",
        "-gencode=arch=compute_80,code=sm_80",
        *HOPPER.get(stem, PLAIN),
        "-Xptxas=-v",
        "-c",
        f"{ROOT}/csrc/cuda/{stem}.cu",
        "-o",
        f"{tmp_path}/o",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert spills
    assert max(spills) <= SPILLS.get(stem, 0)
    assert max(registers) <= LIMITS[stem]
    assert "serialized" not in said  # C7510 and its like: ptxas found no way to leave wgmma asynchronous
