"""gpu_check.py without a GPU: what one section does to the others' results, and that the script runs through."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EMPTY = {
    "running": None,
    "results": {},
    "seconds": {},
    "errors": {},
    "rows": [],
    "failed": [],
    "left_out": [],
    "not_run": [],
}
CHILD = """
import json, os, sys, time
path, acts = sys.argv[1], json.loads(sys.argv[2])
for name, act in acts.items():
    state = json.load(open(path))
    if name in state["seconds"] or name in state["failed"]: continue
    state["running"] = name
    json.dump(state, open(path + "x", "w")); os.replace(path + "x", path)
    if act == "crash": os._exit(139)
    if act == "hang": time.sleep(60)
    state["rows"].append({"title": name}); state["seconds"][name] = 0.0; state["running"] = None
    json.dump(state, open(path + "x", "w")); os.replace(path + "x", path)
"""


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


def supervised(gpu_check: ModuleType, path: Path, acts: dict[str, str], limit: float, seconds: float) -> dict[str, object]:
    gpu_check.write(path, EMPTY)
    command = [sys.executable, "-c", CHILD, str(path), json.dumps(acts)]
    state = gpu_check.supervise(command, path, dict.fromkeys(acts, limit), time.time() + seconds, poll=0.05)
    assert state == json.loads(path.read_text())
    return state


def test_a_section_that_takes_the_process_with_it_costs_only_itself(gpu_check: ModuleType, tmp_path: Path) -> None:
    state = supervised(gpu_check, tmp_path / "r.json", {"a": "", "b": "crash", "c": "", "d": "hang", "e": ""}, 4.0, 60)
    assert [row["title"] for row in state["rows"]] == ["a", "c", "e"]
    assert state["failed"] == ["b", "d"]
    assert state["errors"] == {"b": "the process ended with status 139", "d": "it took longer than its 4 s"}
    assert state["not_run"] == []


def test_what_the_time_does_not_suffice_for_is_listed(gpu_check: ModuleType, tmp_path: Path) -> None:
    state = supervised(gpu_check, tmp_path / "r.json", {"a": "", "b": "hang", "c": "", "d": ""}, 60.0, 3)
    assert state["failed"] == ["b"]
    assert state["errors"]["b"] == "the time is up"
    assert state["not_run"] == ["c", "d"]


def test_a_child_that_cannot_start_ends_the_run(gpu_check: ModuleType, tmp_path: Path) -> None:
    gpu_check.write(tmp_path / "r.json", EMPTY)
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    state = gpu_check.supervise(command, tmp_path / "r.json", {"a": 1.0, "b": 1.0}, time.time() + 30, poll=0.05)
    assert state["failed"] == ["a", "b"]
    assert "status 3" in state["errors"]["a"]


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Every section of benchmarks/gpu_check.py runs, on tiny sizes on the CPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--dry-run", "--json", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    state = json.loads((tmp_path / "out.json").read_text())
    assert (state["failed"], state["not_run"], state["left_out"]) == ([], [], [])
    titles = {"dequantize", "quantize", "linear", "backward", "QLoRA", "int8_linear", "fp8_linear", "AdamW8"}
    assert {row["title"].split()[0] for row in state["rows"]} == titles
    assert {who: step["tokens_per_s"] > 0 for who, step in state["results"]["train_8b"].items()} == {
        "halfbyte": True,
        "bf16": True,
    }
    assert state["results"]["hosts"]["lightning_trainer_and_its_strategies"]["single"]["losses"]
    assert state["tables"]
    assert len(state["results"]["plan"]) >= 12
    assert max(abs(case["error"]) for case in state["results"]["plan"]) <= 0.1
    assert {case["verdict"] for case in state["results"]["plan"]} == {"PASS"}
