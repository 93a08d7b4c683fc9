"""Fabric on two gloo processes (fabric_worker.py): DDP, FSDP2 by hand and by itself, FSDP1, against a loop on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fabric_worker import in_8_bits
from fsdp_worker import CLIP, Tower
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning_models import STEPS, batch, losses_by_hand
from ranks import run_ranks
from torch import nn

from halfbyte import init_quantized
from halfbyte.nn import QuantLinear
from lightning_plugin import FabricHalfbyteFSDP2Strategy, FabricHalfbyteFSDPStrategy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fabric")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict]:
    """What the ranks saw; that resuming equals going on, exactly, is asserted there."""
    run_ranks(Path(__file__).with_name("fabric_worker.py"), str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def tower() -> Tower:
    with init_quantized("nf4"):
        return Tower()


@pytest.mark.parametrize("name", ["ddp", "plain", "fsdp2", "fsdp1"])
def test_losses_with_clipping_and_resuming_equal_one_process(seen: list, name: str) -> None:
    expected = losses_by_hand(tower(), clip=CLIP, world=2)
    for rank in range(2):
        found = [losses for key, losses in seen[rank].items() if key.startswith(f"{name} full=")]
        assert len(found) == (1 if name == "ddp" else 2)
        for losses in found:
            assert losses == pytest.approx(expected[rank], rel=5e-6)


@pytest.mark.parametrize("form", ["full=True", "full=False"])
@pytest.mark.parametrize(("name", "bound"), [("fsdp2", 1e-5), ("fsdp1", 5e-3)])  # FSDP1 cuts inside rows of moments
def test_8_bit_moments_are_those_of_one_process(seen: list, name: str, bound: float, form: str) -> None:
    expected = losses_by_hand(tower(), clip=CLIP, world=2, optimizer=in_8_bits)
    for rank in range(2):
        assert seen[rank][f"8bit {name} {form}"] == pytest.approx(expected[rank], abs=bound)


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "plain"])
def test_a_full_checkpoint_loads_into_one_process(seen: list, folder: Path, name: str) -> None:
    assert seen
    net, other = tower(), Tower(seed=5)
    saved = torch.load(folder / f"{name}-True", weights_only=False)["model"]
    assert list(saved) == list(net.state_dict())
    with init_quantized("nf4"):
        other = Tower(seed=5)
    other.load_state_dict(saved)
    packed = [m for m in net.modules() if isinstance(m, QuantLinear)]
    loaded = [m for m in other.modules() if isinstance(m, QuantLinear)]
    assert len(packed) == 7 and all(torch.equal(a.packed, b.packed) for a, b in zip(packed, loaded, strict=True))


def test_a_dense_bf16_model_is_checkpointed_and_clipped(seen: list) -> None:
    net = Tower().to(torch.bfloat16)
    with torch.no_grad():
        first = [nn.functional.cross_entropy(net(batch(0, r, 2)[0]), batch(0, r, 2)[1]).item() for r in range(2)]
    for rank in range(2):
        assert len(seen[rank]["dense"]) == STEPS and seen[rank]["dense"][0] == pytest.approx(first[rank], abs=0.05)


def test_registered_by_name() -> None:
    assert type(STRATEGY_REGISTRY.get("fsdp_halfbyte")) is FabricHalfbyteFSDPStrategy
    assert type(STRATEGY_REGISTRY.get("fsdp2_halfbyte")) is FabricHalfbyteFSDP2Strategy
