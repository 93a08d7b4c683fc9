"""Settings of every test, and the run of a test file again on other CPU kernels.

Under CI hypothesis draws the same examples each time; elsewhere it keeps looking for new ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from halfbyte._library import CPU_ISAS, cpu_isa

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@dataclass
class OtherIsa:
    """An instruction set that this CPU has, but that is not the one in use."""

    name: str

    def python(self, *arguments: str) -> None:
        """`python *arguments` on its kernels; a process that fails fails the test."""
        env = {**os.environ, "HALFBYTE_CPU_ISA": self.name, "PYTHONPATH": str(ROOT)}
        env.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]

    def tests(self, file: str, names: str = "") -> None:
        """The tests of `file`, or those whose names match `names` (pytest's -k)."""
        options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib")
        self.python("-m", "pytest", *options, *(("-k", names) if names else ()), file)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "other_isa" in metafunc.fixturenames:
        metafunc.parametrize("other_isa", [isa for isa in CPU_ISAS if isa != cpu_isa()], indirect=True)


@pytest.fixture
def other_isa(request: pytest.FixtureRequest) -> OtherIsa:
    """Each instruction set but the one in use: a test that takes this runs once for each."""
    if "HALFBYTE_CPU_ISA" in os.environ:
        pytest.skip("an instruction set was chosen for this run")
    higher = CPU_ISAS.index(request.param) > CPU_ISAS.index(cpu_isa())
    # The one that CPUs with a higher one need not have: Zen 4 has VNNI for AVX-512's vectors alone.
    if higher or (request.param == "avx2_vnni" and "avx_vnni" not in Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this CPU does not have {request.param}")
    return OtherIsa(request.param)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of many small operations: a second thread only waits for the first, and long where other processes keep it
    off its core."""
    with torch_threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield
