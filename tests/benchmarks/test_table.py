"""benchmarks/README.md, its tables and README.md's hold what the committed results say, and which machine made them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import table

ROOT = Path(__file__).parents[2]
COMPARISON = {
    "title": "linear",
    "rows": [
        {"name": name, "median": ms * 1e-3, "low": ms * 1e-3, "high": ms * 1e-3, "quiet": 9, "samples": 9}
        for name, ms in (
            ("halfbyte", 2.0),
            ("halfbyte backward", 4.0),
            ("dense", 3.0),
            ("dense backward", 3.0),
            ("bitsandbytes", 1.0),
            ("read", 0.5),
        )
    ],
}
RESULT = {
    "benchmark": "linear",
    "environment": {"cpu": "a CPU", "isa": "avx2", "threads": 2, "commit": "0123abc"},
    "comparisons": [COMPARISON, COMPARISON],
}


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


def test_a_page_and_the_list_of_losses_show_what_peers_win() -> None:
    page = table.comparisons("linear-avx2", RESULT)
    assert page.startswith("# linear (avx2)\n")
    shown = {cells[2]: cells[5] for line in page.splitlines() if len(cells := [c.strip() for c in line.split("|")]) > 6}
    assert shown["dense"] == "1.50"
    assert shown["dense backward"] == "**0.75**"  # a backward is compared with a backward
    assert shown["bitsandbytes"] == "**0.50**"
    assert shown["read"] == "0.25"  # a floor is nobody's gain
    lost = table.losses({"linear-avx2": RESULT}).splitlines()[-1]
    assert lost == (
        "| [linear-avx2](tables/linear-avx2.md) | 0123abc | dense backward: 2 of 2 (0.75); bitsandbytes: 2 of 2 (0.50) |"
    )


def test_pages_that_no_result_gives_are_seen_and_removed(tmp_path: Path) -> None:
    for folder in ("benchmarks", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / "halfbyte" / folder)
    shutil.copy(ROOT / "README.md", tmp_path / "halfbyte")
    stale, wrong = (tmp_path / "halfbyte/benchmarks/tables" / name for name in ("linear-gone.md", "linear-amx.md"))
    stale.write_text("a CPU of old")
    wrong.write_text(wrong.read_text().replace("halfbyte", "peer", 1))
    command = [sys.executable, str(tmp_path / "halfbyte/benchmarks/table.py")]
    found = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "benchmarks/tables/linear-gone.md, benchmarks/tables/linear-amx.md; run" in found.stderr
    subprocess.run(command, check=True)
    subprocess.run([*command, "--check"], check=True)
    assert not stale.exists()
    assert wrong.read_bytes() == (ROOT / "benchmarks/tables/linear-amx.md").read_bytes()


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
