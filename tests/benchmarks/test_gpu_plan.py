"""gpu_plan.py without a GPU: which set-ups it compares, that its steps run, and what it says when a plan is off."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gpu_plan() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_plan", ROOT / "benchmarks" / "gpu_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_plan"] = module  # its dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


def test_the_cases_cover_what_plans_are_asked_for(gpu_plan: ModuleType) -> None:
    cases = gpu_plan.CASES
    assert len({str(case) for case in cases}) == len(cases) >= 12
    assert {case.strategy for case in cases} == {"single", "ddp", "fsdp2"}
    assert {"nf4", "nf4-dq", "int8", "fp8", None} <= {case.format for case in cases}
    assert len({case.optimizer for case in cases}) >= 5
    for strategy in ("ddp", "fsdp2"):
        assert {bool(case.rank) for case in cases if case.strategy == strategy} == {True, False}
    assert {case.checkpointing for case in cases if case.mixture} == {True, False}


@pytest.mark.parametrize(
    "name",
    [
        "dense.*fsdp2",
        "nf4 LoRA.*ddp",
        pytest.param("nf4 LoRA.*fsdp2", marks=pytest.mark.slow),
        pytest.param("Qwen3-MoE nf4", marks=pytest.mark.slow),
    ],
)
def test_plans_of_one_rank_are_what_it_took(gpu_plan: ModuleType, name: str) -> None:
    (case,) = (case for case in gpu_plan.CASES if re.match(name, str(case)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gpu_plan.check_plan(case, CPU, True)
    assert abs(found["error"]) <= gpu_plan.LIMIT, found


def test_a_plan_that_is_off_fails_with_every_row(
    gpu_plan: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([{"planned": 90, "measured": 100, "error": -0.1}, {"planned": 111, "measured": 100, "error": 0.11}])

    def check(case: object, *_: object) -> object:
        row = next(found, None)
        if row is None:
            raise ValueError("out of cases")
        return row

    monkeypatch.setattr(gpu_plan, "check_plan", check)
    monkeypatch.setattr(gpu_plan, "CASES", gpu_plan.CASES[:3])
    with pytest.raises(gpu_plan.PlansError, match=r"FAIL \+11\.0%; .*FAIL: ValueError: out of cases") as raised:
        gpu_plan.check_plans(CPU, True)
    assert [row["verdict"][:4] for row in raised.value.found] == ["PASS", "FAIL", "FAIL"]
    assert "plans: FAIL, 1 of 3 within 10%" in capsys.readouterr().out
