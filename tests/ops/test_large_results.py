"""Large results on the CPU: the system is asked for pages of 2 MiB under them, where it leaves that to programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("large_results.py")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a system without such pages")
def test_large_results_ask_for_large_pages() -> None:
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    run = subprocess.run([sys.executable, PROGRAM], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    asked = json.loads(run.stdout)
    assert len(asked) == 8
    assert {op: tuple(of) for op, of in asked.items()} == dict.fromkeys(asked, (False, True))
