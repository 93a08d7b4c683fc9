"""ranks.py itself: what a rank does wrong must not get lost on its way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

FAILURES = {
    "assert rank == 0, 'no'": "AssertionError: no",
    "sys.exit(rank)": "rank 1:",
    "os.abort()": "rank 0:\nFatal Python",
}


@pytest.mark.parametrize("line", FAILURES)
def test_a_rank_that_fails_is_an_error(tmp_path: Path, line: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import faulthandler, os, sys; faulthandler.enable(); rank = int(os.environ['RANK'])\n{line}\n")
    with pytest.raises(AssertionError, match=FAILURES[line]):
        run_ranks(script)


def test_a_rank_prints_all_and_leaves_without_ending_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("NAME = __name__\n")
    script.write_text(
        "import atexit, os, sys; from beside import NAME; atexit.register(os.abort)\n"
        "print(__name__, NAME, *sys.argv[1:], os.environ['RANK'], end='')\n"
    )
    assert run_ranks(script, "a", "b") == ["__main__ beside a b 0", "__main__ beside a b 1"]
