"""benchmarks/predicted_cycles.py: what is handed to llvm-mca, and what is read of its answer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASE = "quantize bf16 to int8"


@pytest.fixture
def predicted_cycles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import predicted_cycles

    return predicted_cycles


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("vmulps (%rdi),%zmm1,%zmm2", "vmulps (%rdi),%zmm1,%zmm2"),
        ("jne    401234", "jne 1f"),
        ("jmp    401234", "jmp 1f"),
        ("call   401234", "nop"),
        ("ret", "nop"),
    ],
)
def test_assembly(predicted_cycles: ModuleType, instruction: str, expected: str) -> None:
    assert predicted_cycles.assembly(instruction) == expected


def test_executed(predicted_cycles: ModuleType, tmp_path: Path) -> None:
    """As many instructions as are counted without looking at them, and those that the kernel cannot do without."""
    program = predicted_cycles.instruction_counts.build("scalar", tmp_path)
    elements, instructions = predicted_cycles.executed(program, CASE, rows=1)
    assert (elements, len(instructions)) == predicted_cycles.instruction_counts.stepped(program, CASE, 1)
    assert sum(line.startswith("divss") for line in instructions) >= 1  # the scale's reciprocal
    assert sum(line.startswith("mulss") for line in instructions) >= elements
    assert float(predicted_cycles.measured(program, CASE)) > predicted_cycles.ELEMENTS  # a cycle an element is too few


def test_predicted(predicted_cycles: ModuleType, tmp_path: Path) -> None:
    """The cycles of all, and the largest of the units', of an answer as llvm-mca prints it."""
    tool = tmp_path / "llvm-mca"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "assert '-mcpu=znver4' in sys.argv and open(sys.argv[-1]).read() == 'nop\\n'\n"
        "print('Iterations:        1\\nTotal Cycles:      812\\n')\n"
        "print('Resource pressure per iteration:\\n[0]    [1]    [2]    \\n 3.00   -     705.5  \\n')\n"
    )
    tool.chmod(0o755)
    source = tmp_path / "executed.s"
    source.write_text("nop\n")
    assert predicted_cycles.predicted(str(tool), "znver4", source) == (812, 705.5)


def test_no_tool(predicted_cycles: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"no llvm-mca of version 16 or later: install LLVM \(Debian: llvm-22\)"):
        predicted_cycles.llvm_mca()
