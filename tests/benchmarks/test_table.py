"""benchmarks/README.md holds what the committed results say, and says which machine made them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_table_is_made_from_the_committed_results() -> None:
    subprocess.run([sys.executable, "benchmarks/table.py", "--check"], cwd=ROOT, check=True)
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")]
    assert {result["benchmark"] for result in results} >= {"quantize", "dequantize", "linear", "optimizer"}
    for result in results:
        assert result["environment"]["cpu"]
        assert result["environment"]["commit"]
        tables = result.get("comparisons") or result.get("tables", [result])
        assert tables
        assert all(len(table["rows"]) >= 2 for table in tables)
