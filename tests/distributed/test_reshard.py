"""Checkpoints of 2 ranks loaded by 3, and of 3 by 2: weights, packed rows, 8-bit moments (reshard_ranks.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

RANKS = Path(__file__).with_name("reshard_ranks.py")


def run(kind: str, folder: Path, *worlds: int) -> None:
    for stage, world in zip(("first", "second", "third"), worlds, strict=False):
        run_ranks(RANKS, kind, stage, str(folder), world=world)


def test_fsdp2_from_two_ranks_to_three(tmp_path: Path) -> None:
    run("fsdp2", tmp_path, 2, 3)


@pytest.mark.slow
def test_fsdp2_from_two_ranks_to_one_and_back(tmp_path: Path) -> None:
    run("fsdp2", tmp_path, 2, 1, 2)


@pytest.mark.slow
def test_fsdp2_from_three_ranks_to_two_and_back(tmp_path: Path) -> None:
    run("fsdp2", tmp_path, 3, 2, 3)


@pytest.mark.slow
def test_fsdp1_from_two_ranks_to_three_and_back(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run("fsdp1", tmp_path, 2, 3, 2)
