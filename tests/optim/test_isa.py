"""Every instruction set this machine has gives the oracle's bits, over a grid of rules, shapes and dtypes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNSUPPORTED = "this CPU does not have it"


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_equals_the_oracle_on_every_isa(isa: str) -> None:
    env = {**os.environ, "HALFBYTE_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "tests" / "optim" / "grid.py")
    run = subprocess.run(
        [sys.executable, script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if UNSUPPORTED in run.stderr or "unknown, this build has" in run.stderr:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stderr
