"""A small model with every kind of tensor a checkpoint may hold, and its dense checkpoint."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import halfbyte
from halfbyte import reference
from halfbyte.optim.sharding import is_dtensor

WIDTH, HIDDEN = 96, 33


class Block(nn.Module):
    """Rows that ranks can't share evenly (33), and a layer of one row: the second rank has none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor([3], dtype=torch.int64))
        self.register_buffer("phase", torch.ones(4), persistent=False)

    def reset_parameters(self) -> None:
        raise AssertionError("would draw the parameters anew")

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.norm(input)
        return input + torch.sigmoid(self.gate(hidden)) * self.down(torch.relu(self.up(hidden))) * self.scale


class Net(nn.Module):
    """Tied head, odd sizes, biases, norms, a scalar, an integer and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 51, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.layers:
            hidden = block(hidden)
        return self.lm_head(hidden)


def on_meta(format: str | None = None) -> Net:
    """Without memory; with a format the layers are packed already."""
    with torch.device("meta"), nullcontext() if format is None else halfbyte.init_quantized(format):
        model = Net()
    for block in model.layers:
        block.phase = torch.ones(4)
    return model


def values() -> dict[str, Tensor]:
    torch.manual_seed(7)
    state = Net().state_dict()
    del state["lm_head.weight"]
    drawn = {name: torch.randn(v.shape) if v.is_floating_point() else v for name, v in state.items()}
    return {name: v.bfloat16() if "up" in name else v.half() if "norm" in name else v for name, v in drawn.items()}


def expected(format: str = "nf4") -> dict[str, Tensor]:
    """By the reference and by plain casts."""
    own = Net().state_dict()
    packed = [f"layers.{i}.{name}.weight" for i in range(3) for name in ("up", "down", "gate")]
    return {n: reference.quantize(v, format) if n in packed else v.to(own[n].dtype) for n, v in values().items()}


def check(model: nn.Module, format: str = "nf4") -> None:
    """All of it is as expected; a sharded model is gathered, by all ranks at once."""
    state, wanted = model.state_dict(), expected(format)
    sharded = any(is_dtensor(value) for value in state.values())
    found = {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.items()}
    assert found.keys() == {*wanted, "lm_head.weight"}
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert torch.equal(found["lm_head.weight"], found["embedding.weight"])
    if not sharded:
        assert model.lm_head.weight is model.embedding.weight
        halfbyte.verify(model)


def write_dense(folder: Path) -> Path:
    """A folder of two shards and an index."""
    folder.mkdir()
    state = values()
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
