"""FSDP1 and FSDP2 on two gloo processes with transformers and PEFT; the comparisons are in fsdp_peft_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("peft")


@pytest.mark.slow
def test_lora_on_llama_and_qwen2_equals_one_process(tmp_path: Path) -> None:
    """Tied and untied, resumed, clipped, checkpointed, accumulated, in 8-bit AdamW, under mixed precision."""
    log = run_ranks(Path(__file__).with_name("fsdp_peft_worker.py"), str(tmp_path))[0]
    assert log.count("\nCASE ") == 2 * (4 * 2 + 3 + 3 + 2) + 4, log[-3000:]
