"""A training step of a fake model under a `StorageTracker`, with the optimizer's state of earlier steps in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

from halfbyte.distributed.fsdp2 import _checkpoint_blocks
from halfbyte.distributed.grouping import blocks
from halfbyte.memory.answers import Answers
from halfbyte.memory.fold import NotFoldableError
from halfbyte.memory.sharded import Sharding
from halfbyte.memory.subject import Subject, like_transformers, packed_parameters
from halfbyte.memory.tracker import StorageTracker
from halfbyte.optim import Adam8bit, AdamW8bit, Lion8bit, SGD8bit

__all__ = ["OPTIMIZERS", "OptimizerLike", "simulate"]

OptimizerLike = str | Callable[[list[Any]], torch.optim.Optimizer] | None

OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw8bit": AdamW8bit,
    "adam8bit": Adam8bit,
    "lion8bit": Lion8bit,
    "sgd8bit": partial(SGD8bit, lr=1e-3, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


def simulate(
    subject: Subject,
    *,
    batch_size: int,
    seq_len: int,
    optimizer: OptimizerLike,
    strategy: str,
    world_size: int,
    checkpointing: bool | None,
) -> StorageTracker:
    """Runs the step; the tracker it returns holds the peak and what was alive then.

    Raises:
        ValueError: unknown optimizer, or nothing is trainable.
        NotFoldableError: the subject is folded, and its middle blocks did not run as one block after the other.
    """
    model, tracker, answers = subject.model, StorageTracker(host=subject.device.type == "cpu"), Answers()
    for fold in subject.folds:
        for module in fold.middle:
            tracker.owners.update((id(tensor), fold) for tensor in [*module.parameters(), *module.buffers()])
    _set_checkpointing(model, checkpointing)
    for parameter in model.parameters():
        parameter.grad = None
    with subject.mode, warnings.catch_warnings(), _device_context(subject.device), like_transformers(), answers, tracker:
        warnings.simplefilter("ignore")  # of hosts, about a run that does not happen
        sharding = Sharding(model, tracker, strategy, world_size)
        for tensor, kind in _resident(model):
            if not sharding.owns(tensor):
                tracker.track(tensor, kind, tracker.owner(tensor))
        tracker.kind = "batch"
        batch = subject.batch(batch_size, seq_len)
        with _as_in_real_steps():
            optimizers = _optimizers(subject, optimizer, sharding)
        hooks = [p.register_post_accumulate_grad_hook(partial(_name_gradient, tracker))
                 for p in model.parameters() if p.requires_grad]
        hooks += [hook for fold in subject.folds for hook in fold.watch(tracker)]
        hooks += answers.watch(model)
        try:
            tracker.kind = "optimizer state"
            for each in optimizers:  # a step on gradients alone makes the state that later steps meet
                _give_gradients(tracker, each)
                with _as_in_real_steps():
                    each.step()
                _own_state(tracker, each)
            if not subject.zero_grad_first:
                sharding.zero_grad()
            tracker.kind = "activations"
            sharding.begin_forward()
            loss = subject.step(model, batch)
            if subject.zero_grad_first:
                sharding.zero_grad()
            if not loss.requires_grad:
                raise ValueError("plan: the loss does not require grad: nothing in the model is trainable")
            sharding.begin_backward()
            loss.backward()
            del loss
            sharding.end_backward()
            if not tracker.balanced:
                raise NotFoldableError("plan: the model does not run its blocks one after the other")
            tracker.kind = "optimizer state"
            with _as_in_real_steps():
                for each in optimizers:
                    each.step()
        finally:
            for hook in hooks:
                hook.remove()
            sharding.remove()
            for parameter in model.parameters():
                parameter.grad = None
    if tracker.kept:
        scratch = tracker.kept * torch.get_num_threads()
        tracker.at_peak["kernel workspace"] = scratch
        tracker.peak += scratch
    return tracker


def _device_context(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else torch.device(device)


@contextmanager
def _as_in_real_steps() -> Iterator[None]:
    """Inside, optimizers take fake parameters for real ones, and no default device is set.

    torch's own choose their implementation by the class and the device of parameters: on CUDA the one that takes all of them
    at once ("foreach") with temporaries as large as they are, unless `foreach` or `fused` says otherwise; on CPUs the loop.
    Their counts of steps are in host memory.
    """
    supported: list[Any] = torch_optimizer._foreach_supported_types
    supported.append(FakeTensor)
    try:
        with torch.device("cpu"):
            yield
    finally:
        supported.remove(FakeTensor)


def _resident(model: nn.Module) -> list[tuple[Tensor, str]]:
    packed = packed_parameters(model)

    def kind(parameter: Tensor) -> str:
        if id(parameter) in packed:
            return "weights, packed"
        dtype = str(parameter.dtype).removeprefix("torch.")
        return f"weights, {dtype}" if not parameter.requires_grad else f"weights, {dtype}, trainable"

    return [(p, kind(p)) for p in model.parameters()] + [(b, "buffers") for b in model.buffers()]


def _name_gradient(tracker: StorageTracker, parameter: Tensor) -> None:
    if parameter.grad is not None:  # None after a step that was fused into backward
        tracker.track(parameter.grad, "gradients", tracker.owner(parameter))


def _own_state(tracker: StorageTracker, optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor):
                tracker.own(value, tracker.owner(parameter))


def _give_gradients(tracker: StorageTracker, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
            tracker.track(parameter.grad, "gradients", tracker.owner(parameter))


def _set_checkpointing(model: nn.Module, wanted: bool | None) -> None:
    if wanted:
        _checkpoint_blocks(model, blocks(model))
    elif wanted is not None:
        module: Any
        for module in model.modules():
            if hasattr(module, "activation_checkpointing_disable") and module.is_activation_checkpointing:
                module.activation_checkpointing_disable()


def _optimizers(subject: Subject, optimizer: OptimizerLike, sharding: Sharding) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        if subject.optimizer is None:
            return []
        if sharding.shards:
            raise ValueError("plan: a sharded strategy needs optimizer= by name, not the LightningModule's own")
        return subject.optimizer()
    factory = optimizer
    if isinstance(factory, str):
        if factory not in OPTIMIZERS:
            raise ValueError(f"plan: optimizer must be one of {', '.join(OPTIMIZERS)}, a callable or None, got {factory!r}")
        factory = OPTIMIZERS[factory]
    groups = sharding.parameter_groups()
    return [factory(groups)] if groups else []
