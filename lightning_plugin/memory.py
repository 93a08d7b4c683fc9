"""MemoryMonitor, ActivationOffloading: where the bytes of a run are, and moving some of them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from halfbyte.memory.offload import offload_activations
from halfbyte.nn.packed import Packed
from halfbyte.optim.sharding import local
from lightning_plugin.distribution import Callback, LightningModule, Trainer

__all__ = ["ActivationOffloading", "MemoryMonitor"]


class MemoryMonitor(Callback):
    """Logs bytes by kind to the Trainer's loggers, per step.

    Names: `memory/packed`, `memory/dense`, `memory/trainable`, `memory/gradients`, `memory/optimizer`, `memory/process`.

    Sizes are this rank's. `process` is the anonymous memory of the process on the CPU, and the most that was allocated since
    the last step on CUDA. Gradients are counted before the optimizer step, the rest after it.

    Args:
        every_n_steps: optimizer steps between two measurements.

    Attributes:
        last: the last measurement, bytes by name.

    Raises:
        ValueError: `every_n_steps` is below 1.

    Example:
        >>> from lightning_plugin import MemoryMonitor
        >>> MemoryMonitor(every_n_steps=10).last
        {}
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"MemoryMonitor: every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.last: dict[str, int] = {}
        self._gradients = 0
        self._logged = -1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Called with all gradients there."""
        self._gradients = sum(_bytes(p.grad) for p in pl_module.parameters() if p.grad is not None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after each batch; measures after every n-th optimizer step."""
        step = trainer.global_step
        if step == self._logged or step == 0 or step % self.every_n_steps:
            return
        self._logged = step
        rows = (p for m in pl_module.modules() if isinstance(m, Packed) for p in m.parameters(recurse=False))
        packed = {id(p) for p in rows if p.dtype == torch.uint8}
        sizes = {"packed": 0, "dense": 0, "trainable": 0, "gradients": self._gradients, "optimizer": 0}
        for p in pl_module.parameters():
            sizes["packed" if id(p) in packed else "trainable" if p.requires_grad else "dense"] += _bytes(p)
        seen: dict[int, torch.Tensor] = {}
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                seen.update((id(value), value) for value in state.values() if isinstance(value, torch.Tensor))
        sizes["optimizer"] = sum(map(_bytes, seen.values()))
        sizes["process"] = _process_bytes(pl_module.device)
        self.last = {f"memory/{name}": size for name, size in sizes.items()}
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({name: float(size) for name, size in self.last.items()}, step=step)


class ActivationOffloading(Callback):
    """Keeps what backward needs in host memory while the rest of forward runs; for models on a GPU.

    Weights, packed rows among them, stay on the device. Costs two copies of every activation; checkpointing costs a second
    forward instead, and both together keep only each block's input, in host memory.

    Args:
        min_bytes: smaller tensors stay on the device.
        pin_memory: copy to pinned memory, which is faster and needs as much of it.

    Raises:
        ValueError: `min_bytes` is negative; or, at the start of fit, the model is on the CPU: nothing to gain.

    Example:
        >>> from lightning_plugin import ActivationOffloading
        >>> callback = ActivationOffloading(min_bytes=1 << 20)
    """

    def __init__(self, min_bytes: int = 1 << 20, pin_memory: bool = True) -> None:
        if min_bytes < 0:
            raise ValueError(f"ActivationOffloading: min_bytes must not be negative, got {min_bytes}")
        self.min_bytes, self.pin_memory = min_bytes, pin_memory
        self._entered = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when the model is on its device."""
        if pl_module.device.type == "cpu":
            raise ValueError(
                "ActivationOffloading: the model is on the CPU, so its activations are in host memory already; leave the "
                "callback out, or use gradient checkpointing"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Called before each training_step."""
        self._entered.enter_context(
            offload_activations(pl_module, min_bytes=self.min_bytes, pin_memory=self.pin_memory)
        )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Called between forward and backward: what backward saves for itself stays."""
        self._entered.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after each batch; a training_step that returned None had no backward."""
        self._entered.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Called when a run fails: the hooks must not outlive it."""
        self._entered.close()


def _bytes(tensor: Any) -> int:
    piece = local(tensor)
    return piece.numel() * piece.element_size()


def _process_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0
