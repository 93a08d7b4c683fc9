"""FSDP2, DCP and DDP on two ranks (two_ranks.py), and their checkpoint read by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import two_ranks
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from halfbyte.optim import AdamW8bit, annotate_fsdp1
from halfbyte.optim.sharding import GlobalPiece, is_eligible


def test_two_ranks_then_one(tmp_path: Path) -> None:
    run_ranks(Path(two_ranks.__file__), str(tmp_path))

    # The same script's model and gradients, in this process alone.
    for name, build in two_ranks.OPTIMIZERS.items():
        single, loaded = two_ranks.model(name), two_ranks.model(name)
        reference, resumed = build(single.parameters()), build(loaded.parameters())
        two_ranks.train(single, reference, range(3))
        nn.init.zeros_(loaded[0].weight)
        weights, state = get_state_dict(loaded, resumed)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=str(tmp_path / name), no_dist=True)
        set_state_dict(loaded, resumed, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        two_ranks.check_equal(loaded, resumed, single, reference)
        two_ranks.train(single, reference, range(3, 5))
        two_ranks.train(loaded, resumed, range(3, 5))
        two_ranks.check_equal(loaded, resumed, single, reference)


def test_fsdp1_views_need_their_whole_shape() -> None:
    """FSDP1 shows 1-D pieces marked `_fsdp_flattened`; without whole shapes the state would follow the world size."""
    piece = nn.Parameter(torch.zeros(3000))
    piece._fsdp_flattened = True  # type: ignore[attr-defined]
    optimizer = AdamW8bit([piece])
    piece.grad = torch.ones(3000)
    with pytest.raises(ValueError, match=r"annotate_fsdp1\(model\) before the first step"):
        optimizer.step()
    for shape, eligible in (((64, 100), True), ((6400,), False), ((50, 60), False)):
        piece._halfbyte_global_piece = GlobalPiece(torch.Size(shape), 0)  # type: ignore[attr-defined]
        assert is_eligible(piece) is eligible
    with pytest.raises(ValueError, match="no FullyShardedDataParallel unit"):
        annotate_fsdp1(nn.Linear(2, 2))
