"""DDP on two gloo processes: the losses of a plain loop over both shares, and one packed base on all ranks."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from lightning_models import STEPS, Module, batch, losses_by_hand, packed_net, trainer
from ranks import run_ranks
from torch import nn


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ddp")
    logs = run_ranks(Path(__file__).with_name("ddp_worker.py"), str(folder))
    return [{**json.loads((folder / f"rank{rank}.json").read_text()), "log": log} for rank, log in enumerate(logs)]


@pytest.mark.parametrize("where", ["init", "configure"])
def test_fit_and_resume_equal_the_loop_written_by_hand(trained: list[dict], where: str) -> None:
    expected = losses_by_hand(packed_net(), world=2)
    rows = [zlib.crc32(layer.weight.numpy()) for layer in (packed_net().first, packed_net().second)]
    for rank in range(2):
        assert trained[rank][where]["losses"] == pytest.approx(expected[rank], rel=5e-6)
        assert trained[rank][where]["resumed"] == trained[rank][where]["losses"]
        assert trained[rank][where]["rows"] == rows  # rank 0's; rank 1 was built from another seed


def test_clipping_uses_the_norm_of_the_averaged_gradients(trained: list[dict]) -> None:
    expected = losses_by_hand(packed_net(), clip=0.05, world=2)
    for rank in range(2):
        assert trained[rank]["clipped"] == pytest.approx(expected[rank], rel=5e-6)


@pytest.mark.parametrize("where", ["init", "configure"])
def test_validate_test_and_predict(trained: list[dict], where: str) -> None:
    net = packed_net()
    losses_by_hand(net, world=2)
    with torch.no_grad():
        for rank in range(2):
            shares = [batch(500 + index, rank, 2) for index in range(2)]
            expected = [nn.functional.cross_entropy(net(input), target).item() for input, target in shares]
            assert trained[rank][where]["evaluated"] == pytest.approx(expected * 2, abs=1e-5)
            predicted = [float(net(batch(index)[0]).sum()) for index in range(2)]
            assert trained[rank][where]["predicted"] == pytest.approx(predicted, abs=1e-4)


def test_the_report_is_printed_on_rank_0_only(trained: list[dict]) -> None:
    assert trained[0]["log"].count("Quantization report") == 2  # one per fit that asked for it
    assert "Quantization report" not in trained[1]["log"]


def test_fabric_fits_clips_saves_and_resumes(trained: list[dict]) -> None:
    expected = losses_by_hand(packed_net(), clip=0.5, world=2)
    for rank in range(2):
        assert trained[rank]["fabric"]["losses"] == pytest.approx(expected[rank], rel=5e-6)
        assert trained[rank]["fabric"]["rows"] == trained[0]["init"]["rows"]


@pytest.mark.parametrize("name", ["unfrozen", "packed later"])
def test_layers_that_change_while_it_trains(trained: list[dict], name: str) -> None:
    """The mean loss of the ranks is that of one process with both shares; what changed stays equal on both."""
    from lightning_plugin import GradualUnfreezing, HalfbytePrecision, ProgressiveQuantization

    plugin, callback = {
        "unfrozen": (HalfbytePrecision("nf4"), GradualUnfreezing({2: ["first"]})),
        "packed later": (None, ProgressiveQuantization({2: ["first"]})),
    }[name]
    alone = Module("configure")
    trainer(plugin, STEPS, callbacks=[callback]).fit(alone)
    first, second = (rank[name] for rank in trained)
    assert (first["weight"], first["dtype"]) == (second["weight"], second["dtype"])
    assert first["dtype"] == ("torch.float32" if name == "unfrozen" else "torch.uint8")
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(alone.losses, abs=1e-5)
