"""FSDP's CPU offload on two gloo processes (offload_ranks.py)."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks


def test_offloading_changes_no_loss_no_weight_and_no_byte() -> None:
    assert all("DONE" in output for output in run_ranks(Path(__file__).with_name("offload_ranks.py")))
