"""A small model with packed weights and adapters, and its batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte.nn import QuantLinear

VOCABULARY, WIDTH, HIDDEN = 51, 64, 129


class Adapted(nn.Module):
    """A packed layer with a trainable low-rank path beside it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.base = QuantLinear.from_linear(nn.Linear(inputs, outputs, bias=bias))
        self.base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(3, inputs) / inputs**0.5)
        self.lora_B = nn.Parameter(torch.randn(outputs, 3) * 0.02)

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) + F.linear(F.linear(input, self.lora_A), self.lora_B)


class Block(nn.Module):
    """Rows that two ranks can't share evenly (129), and a trainable layer of which the second rank has no row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Adapted(WIDTH, HIDDEN, bias=True)
        self.down = Adapted(HIDDEN, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.norm(input)
        return input + torch.sigmoid(self.gate(hidden)) * self.down(F.silu(self.up(hidden)))


class Model(nn.Module):
    """Embedding, three blocks and a head, tied or not."""

    def __init__(self, tied: bool = False, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def packed_layers(model: nn.Module) -> list[QuantLinear]:
    return [m for m in model.modules() if isinstance(m, QuantLinear)]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, ranks: range, clip: Any = None) -> list[float]:
    """Losses averaged over `ranks` per step: all ranks in one process, or one rank of several."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = [loss_of(model, step, rank) for rank in ranks]
        (sum(parts) / len(parts)).backward()
        if clip is not None:
            clip()
        optimizer.step()
        losses.append(sum(part.item() for part in parts) / len(parts))
    return losses
