"""One rank makes a model for all (replicate_ranks.py on two gloo processes)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

from halfbyte.distributed import replicate

RANKS = Path(__file__).with_name("replicate_ranks.py")


def test_models_arrive_as_they_were_made_and_failures_everywhere(tmp_path: Path) -> None:
    assert all("DONE" in output for output in run_ranks(RANKS, str(tmp_path)))


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="no process group is initialized"):
        replicate(list)
