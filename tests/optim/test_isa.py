"""Every instruction set this machine has gives the oracle's bits, over a grid of rules, shapes and dtypes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

GRID = str(Path(__file__).with_name("grid.py"))


def test_equals_the_oracle() -> None:
    run = subprocess.run([sys.executable, GRID], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_equals_the_oracle_on_every_other_isa(other_isa: Any) -> None:
    other_isa.python(GRID)
