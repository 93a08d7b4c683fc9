"""Tensor-parallel plans of torch on packed layers (tensor_parallel_ranks.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

RANKS = Path(__file__).with_name("tensor_parallel_ranks.py")


def test_plans_equal_one_process_or_say_why_not() -> None:
    run_ranks(RANKS)


@pytest.mark.slow
def test_tensor_parallel_inside_fsdp2_on_four_ranks() -> None:
    run_ranks(RANKS, world=4)
