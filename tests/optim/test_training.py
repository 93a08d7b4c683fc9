"""A small transformer trained with each 8-bit optimizer ends where its float32 twin ends, within 1 %."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfbyte.optim import Adam8bit, AdamW8bit, Lion8bit, SGD8bit

VOCABULARY, LENGTH, WIDTH = 64, 32, 96


class Transformer(nn.Module):
    """Two blocks that learn to continue a noisy arithmetic sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


class Lion32(torch.optim.Optimizer):
    """Lion in float32, from its paper."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(torch.sign(0.9 * m + 0.1 * p.grad), alpha=group["lr"])
                m.lerp_(p.grad, 0.01)


def batch(generator: torch.Generator, size: int = 16) -> Tensor:
    start, stride = torch.randint(0, VOCABULARY, (2, size, 1), generator=generator)
    tokens = (start + (stride % 5 + 1) * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(0, VOCABULARY, tokens.shape, generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)


def final_loss(build: Callable[[Iterable[Tensor]], torch.optim.Optimizer], steps: int) -> float:
    """Mean loss over the last tenth of the steps and over held-out batches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small only lose by sharing them out
    net = Transformer()
    optimizer = build(net.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    held_out = torch.Generator().manual_seed(2)
    with torch.no_grad():
        tokens = batch(held_out, 512)
        return float(nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (lambda p: AdamW8bit(p, lr=2e-3), lambda p: torch.optim.AdamW(p, lr=2e-3)),
    "adam": (lambda p: Adam8bit(p, lr=2e-3), lambda p: torch.optim.Adam(p, lr=2e-3)),
    "lion": (lambda p: Lion8bit(p, lr=3e-4), lambda p: Lion32(p, lr=3e-4)),
    "sgd": (lambda p: SGD8bit(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_60_steps_within_3_percent_of_float32(name: str) -> None:
    """In the steep part of the curve, where a difference shows most."""
    ours, theirs = (final_loss(build, 60) for build in PAIRS[name])
    assert abs(ours - theirs) < 0.03 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_300_steps_within_1_percent_of_float32(name: str) -> None:
    ours, theirs = (final_loss(build, 300) for build in PAIRS[name])
    assert abs(ours - theirs) < 0.01 * theirs
