"""What ptxas says about the kernels, and the plumbing of the GPU benchmark: minutes of compiling, hence slow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import cuda_home

ROOT = Path(__file__).resolve().parents[2]
# Registers a thread that the launch bounds and the loads in flight were planned with.
LIMITS = {"dequantize": 42, "error_feedback": 80, "int8_linear": 80, "quantize": 64, "linear_small": 128, "optimizer": 102}


def test_every_kernel_file_has_a_limit() -> None:
    assert {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")} == set(LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("stem", LIMITS)
def test_no_spills_and_registers_as_planned(stem: str, tmp_path: Path) -> None:
    home = cuda_home()
    assert home is not None
    command = [
        f"{home}/bin/nvcc",
        "-std=c++20",
        "-O3",
        "-fmad=false",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
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
    assert max(spills) == 0
    assert max(registers) <= LIMITS[stem]


@pytest.mark.slow
def test_gpu_check_dry_run(tmp_path: Path) -> None:
    """Every section of benchmarks/gpu_check.py runs, on tiny sizes on the CPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--dry-run", "--json", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["failed"] == []
    assert {row["title"].split()[0] for row in result["rows"]} == {
        "dequantize", "quantize", "linear", "QLoRA", "int8_linear", "AdamW8"
    }
    assert result["train_8b"]["tokens_per_s"] > 0
    assert len(result["plan"]) >= 6
    assert max(abs(case["error"]) for case in result["plan"]) <= 0.1
