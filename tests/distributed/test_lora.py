"""The same block outputs on one device and under every strategy, with one node per adapted layer (lora_ranks.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("peft")


def test_block_outputs_are_those_of_one_device_bit_by_bit() -> None:
    assert all("DONE" in output for output in run_ranks(Path(__file__).with_name("lora_ranks.py")))
