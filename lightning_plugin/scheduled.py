"""GradualUnfreezing, ProgressiveQuantization: layers change between packed and dense while a run goes on."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.batches import dense_weights
from halfbyte.nn.linear import QuantLinear, dequantize_linear_, quantize_linears_
from halfbyte.nn.packed import as_dtype
from halfbyte.nn.skip import mark_dense, matches
from lightning_plugin.distribution import Callback, LightningModule, Trainer, rank_zero_info

__all__ = ["GradualUnfreezing", "ProgressiveQuantization"]

_UNFROZEN = "unfrozen by GradualUnfreezing"


class _Scheduled(Callback):
    """Changes the layers that a schedule names, once each; a resumed run has them changed before weights are loaded."""

    def __init__(self, schedule: Mapping[int, Sequence[str]]) -> None:
        name = type(self).__name__
        if not schedule:
            raise ValueError(f"{name}: schedule must name layers for at least one step, got {schedule!r}")
        self.schedule: dict[int, tuple[str, ...]] = {}
        for step, patterns in schedule.items():
            if isinstance(patterns, str) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
                raise TypeError(f"{name}: schedule must map steps to lists of names, got {patterns!r} for step {step}")
            self.schedule[int(step)] = tuple(patterns)  # keys of JSON are strings
        self.changed: list[str] = []

    def change(self, module: LightningModule, layers: Sequence[nn.Linear]) -> None:
        """Changes layers in place."""
        raise NotImplementedError

    def is_due(self, layer: nn.Module) -> bool:
        """Whether a layer that the schedule names is still to be changed."""
        raise NotImplementedError

    def settle(self, trainer: Trainer, layer: nn.Linear, before: torch.Tensor) -> None:
        """Tells the optimizer of a layer that was changed; `before` was its weight."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called by the Trainer before it loads weights, which happens before callbacks get their own state back."""
        strategy: Any = trainer.strategy
        load = strategy.load_model_state_dict

        @functools.wraps(load)
        def with_layers_changed(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            names = (checkpoint.get("callbacks") or {}).get(self.state_key, {}).get("changed", [])
            convert = getattr(trainer.precision_plugin, "convert_module", None)
            if names and convert is not None:
                convert(pl_module)
            due: list[Any] = [layer for layer in map(pl_module.get_submodule, names) if self.is_due(layer)]
            self.change(pl_module, due)
            for layer in due:
                layer.weight.requires_grad_(False)  # configure_optimizers must see what it saw in the first run
            return load(checkpoint, *args, **kwargs)

        strategy.load_model_state_dict = with_layers_changed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the optimizers are created and before their state is restored."""
        if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
            raise NotImplementedError(
                f"{type(self).__name__} runs on one device or under DDP, which is set up again after a change; a sharded "
                f"model's units are flattened once and can't change: got {type(trainer.strategy).__name__} with world size "
                f"{trainer.world_size}"
            )
        for name in self.changed:
            layer: Any = pl_module.get_submodule(name)
            self.settle(trainer, layer, layer.weight)
        if self.changed:
            _set_up_ddp_again(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Called before each batch: changes what is due at this step."""
        for step, patterns in sorted(self.schedule.items()):
            if step > trainer.global_step:
                continue
            due = [
                (name, layer)
                for name, layer in pl_module.named_modules()
                if name not in self.changed and isinstance(layer, nn.Linear) and any(matches(p, name) for p in patterns)
            ]
            known = any(any(matches(p, name) for p in patterns) for name in self.changed)
            if not known and not any(self.is_due(layer) for _, layer in due):
                raise QuantizationError(
                    f"{type(self).__name__}: schedule[{step}] = {list(patterns)} names no layer that it could change; "
                    f"{self._could(pl_module)}"
                )
            changing = [(name, layer) for name, layer in due if self.is_due(layer)]
            weights = [layer.weight for _, layer in changing]
            self.change(pl_module, [layer for _, layer in changing])
            for (name, layer), before in zip(changing, weights, strict=True):
                self.changed.append(name)
                self.settle(trainer, layer, before)
                rank_zero_info(f"{type(self).__name__}: step {trainer.global_step}: {name}")
            if changing:
                _set_up_ddp_again(trainer)

    def _could(self, module: nn.Module) -> str:
        names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and self.is_due(layer)]
        return f"left are {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else "none is left"

    def state_dict(self) -> dict[str, Any]:
        """Names of the layers that are changed, in order; saved with every checkpoint."""
        return {"changed": list(self.changed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by the Trainer when it resumes."""
        self.changed = list(state_dict["changed"])


class GradualUnfreezing(_Scheduled):
    """Turns packed layers into trainable dense ones on a schedule, and adds them to the optimizer as groups of their own.

    Packed rows can't require grad (they are bytes): to train a layer's weights it must become dense. At its step each named
    layer is decoded once, and its weight and bias join the first optimizer. Other layers stay packed and frozen.

    Args:
        schedule: optimizer step to the names of layers, as dotted runs ("layers.29", "layers.29.mlp").
        lr: learning rate of the new groups; None: that of the optimizer's first group.
        dtype: dtype (or its name) of the dense weights; None: what the layer was built with.

    Raises:
        ValueError: empty schedule or unknown dtype name.
        TypeError: the schedule does not hold lists of names.
        QuantizationError: when a step is reached: it names no packed layer.
        NotImplementedError: a sharded strategy; one device and DDP work.

    Note:
        A run that resumes has the layers dense again before weights and optimizer state are loaded.

    Example:
        >>> from lightning_plugin import GradualUnfreezing
        >>> GradualUnfreezing({100: ["layers.29"], 200: ["layers.28"]}, lr=1e-5).schedule[100]
        ('layers.29',)
    """

    def __init__(
        self, schedule: dict[int, list[str]], *, lr: float | None = None, dtype: str | torch.dtype | None = None
    ) -> None:
        super().__init__(schedule)
        self.lr, self.dtype = lr, as_dtype("dtype", dtype)

    def is_due(self, layer: nn.Module) -> bool:
        """Packed linear layers."""
        return isinstance(layer, QuantLinear)

    def change(self, module: LightningModule, layers: Sequence[nn.Linear]) -> None:
        """Decodes packed layers."""
        packed = [layer for layer in layers if isinstance(layer, QuantLinear)]
        for layer, weight in dense_weights(packed, lambda layer: self.dtype or layer.dense_dtype):
            assert isinstance(layer, QuantLinear)
            mark_dense(dequantize_linear_(layer, nn.Parameter(weight)), _UNFROZEN)  # the plugin must not pack it again

    def settle(self, trainer: Trainer, layer: nn.Linear, before: torch.Tensor) -> None:
        """Makes the layer's parameters trainable and adds what the optimizer does not hold yet."""
        layer.requires_grad_(True)
        optimizer = trainer.optimizers[0]
        if before is not layer.weight:
            _forget(optimizer, before)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        fresh = [p for p in layer.parameters(recurse=False) if id(p) not in held]
        if not fresh:
            return
        lr = optimizer.param_groups[0]["lr"] if self.lr is None else self.lr
        optimizer.add_param_group({"params": fresh, "lr": lr, "initial_lr": lr})
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if len(getattr(scheduler, "base_lrs", optimizer.param_groups)) < len(optimizer.param_groups):
                scheduler.base_lrs.append(lr)
                if hasattr(scheduler, "lr_lambdas"):
                    scheduler.lr_lambdas.append(scheduler.lr_lambdas[-1])


class ProgressiveQuantization(_Scheduled):
    """Starts dense and packs layers on a schedule: their weights freeze, their gradients and optimizer state are released.

    Use it without `HalfbytePrecision`, which packs everything at the start. What trains on is what is still dense: later
    layers, adapters, norms.

    Args:
        schedule: optimizer step to the names of layers, as dotted runs ("layers.0", "layers.0.mlp").
        format: a `Format` or its name.
        compute_dtype: dtype (or its name) the packed layers compute in; None: autocast's, else that of their input.

    Raises:
        ValueError: empty schedule, unknown format or dtype name.
        TypeError: the schedule does not hold lists of names.
        QuantizationError: when a step is reached: it names no dense linear layer.
        NotImplementedError: a sharded strategy; one device and DDP work.

    Note:
        A run that resumes has the layers packed again before weights and optimizer state are loaded.

    Example:
        >>> from lightning_plugin import ProgressiveQuantization
        >>> ProgressiveQuantization({100: ["layers.0"]}, "nf4").format
        'nf4'
    """

    def __init__(
        self, schedule: dict[int, list[str]], format: str = "nf4", *, compute_dtype: str | torch.dtype | None = None
    ) -> None:
        super().__init__(schedule)
        self.format = str(Format.parse(format))
        self.compute_dtype = as_dtype("compute_dtype", compute_dtype)

    def is_due(self, layer: nn.Module) -> bool:
        """Exact dense linear layers: subclasses have a forward of their own."""
        return type(layer) is nn.Linear

    def change(self, module: LightningModule, layers: Sequence[nn.Linear]) -> None:
        """Packs dense layers; their biases stay as they are."""
        for layer in layers:
            layer.weight.grad = None
        quantize_linears_(layers, Format.parse(self.format), self.compute_dtype)

    def settle(self, trainer: Trainer, layer: nn.Linear, before: torch.Tensor) -> None:
        """Takes the weight from the optimizer, with its state."""
        for optimizer in trainer.optimizers:
            _forget(optimizer, before)
            _forget(optimizer, layer.weight)


def _set_up_ddp_again(trainer: Trainer) -> None:
    """DDP's buckets hold the parameters that required a gradient when it wrapped the module: wraps it anew."""
    strategy: Any = trainer.strategy
    if isinstance(strategy.model, DistributedDataParallel):
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()


def _forget(optimizer: Optimizer, parameter: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not parameter]
    optimizer.state.pop(parameter, None)
