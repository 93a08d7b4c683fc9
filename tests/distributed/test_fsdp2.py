"""fully_shard: losses, bytes and refusals on two gloo processes (fsdp2_ranks.py); HSDP on four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from sharded_models import Model
from torch import nn

from halfbyte.distributed import fully_shard

RANKS = Path(__file__).with_name("fsdp2_ranks.py")


def test_two_ranks_equal_one_process_and_gather_packed_bytes() -> None:
    output = run_ranks(RANKS)[0]
    assert "MOVED" in output and "WORST" in output


@pytest.mark.slow
def test_hybrid_sharding_on_four_ranks() -> None:
    run_ranks(RANKS, world=4)


def test_older_torch_is_refused_for_packed_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.1+cpu")
    with pytest.raises(RuntimeError, match=r"from torch 2.12 on, this is 2.11.1.*HalfbyteFSDPStrategy"):
        fully_shard(Model())
    with pytest.raises(RuntimeError, match="no process group is initialized"):  # a dense model passes the version check
        fully_shard(nn.Linear(2, 2))
