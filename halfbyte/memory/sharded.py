"""Sharding: what DDP, FSDP1 and FSDP2 add to a simulated step and take from it, unit by unit, with no process group.

The fake model keeps its whole parameters, which are not counted; instead every unit's shard is, and around its forward and
backward the gathered unit and the buffers its collectives use. The units are those of `halfbyte.distributed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfbyte.distributed.fsdp1 import separate_parameters, units_of
from halfbyte.distributed.grouping import blocks, shared_parameters, tables
from halfbyte.memory.tracker import StorageTracker, in_backward
from halfbyte.optim.sharding import _GLOBAL_PIECE, GlobalPiece

__all__ = ["STRATEGIES", "Sharding"]

STRATEGIES = ("single", "ddp", "fsdp1", "fsdp2")
GATHERED, BUFFERS = "gathered units", "communication buffers"


@dataclass(eq=False)
class _Unit:
    """One sharding unit: the parameters that it gathers, and where it is in its step."""

    module: nn.Module
    parameters: list[nn.Parameter]
    size: int = 0
    gathered: bool = False
    in_backward: bool = False  # its pre-backward hook has run in this step
    shards: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    zeros: list[Tensor] = field(default_factory=list)  # this rank's gradient of packed rows beside a trainable bias


class Sharding:
    """Stands for one rank of `world_size`; see the module.

    Args:
        model: the fake model.
        tracker: what the bytes are counted with.
        strategy: one of `STRATEGIES`.
        world_size: number of ranks.

    Raises:
        ValueError: a sharded strategy and a model that repeats no block.
    """

    def __init__(self, model: nn.Module, tracker: StorageTracker, strategy: str, world_size: int) -> None:
        self.model, self.tracker, self.strategy, self.world_size = model, tracker, strategy, world_size
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.units: list[_Unit] = []
        self._order: list[_Unit] = []  # in which the units ran forward
        self._active: list[_Unit] = []  # gathered in backward
        self._held = 0  # the last gather's output, which FSDP2 keeps until the next unit has copied its own out
        self._reducing = 0  # the last reduce-scatter's input, kept until the next
        self._hooks: list[Any] = []
        self._thawed: list[nn.Parameter] = []
        if strategy == "ddp":
            # Buckets are copies of all gradients. DDP makes them anew before the second step, in the order in which
            # gradients came; NCCL, and so a GPU, keeps those of the first step for longer than that.
            copies = 1 if tracker.host else 2
            tracker.add(BUFFERS, copies * sum(_bytes(p) * tracker.count(p) for p in self.trainable))
        # On one rank FSDP1 keeps its flat parameters whole; FSDP2 copies each unit out of its shard all the same.
        if strategy == "fsdp2" or (strategy == "fsdp1" and world_size > 1):
            self._make_units()

    @property
    def shards(self) -> bool:
        """Whether parameters are split."""
        return bool(self.units)

    def owns(self, tensor: Tensor) -> bool:
        """Whether this tensor's bytes are counted here, as shards and gathered units."""
        return tensor.untyped_storage()._cdata in self.tracker.ignored

    def parameter_groups(self) -> list[Any]:
        """What the optimizer gets: this rank's shards of the trainable parameters, or the parameters themselves."""
        local = {id(p): shard for unit in self.units for p, shard in unit.shards}
        return [local.get(id(p), p) for p in self.trainable]

    def _flatten(self, unit: _Unit) -> None:
        """FSDP1's flat parameter requires a gradient as a whole: frozen parameters beside trainable ones get one too, and
        what their gradients need is saved in forward (the input of a frozen norm's weight, in every block under LoRA).
        """
        if any(p.requires_grad for p in unit.parameters):
            frozen = [p for p in unit.parameters if not p.requires_grad and p.is_floating_point()]
            self._thawed += frozen
            for p in frozen:
                p.requires_grad_(True)

    def zero_grad(self) -> None:
        """`set_to_none`, of shards too."""
        for parameter in [*self.trainable, *(shard for unit in self.units for _, shard in unit.shards)]:
            parameter.grad = None
        for unit in self.units:
            unit.zeros.clear()

    def begin_forward(self) -> None:
        """Gathers the root: it stays gathered until backward has ended."""
        if self.units:
            self._order.clear()
            self._gather(self.units[-1])

    def begin_backward(self) -> None:
        """The root's hook: the unit that ran last is gathered while the loss is differentiated."""
        if self._order:
            self._hold(self._order[-1].size)

    def end_backward(self) -> None:
        """Reduces what is left and releases every gathered unit."""
        if not self.units:
            return
        for unit in [*self._active, self.units[-1]]:
            self._finish(unit)
        self._active.clear()
        self._drop_buffers()
        for unit in self.units:
            unit.in_backward = False

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._thawed:
            parameter.requires_grad_(False)

    # -- units

    def _make_units(self) -> None:
        separate: set[int] = set()
        if self.strategy == "fsdp1":
            modules: list[nn.Module] = list(units_of(self.model))
            separate = {id(p) for p in separate_parameters(self.model)}
        else:
            found = blocks(self.model)
            if not found:
                raise ValueError(f"plan: strategy {self.strategy!r} finds no repeated blocks in {type(self.model).__name__}")
            modules = [*found.values(), *tables(self.model, shared_parameters(self.model)).values()]
        wanted, taken = set(modules), set(separate)
        for module in [*(m for m in reversed(list(self.model.modules())) if m in wanted), self.model]:
            own = [p for p in module.parameters() if id(p) not in taken]
            taken.update(id(p) for p in own)
            unit = _Unit(module, own, sum(map(_bytes, own)))
            self.units.append(unit)
            self.tracker.ignore(own)
            if self.strategy == "fsdp1":
                self._flatten(unit)
            for p in own:
                self._add_shard(unit, p)
            if module is not self.model:
                self._hooks += [
                    module.register_forward_pre_hook(lambda *_, unit=unit: self._pre_forward(unit)),
                    module.register_forward_hook(lambda _m, _a, out, unit=unit: self._post_forward(unit, out)),
                ]

    def _add_shard(self, unit: _Unit, parameter: nn.Parameter) -> None:
        if self.strategy == "fsdp1" or parameter.dim() == 0:
            shape: tuple[int, ...] = (-(-parameter.numel() // self.world_size),)
        else:
            shape = (-(-parameter.shape[0] // self.world_size), *parameter.shape[1:])
        if not parameter.requires_grad:  # thawed ones have a shard of a gradient, and none that trains
            size = torch.Size(shape).numel() * parameter.element_size()
            self.tracker.add("weights, sharded", size * self.tracker.count(parameter))
            return
        empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        owner = self.tracker.owner(parameter)
        self.tracker.track(empty, "weights, sharded, trainable", owner)
        shard = nn.Parameter(empty)
        if owner is not None:
            self.tracker.owners[id(shard)] = owner
        setattr(shard, _GLOBAL_PIECE, GlobalPiece(parameter.shape, 0))
        unit.shards.append((parameter, shard))

    # -- events, in FSDP's order

    def _pre_forward(self, unit: _Unit) -> None:
        if not unit.in_backward:  # in backward: its block's recomputation
            self._gather(unit)

    def _post_forward(self, unit: _Unit, out: Any) -> None:
        if unit.in_backward:
            return
        self._release(unit)
        if in_backward():  # hooks on recomputed outputs never run
            return
        self._order.append(unit)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _, unit=unit: self._pre_backward(unit))

    def _pre_backward(self, unit: _Unit) -> None:
        if unit.in_backward:
            return
        if self.strategy == "fsdp2":
            self._hold(0)
        for other in [u for u in self._active if unit.module not in set(u.module.modules())]:
            self._finish(other)
            self._active.remove(other)
        self._hold(0)
        unit.in_backward = True
        self._gather(unit)
        self._active.append(unit)
        at = self._order.index(unit)
        if at and not self._order[at - 1].gathered:  # the next one is gathered while this one computes
            self._hold(self._order[at - 1].size)

    def _gather(self, unit: _Unit) -> None:
        if unit.gathered:
            return
        unit.gathered = True
        if self.strategy == "fsdp2" and self.world_size > 1:
            self.tracker.add(BUFFERS, unit.size)  # the collective's output, beside the last one's
            self.tracker.add(BUFFERS, -self._held)
            self.tracker.add(GATHERED, unit.size)
            self._held = unit.size
        else:
            self.tracker.add(GATHERED, unit.size)

    def _release(self, unit: _Unit) -> None:
        if unit.gathered:
            unit.gathered = False
            self.tracker.add(GATHERED, -unit.size)

    def _hold(self, size: int) -> None:
        if self.world_size == 1:  # no collective
            return
        self.tracker.add(BUFFERS, size - self._held)
        self._held = size

    def _finish(self, unit: _Unit) -> None:
        """After a unit's backward: its gradients become this rank's shards."""
        flat = self.strategy == "fsdp1"
        with_grads = [(p, shard) for p, shard in unit.shards if p.grad is not None]
        size = sum(_bytes(p) for p, _ in with_grads)
        rows = [p for p in unit.parameters if not p.is_floating_point()] if flat and with_grads else []
        size += sum(map(_bytes, rows))
        if flat:  # autograd joins the gradients of all views of the flat parameter while it is still gathered
            self.tracker.add(BUFFERS, size)
        self._release(unit)
        if not with_grads:
            return
        if not flat:
            self.tracker.add(BUFFERS, size)  # one flat input, copied together
        for p, shard in with_grads:
            p.grad = None
            piece = torch.empty_like(shard)
            self.tracker.track(piece, "gradients", self.tracker.owner(shard))
            shard.grad = piece
        for p in rows:
            piece = torch.empty(-(-_bytes(p) // self.world_size), dtype=torch.uint8, device=p.device)
            self.tracker.track(piece, "gradients", self.tracker.owner(p))
            unit.zeros.append(piece)
        self.tracker.add(BUFFERS, -self._reducing)
        self._reducing = size
        if flat and unit.parameters[0].device.type == "cpu":  # gloo has copied its input and returns when it is done
            self.tracker.add(BUFFERS, size)
            self.tracker.add(BUFFERS, -2 * size)
            self._reducing = 0

    def _drop_buffers(self) -> None:
        self.tracker.add(BUFFERS, -self._reducing - self._held)
        self._reducing = self._held = 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
