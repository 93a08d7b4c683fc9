"""One rank: `fsdp_memory_worker.py wrong|halfbyte|nf4-fsdp1|nf4-fsdp2`; prints its peak anonymous memory while training."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
import time
import warnings
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from lightning_models import Batches, trainer
from torch import Tensor, nn

from halfbyte.distributed import audit
from lightning_plugin import HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy, HalfbytePrecision

WIDTH, HIDDEN, BLOCKS = 1024, 2048, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.down(torch.relu(self.up(input)))


class Big(L.LightningModule):
    """96 M parameters, 192 MiB in bf16."""

    def configure_model(self) -> None:
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, _: Any, index: int) -> Tensor:
        hidden = torch.randn(8, WIDTH, dtype=self.scale.dtype) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-4)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Batches(), batch_size=1)


class Stock(FSDPStrategy):
    """Lightning's FSDPStrategy; only what keeps it off the CPU is changed."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(
            model, mixed_precision=self.mixed_precision_config, device_id=self.root_device, **self.kwargs
        )


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Peak(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.start = self.peak = anonymous()
        self.running = True
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.003)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.running = False
        self.thread.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    which, peak = sys.argv[1], Peak()
    strategies: dict[str, Any] = {
        "wrong": lambda: Stock(auto_wrap_policy={nn.TransformerEncoderLayer}),
        "halfbyte": HalfbyteFSDPStrategy,
        "nf4-fsdp1": HalfbyteFSDPStrategy,
        "nf4-fsdp2": lambda: HalfbyteFSDP2Strategy(checkpointing=False),
    }
    quantized = which.startswith("nf4")
    kwargs = {"callbacks": [peak], "devices": 2, "strategy": strategies[which](), "use_distributed_sampler": False}
    if not quantized:
        kwargs["precision"] = "bf16-true"
    run = trainer(HalfbytePrecision("nf4") if quantized else None, 3, **kwargs)
    run.fit(Big())
    report = audit(run.strategy.model)
    print(json.dumps([peak.peak - peak.start, report.expected_peak - report.local_bytes]))
    dist.destroy_process_group()
