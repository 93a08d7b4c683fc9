"""Every op on a GPU: the list of benchmarks/gpu_checks.py, and what needs a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load_checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_checks", ROOT / "benchmarks" / "gpu_checks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKS = load_checks().CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    torch.manual_seed(0)
    CHECKS[name](torch.device("cuda:0"))


@pytest.mark.parametrize("index", [-1, 50])
def test_embedding_index_out_of_range_is_a_device_assertion(index: int) -> None:
    """In a process of its own: the assertion ends the CUDA context."""
    code = f"""
import torch, halfbyte
packed = halfbyte.quantize(torch.randn(50, 64), "nf4").cuda()
halfbyte.ops.embedding(torch.tensor([3, {index}], device="cuda"), packed, "nf4", 64)
torch.cuda.synchronize()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "halfbyte::embedding: index out of range" in run.stdout + run.stderr
    assert "device-side assert" in run.stderr
