"""HalfbyteFSDP2Strategy and HalfbyteFSDPStrategy on two gloo processes (fsdp_worker.py), against loops on one process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from fsdp_worker import CLIP, Tower, TowerModule
from lightning.pytorch.strategies import StrategyRegistry
from lightning_models import RESUME_AT, STEPS, batch, losses_by_hand, trainer
from ranks import run_ranks
from torch import nn

from halfbyte import QuantizationError, init_quantized
from halfbyte.nn import QuantLinear
from lightning_plugin import HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy, HalfbytePrecision, load_from_checkpoint

WORKER = Path(__file__).with_name("fsdp_worker.py")
BOTH = pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])


def tower(seed: int = 0) -> Tower:
    with init_quantized("nf4"):
        return Tower(seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, list[dict]]:
    results = {}
    for kind in ("fsdp1", "fsdp2"):
        (folder / kind).mkdir()
        logs = run_ranks(WORKER, kind, str(folder / kind))
        results[kind] = [json.loads((folder / kind / f"rank{r}.json").read_text()) for r in range(2)]
        for result, log in zip(results[kind], logs, strict=True):
            result["log"] = log
    return results


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    return losses_by_hand(tower(), clip=CLIP, world=2)


@BOTH
@pytest.mark.parametrize("what", ["losses", "early", "by_hand", "checkpointed", "full", "folder"])
def test_losses_and_resumed_losses_equal_one_process(seen: dict, expected: list, kind: str, what: str) -> None:
    if what not in seen[kind][0]:
        assert (kind, what) in {("fsdp1", "by_hand"), ("fsdp2", "checkpointed")}
        return
    for rank in range(2):
        # "early": built in __init__, packed by convert_module. All are clipped by the norm over all ranks.
        assert seen[kind][rank][what] == pytest.approx(expected[rank], rel=5e-6)
        if what in ("full", "folder"):
            assert seen[kind][rank][what] == seen[kind][rank]["losses"]


@BOTH
def test_fit_validate_and_a_second_trainer(seen: dict, kind: str) -> None:
    net = tower()
    first = losses_by_hand(net, RESUME_AT, clip=CLIP, world=2)
    with torch.no_grad():
        evaluated = [
            [nn.functional.cross_entropy(net(x), y).item() for x, y in (batch(500 + i, rank, 2) for i in range(2))]
            for rank in range(2)
        ]
    second = losses_by_hand(net, STEPS, clip=CLIP, world=2)
    for rank in range(2):
        assert seen[kind][rank]["runs"]["losses"] == pytest.approx(first[rank] + second[rank], abs=1e-5)
        assert seen[kind][rank]["runs"]["evaluated"] == pytest.approx(evaluated[rank], abs=1e-5)


@BOTH
def test_a_full_checkpoint_is_that_of_one_process(seen: dict, folder: Path, expected: list, kind: str) -> None:
    path = folder / kind / "full.ckpt"
    saved = torch.load(path, weights_only=False)["state_dict"]
    single = TowerModule()
    single.net = tower()
    state = single.state_dict()
    assert list(saved) == list(state)
    for key, value in state.items():
        assert saved[key].dtype == value.dtype and saved[key].shape == value.shape, key
        if value.dtype == torch.uint8:
            assert torch.equal(saved[key], value), key
    loaded = load_from_checkpoint(TowerModule, path, weights_only=False, map_location="cpu")
    assert sum(isinstance(m, QuantLinear) for m in loaded.modules()) == 7
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in saved.items())
    resumed = TowerModule(seed=77)
    trainer(HalfbytePrecision("nf4"), gradient_clip_val=CLIP).fit(resumed, ckpt_path=path, weights_only=False)
    mean = [sum(losses) / 2 for losses in zip(*expected, strict=True)]
    assert resumed.losses == pytest.approx(mean[RESUME_AT:], abs=1e-5)


def test_a_dense_bf16_model_is_checkpointed_and_clipped(seen: dict) -> None:
    """precision="bf16-true" with recomputed blocks: metadata of recomputed tensors must be those of the forward."""
    net = Tower().to(torch.bfloat16)
    with torch.no_grad():
        first = [nn.functional.cross_entropy(net(batch(0, r, 2)[0]), batch(0, r, 2)[1]).item() for r in range(2)]
    for rank in range(2):
        losses = seen["fsdp1"][rank]["dense"]
        assert len(losses) == STEPS and losses[0] == pytest.approx(first[rank], abs=0.05)


@BOTH
def test_the_audit_is_printed_once_on_rank_0(seen: dict, kind: str) -> None:
    assert f"{kind}: " in seen[kind][0]["log"] and "expected peak per rank" in seen[kind][0]["log"]
    assert re.search(r"\nnet.layers.\* +3 +0.\d{3}\n", seen[kind][0]["log"])
    assert "expected peak" not in seen[kind][1]["log"]
    # The callback says it where none of our strategies has: for a module sharded by its own configure_model.
    assert seen[kind][0]["log"].count("Wrap audit") == (1 if kind == "fsdp2" else 0)


def test_a_module_that_is_sharded_already_is_left_alone_or_refused() -> None:
    """`_fsdp_flattened` is FSDP1's mark on the pieces it shows; DTensors come from the worker's ShardedByHand."""
    dense, packed = Tower(), tower()
    for net in (dense, packed):
        net.norm.weight._fsdp_flattened = True
    with pytest.raises(QuantizationError, match=r"sharded before its layers were quantized: first, layers.0.up"):
        HalfbytePrecision("nf4").convert_module(dense)
    before = [id(p) for p in packed.parameters()]
    assert [id(p) for p in HalfbytePrecision("nf4").convert_module(packed).parameters()] == before
    with pytest.raises(QuantizationError, match=r"trainable_dtype=bfloat16 can't be applied"):
        HalfbytePrecision("nf4", trainable_dtype="bfloat16").convert_module(packed)


def test_registered_by_name() -> None:
    assert type(StrategyRegistry.get("fsdp_halfbyte")) is HalfbyteFSDPStrategy
    assert type(StrategyRegistry.get("fsdp2_halfbyte")) is HalfbyteFSDP2Strategy


@pytest.mark.slow
def test_checkpoints_of_two_ranks_resume_on_one(seen: dict, folder: Path, expected: list) -> None:
    run_ranks(WORKER, "one_rank", str(folder), world=1)
    results = json.loads((folder / "rank0.json").read_text())
    mean = [sum(losses) / 2 for losses in zip(*expected, strict=True)][RESUME_AT:]
    assert len(results) == 6
    for name, losses in results.items():
        assert losses == pytest.approx(mean, abs=1e-5), name


@pytest.mark.slow
def test_hybrid_sharding_on_four_ranks(tmp_path: Path) -> None:
    """Two replicas of two shards; resumed runs equal uninterrupted ones exactly, which hybrid_worker.py asserts."""
    run_ranks(Path(__file__).with_name("hybrid_worker.py"), str(tmp_path), world=4)
    expected = losses_by_hand(tower(), clip=CLIP, world=4)
    for rank in range(4):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for kind in ("fsdp1", "fsdp2"):
            assert seen[kind] == pytest.approx(expected[rank], rel=1e-5)
