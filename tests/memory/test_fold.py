"""A folded model's plan is that of the whole one, byte for byte; models that can't be folded are simulated whole."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.memory.fold import fold_
from halfbyte.memory.simulate import simulate
from halfbyte.memory.subject import Subject, make_subject

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def folder(path: Path, kind: str, **sizes: Any) -> Path:
    import transformers

    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, name)(architectures=[f"{kind}ForCausalLM"], **sizes)
    config.save_pretrained(path)
    return path


def both(source: Any, **arguments: Any) -> tuple[Subject, dict[str, int], dict[str, int]]:
    """The folded subject, and the rows of the folded and of the whole model."""
    step = {"batch_size": 2, "seq_len": 32, "optimizer": "adamw8bit", "strategy": "single", "world_size": 1}
    step |= {"checkpointing": True, **{k: v for k, v in arguments.items() if k in (*step, "checkpointing")}}
    subject = {"format": None, "lora_rank": None, "dtype": None, "device": "cpu", "batch": None, "step": None}
    subject |= {k: v for k, v in arguments.items() if k in subject}
    folded, whole = (make_subject(source, **subject, folded=each) for each in (True, False))
    return folded, *(dict(simulate(each, **step).at_peak) for each in (folded, whole))


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ({"format": "nf4", "lora_rank": 4}, 5),
        ({"checkpointing": False, "optimizer": "adamw"}, 5),
        ({"checkpointing": False, "format": "nf4", "lora_rank": 4, "strategy": "fsdp1", "world_size": 2}, 5),
        ({"format": "int8", "lora_rank": 4, "strategy": "fsdp1", "world_size": 2}, 5),
        ({"strategy": "fsdp2", "world_size": 4}, 5),
        ({"strategy": "ddp", "world_size": 2, "optimizer": "sgd", "seq_len": 512}, 5),
    ],
    ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_equal_bytes_of_every_kind(tmp_path: Path, arguments: dict[str, Any], extra: int) -> None:
    folded, rows, whole = both(folder(tmp_path, "Llama", num_hidden_layers=8, **SIZES), **arguments)
    assert [fold.extra for fold in folded.folds] == [extra]
    assert rows == whole


def test_fsdp1_and_a_trainable_bias_beside_packed_rows(tmp_path: Path) -> None:
    """The flat parameter of such a layer takes a gradient of its whole size, of zeros for the rows."""
    import transformers

    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(num_hidden_layers=5, **SIZES))
    halfbyte.quantize_model(model, "nf4")
    sizes = {"strategy": "fsdp1", "world_size": 2, "batch_size": 1, "seq_len": 4}
    _, rows, whole = both(model, **sizes)
    assert rows == whole
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.endswith("bias"))
    _, frozen, _ = both(model, **sizes)
    packed = sum(p.numel() for name, p in model.named_parameters() if "self_attn" in name and p.dtype == torch.uint8)
    packed -= sum(p.numel() for name, p in model.named_parameters() if "o_proj" in name)  # has no bias
    assert rows["gradients"] - frozen["gradients"] >= packed // 2


@pytest.mark.parametrize(
    ("kind", "format", "strategy", "extra"),
    [
        ("Mixtral", "nf4", "single", 5),
        ("Qwen3Moe", "dense", "fsdp2", 5),
        ("GptOss", "nf4", "fsdp2", 1),  # experts are stored transposed and have biases, two kinds of attention alternate
        ("GptOss", "dense", "single", 1),
    ],
)
def test_mixtures_of_experts_fold_too(tmp_path: Path, kind: str, format: str, strategy: str, extra: int) -> None:
    source = folder(tmp_path, kind, num_hidden_layers=8, head_dim=16, pad_token_id=0, **SIZES)
    world_size = 1 if strategy == "single" else 2
    folded, rows, whole = both(source, format=format, lora_rank=4, strategy=strategy, world_size=world_size)
    assert [fold.extra for fold in folded.folds] == [extra]
    assert rows == whole


def test_a_pattern_of_blocks_is_folded_as_a_pattern(tmp_path: Path) -> None:
    source = folder(tmp_path, "Gemma3", num_hidden_layers=26, head_dim=16, **SIZES)  # 5 local layers, 1 global, and 2
    folded, rows, whole = both(source, batch_size=1)
    (fold,) = folded.folds
    assert (len(fold.middle), fold.extra) == (6, 1)
    assert rows == whole


def test_blocks_that_differ_in_what_trains_are_told_apart(tmp_path: Path) -> None:
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=10, **SIZES))
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:5].requires_grad_(False)
    folded, rows, whole = both(model, checkpointing=False)
    assert folded.folds == []  # the sixth of six blocks left would be another one than the sixth of ten
    assert rows == whole


def test_a_block_with_another_setting_ends_the_run() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(9)))
    blocks[0][1].p = 0.5
    (fold,) = fold_(blocks)
    assert (fold.extra, fold.middle) == (5, (blocks[2],))
    assert len(blocks) == 4
    blocks[1][1].p = 0.5
    assert fold_(blocks) == []


def test_tied_blocks_are_not_folded() -> None:
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
    for block in blocks:
        block.weight = blocks[0].weight
    assert fold_(blocks) == []
    assert len(blocks) == 6


class ByNumber(nn.Module):
    """Finds its blocks by number, so that none may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for index in range(6):
            input = self.blocks[index](input).relu()
        return input


class Backwards(ByNumber):
    """Runs them in another order."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            input = block(input).relu()
        return input


@pytest.mark.parametrize("kind", [ByNumber, Backwards])
def test_other_models_are_simulated_whole(kind: type[nn.Module]) -> None:
    arguments = {"batch_size": 4, "seq_len": 1, "batch": lambda rows, _: torch.zeros(rows, 64), "checkpointing": False}
    plan = halfbyte.plan(kind(), **arguments)
    assert {row.what: row.bytes for row in plan.rows}["weights, float32, trainable"] == 6 * (64 * 64 + 64) * 4
    assert plan.sizes is not None
    assert plan.sizes.subject.folds == []


LEFT = """
import gc, sys
import halfbyte
from torch._subclasses import FakeTensor

def alive():
    gc.collect()
    return sum(issubclass(type(each), FakeTensor) for each in gc.get_objects())

plan = halfbyte.plan(sys.argv[1], batch_size=1, seq_len=16)
print(len(plan.sizes.subject.folds), alive() > 0)
del plan
print(alive())
"""


def test_a_plan_that_is_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    """Folded blocks could hold each other; in a process of its own, because pytest keeps what tests log."""
    source = folder(tmp_path, "Llama", num_hidden_layers=5, **SIZES)
    command = [sys.executable, "-c", LEFT, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["1", "True", "0"]


def test_packed_formats_share_a_simulation_and_equal_their_own(tmp_path: Path) -> None:
    source = folder(tmp_path, "Llama", num_hidden_layers=5, **SIZES)
    arguments: dict[str, Any] = {"batch_size": 2, "seq_len": 32, "lora_rank": 4}
    compared = halfbyte.plan_formats(source, ("dense", "nf4", "int8"), **arguments)
    dense, nf4, int8 = compared.plans.values()
    assert int8.sizes._steps is nf4.sizes._steps is not dense.sizes._steps
    alone = halfbyte.plan(source, format="int8", **arguments)
    assert int8 == alone
    memory = sum(nf4.sizes.rows(100, 32).values())  # int8's codes take less than one more row of the batch
    assert nf4.fits(memory) == 100
    assert int8.fits(memory) == alone.fits(memory) == 99


@pytest.mark.parametrize(("vary", "checkpointing"), [("batch_size", True), ("seq_len", False)])
def test_what_fits_fits_and_one_more_does_not(tmp_path: Path, vary: str, checkpointing: bool) -> None:
    source = folder(tmp_path, "Llama", num_hidden_layers=4, **SIZES)
    plan = halfbyte.plan(source, batch_size=1, seq_len=64, checkpointing=checkpointing, format="nf4", lora_rank=4)
    assert plan.sizes is not None
    for memory in (9_000_000, 30_000_000):
        known = len(plan.sizes._steps)
        size = plan.fits(memory, vary=vary)
        assert len(plan.sizes._steps) - known < 6
        at, above = ((n, 64) if vary == "batch_size" else (1, n) for n in (size, size + 1))
        assert sum(plan.sizes.rows(*at).values()) <= memory < sum(plan.sizes.rows(*above).values())


@pytest.mark.slow
def test_an_eight_billion_model_takes_seconds(tmp_path: Path) -> None:
    """Llama-3-8B's config; a cold process takes the imports, 4 to 10 s, on top."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    folder(tmp_path, "Llama", num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16", **sizes)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 32
    began = time.process_time()
    compared = halfbyte.plan_formats(tmp_path, batch_size=1, seq_len=2048, lora_rank=16, device="cpu")
    found = {name: (plan.fits("24GiB"), plan.fits("24GiB", vary="seq_len")) for name, plan in compared.plans.items()}
    assert time.process_time() - began < 30
    assert found["nf4"][0] > found["int8"][0] >= 1
    weights = {row.what: row.bytes for row in compared.plans["nf4"].rows}["weights, packed"]
    assert weights == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096) * 9 // 16
