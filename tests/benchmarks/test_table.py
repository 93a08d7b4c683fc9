"""benchmarks/README.md and the tables of README.md hold what the committed results say, and which machine made them."""

from __future__ import annotations

import json
import re
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


def test_no_table_of_the_readme_is_written_by_hand() -> None:
    readme = (ROOT / "README.md").read_text()
    made = re.sub(r"<!-- table: [\w ]+ -->.*?<!-- end -->", "", readme, flags=re.DOTALL)
    assert readme.count("<!-- table: ") >= 7
    assert not re.search(r"^\|", made, re.MULTILINE)


def test_every_line_of_what_works_names_tests_that_exist() -> None:
    rows = json.loads((ROOT / "benchmarks/support.json").read_text())
    assert len(rows) >= 10
    for row in rows:
        assert row["tests"], row["what"]
        for test in row["tests"]:
            assert "def test_" in (ROOT / test).read_text(), test
