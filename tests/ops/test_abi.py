"""The traps of the stable ABI that are not about values: double loading, error types, grad mode, overhead."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte import _library
from halfbyte.testing import registered_ops

ROOT = Path(__file__).parents[2]


def python(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def test_a_second_copy_of_the_library_is_reported_not_mixed_in(tmp_path: Path) -> None:
    other = tmp_path / "libhalfbyte_cpu.so"
    shutil.copy(_library.LIBRARY_DIR / "libhalfbyte_cpu.so", other)
    done = python(
        f"import torch; torch.ops.load_library({str(other)!r}); import halfbyte\n"
        "try: halfbyte.quantize(torch.ones(1, 64))\n"
        "except RuntimeError as error: print(error)"
    )
    assert done.returncode == 0, done.stderr
    assert "halfbyte::quantize: the halfbyte ops are already registered by another copy" in done.stdout


def test_a_missing_library_is_reported_at_the_first_use(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "halfbyte", tmp_path / "halfbyte", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    done = python(
        "import torch, halfbyte; print('imported')\n"
        "try: halfbyte.quantize(torch.ones(1, 64))\n"
        "except RuntimeError as error: print(error)",
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported\nhalfbyte::quantize: ")
    assert "does not exist; build it with: pip install" in done.stdout


@pytest.mark.parametrize("isa", ["nonsense", "amx512"])
def test_an_unknown_isa_is_an_error_that_lists_what_exists(isa: str) -> None:
    done = python(
        "import torch, halfbyte\ntry: halfbyte.quantize(torch.ones(1, 64))\nexcept ValueError as error: print(error)",
        HALFBYTE_CPU_ISA=isa,
    )
    assert f"HALFBYTE_CPU_ISA={isa}: unknown, this build has" in done.stdout
    assert "scalar" in done.stdout


def test_every_kernel_that_calls_aten_guards_grad_mode() -> None:
    """torch_call_dispatcher appears in the bridge only, each time behind a NoGradGuard."""
    callers = [p for p in (ROOT / "csrc").rglob("*") if p.is_file() and "torch_call_dispatcher" in p.read_text()]
    assert [p.name for p in callers] == ["bridge.h"]
    functions = re.findall(r"\n(?:template[^\n]*\n)?inline [^;{]*\{(.*?)\n\}", callers[0].read_text(), re.DOTALL)
    calling = [body for body in functions if "torch_call_dispatcher" in body]
    assert calling
    assert all("NoGradGuard" in body for body in calling)


def test_no_native_kernel_takes_a_string() -> None:
    """`str` arguments leak at this ABI target; the two collectives name a process group, and their kernels are Python."""
    names = set(registered_ops()) - {"quantize_broadcast_", "quantize_scatter_"}
    assert names
    for name in names:
        assert "str" not in [str(a.type) for a in getattr(torch.ops.halfbyte, name).default._schema.arguments]


def test_overhead_of_an_op_stays_near_that_of_a_torch_op() -> None:
    """Fronts use no dispatcher helpers (narrow + view cost 4 us): a tiny linear may cost a few dispatches, not ten."""
    layer = halfbyte.nn.QuantLinear(64, 64, bias=False)
    dense = torch.nn.Linear(64, 64, bias=False)
    x = torch.randn(1, 64)

    def microseconds(function) -> float:
        best = float("inf")
        for _ in range(7):
            started = time.thread_time()
            for _ in range(500):
                function(x)
            best = min(best, (time.thread_time() - started) / 500 * 1e6)
        return best

    with torch.no_grad():
        ours, torchs = microseconds(layer), microseconds(dense)
    assert ours < 8 * torchs, f"{ours:.1f} us against {torchs:.1f} us of nn.Linear"


def test_parallel_regions_carry_exceptions_out() -> None:
    """torch's parallel_for loses an exception's type and text at this ABI target: only the bridge may call it."""
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    assert [p.name for p in sources if "stable::parallel_for(" in p.read_text()] == ["bridge.h"]
    assert "rethrow_exception" in (ROOT / "csrc/bridge.h").read_text()
