"""Models and hand-written training loops for the tests of lightning_plugin, on one process and on two."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from halfbyte.nn import QuantLinear

STEPS, RESUME_AT, LR = 6, 3, 2e-2


class Net(nn.Module):
    """Two layers to pack (one with a bias), a norm and a head that stays dense by its name."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(32, 96)
        self.second = nn.Linear(96, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.classifier = nn.Linear(64, 5)
        torch.manual_seed(seed + 1)  # a layer that init_quantized turns back to dense is drawn twice
        nn.init.normal_(self.classifier.weight, std=0.1)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, input: Tensor) -> Tensor:
        return self.classifier(self.norm(self.second(nn.functional.gelu(self.first(input)))))


class Batches(torch.utils.data.Dataset):
    """Each item is its own index: the step derives the batch from `global_step`, so that a resumed run sees the same."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def batch(step: int, rank: int = 0, world: int = 1, rows: int = 8) -> tuple[Tensor, Tensor]:
    """The share of `rank` of the batch of one step: (rows / world, 32) floats and as many labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    input = torch.randn(rows, 32, generator=generator)
    target = input[:, :5].argmax(1)
    share = slice(rank * rows // world, (rank + 1) * rows // world)
    return input[share], target[share]


class Module(L.LightningModule):
    """Trains a Net that is built in `__init__` or in `configure_model`; keeps its losses."""

    def __init__(self, where: str = "configure", seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = Net(seed) if where == "init" else None
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net(self.hparams["seed"])

    def loss(self, step: int) -> Tensor:
        input, target = batch(step, self.global_rank, self.trainer.world_size)
        return nn.functional.cross_entropy(self.net(input), target)

    def training_step(self, _: Tensor, index: int) -> Tensor:
        loss = self.loss(self.global_step)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, _: Tensor, index: int) -> None:
        loss = self.loss(500 + index)
        self.evaluated.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, _: Tensor, index: int) -> Tensor:
        return self.net(batch(index)[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=LR)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Batches(), batch_size=1)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Batches(2), batch_size=1)

    test_dataloader = predict_dataloader = val_dataloader


def trainer(plugin: Any, max_steps: int = STEPS, **kwargs: Any) -> L.Trainer:
    """A quiet Trainer on the CPU."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "devices": 1,
    }
    return L.Trainer(plugins=plugin, max_steps=max_steps, **{**quiet, **kwargs})


def packed_net(format: str = "nf4", seed: int = 0) -> Net:
    """The Net the plugin should end with, made by hand: a dense one whose two layers are replaced."""
    net = Net(seed)
    net.first = QuantLinear.from_linear(net.first, format)
    net.second = QuantLinear.from_linear(net.second, format)
    return net


def losses_by_hand(
    net: nn.Module, steps: int = STEPS, clip: float | None = None, world: int = 1, optimizer: Any = torch.optim.AdamW
) -> list[list[float]]:
    """The plain training loop: the loss of every rank's share at every step; gradients are the mean over the shares."""
    optimizer = optimizer([p for p in net.parameters() if p.requires_grad], lr=LR)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            input, target = batch(step, rank, world)
            loss = nn.functional.cross_entropy(net(input), target)
            (loss / world).backward()
            losses[rank].append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return losses
