"""What gpu_check.py's JSON becomes: tables in which a lost row, a failure and what did not run can be seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_report

STATE: dict[str, Any] = {
    "device": "a GPU",
    "cpu": "a CPU",
    "torch": "2.11",
    "cuda": "13.0",
    "versions": {"bitsandbytes": "0.50"},
    "halfbyte": {"commit": "0123abc"},
    "rows": [
        {"title": "work", "who": "halfbyte", "event": 40.0, "graph": 20.0, "floor": 10.0, "spread": 0.0},
        {"title": "work", "who": "peer", "event": 30.0, "graph": 15.0, "floor": 10.0, "spread": 0.0},
        {"title": "step", "who": "halfbyte", "event": 8.0, "graph": None, "floor": 4.0, "spread": 0.0},
        {"title": "step", "who": "peer", "event": 12.0, "graph": None, "floor": 4.0, "spread": 0.0},
    ],
    "results": {
        "floors": {"copy_bytes_per_s": 3e12, "gemm_flop_per_s": 8e14},
        "host_cost": {"linear": 12.34},
        "train_8b": {
            "halfbyte": {"tokens_per_s": 9000.0, "step_s": 0.9, "peak_gb": 21.0, "build_s": 0.1, "build_peak_gb": 4.0}
        },
        "plan": [
            {"case": "near", "planned": 99, "measured": 100, "error": -0.01, "verdict": "PASS"},
            {"case": "none", "verdict": "not run: no library"},
        ],
    },
    "seconds": {"floors": 0.5, "linears": 2.0},
    "failed": ["linears"],
    "left_out": ["torchao: ImportError"],
    "not_run": ["hosts"],
}


def rows_of(state: dict[str, Any], title: str) -> list[list[str]]:
    (table,) = (table for table in gpu_report.tables(state) if title in table["title"])
    return [list(row) for row in table["rows"]]


def test_times_over_ours_are_those_of_graphs_where_there_are_any_and_lost_rows_are_bold() -> None:
    assert rows_of(STATE, "Times") == [
        ["work", "halfbyte", "40.0", "20.0", "10.0", "50 %", "1.00"],
        ["", "peer", "30.0", "15.0", "10.0", "67 %", "**0.75**"],
        ["step", "halfbyte", "8.0", "-", "4.0", "50 %", "1.00"],
        ["", "peer", "12.0", "-", "4.0", "33 %", "1.50"],
    ]


def test_a_failure_and_what_did_not_run_are_named() -> None:
    result = gpu_report.described(STATE)
    assert rows_of(STATE, "Checks") == [["floors", "0.5", "passed"], ["linears", "2.0", "FAILED"]]
    assert rows_of(STATE, "halfbyte.plan")[1] == ["none", "-", "-", "-", "not run: no library"]
    assert result["notes"] == ["Left out: torchao: ImportError", "Not run: hosts"]
    assert result["environment"]["commit"] == "0123abc"
    assert "bitsandbytes 0.50; commit 0123abc" in result["environment"]["where"]


@pytest.mark.parametrize("missing", ["floors", "train_8b", "plan"])
def test_sections_that_did_not_run_leave_no_table(missing: str) -> None:
    results = {name: value for name, value in STATE["results"].items() if name != missing}
    assert len(gpu_report.tables({**STATE, "results": results})) == len(gpu_report.tables(STATE)) - 1
    failed = {**STATE["results"], missing: None} if missing != "floors" else results
    assert len(gpu_report.tables({**STATE, "results": failed})) == len(gpu_report.tables(STATE)) - 1
