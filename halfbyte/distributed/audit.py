"""audit: what is sharded in which unit, what is not, and the memory that follows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from halfbyte.distributed.grouping import clean_name
from halfbyte.optim.sharding import is_dtensor

__all__ = ["WrapReport", "audit"]

ROOT = "(root)"


@dataclass(frozen=True)
class WrapReport:
    """How a model is sharded.

    Attributes:
        kind: "fsdp1", "fsdp2" or "none".
        units: names of the units, outermost first; "(root)" is what no other unit took.
        bytes_per_unit: bytes that gathering each unit takes on every rank.
        outside: names of the parameters that belong to no unit: every rank holds all of each.
        local_bytes: bytes of parameters this rank holds between steps.
        host_bytes: those of them that CPU offload keeps in host memory; their gradients are there, too.
        expected_peak: bytes of parameters and gradients on this rank at the worst moment of a step: its shards and their
            gradients, the root, the largest unit with those around it, the largest unit again (the next one is gathered
            while this one computes), and the largest unit's whole gradients. Activations and optimizer state come on top.
            Without what is in host memory.
    """

    kind: str
    units: tuple[str, ...]
    bytes_per_unit: Mapping[str, int]
    outside: tuple[str, ...]
    local_bytes: int
    expected_peak: int
    host_bytes: int = 0

    def __str__(self) -> str:
        if self.kind == "none":
            return f"not sharded: {len(self.outside)} parameters, {self.local_bytes / 1e6:.2f} MB on every rank"
        groups: dict[tuple[str, int], int] = {}
        for name, size in self.bytes_per_unit.items():
            key = (re.sub(r"\b\d+\b", "*", name), size)
            groups[key] = groups.get(key, 0) + 1
        table = [("unit", "count", "MB each")]
        table += [(name, str(count), f"{size / 1e6:.3f}") for (name, size), count in groups.items()]
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        lines = [f"{n.ljust(widths[0])}  {count.rjust(widths[1])}  {size.rjust(widths[2])}" for n, count, size in table]
        inner = sum(name != ROOT for name in self.units)
        text = "\n".join(
            [
                f"{self.kind}: {inner} units and the root; {self.local_bytes / 1e6:.2f} MB of parameters per rank",
                *lines,
                f"expected peak per rank without activations and optimizer: {self.expected_peak / 1e6:.2f} MB",
            ]
        )
        if self.host_bytes:
            text += f"\nin host memory: {self.host_bytes / 1e6:.2f} MB of the parameters per rank, and their gradients"
        if self.outside:
            more = ", ..." if len(self.outside) > 3 else ""
            text += f"\nwhole on every rank: {len(self.outside)} parameters: {', '.join(self.outside[:3])}{more}"
        return text


@dataclass
class _Unit:
    name: str
    full: int = 0
    local: int = 0
    local_gradients: int = 0
    full_gradients: int = 0
    offloaded: bool = False


def audit(model: nn.Module) -> WrapReport:
    """Says how a model is sharded by FSDP1 or FSDP2; nothing is communicated.

    Args:
        model: the wrapped model, or a module inside of which units are.

    Returns:
        A `WrapReport`; for a model that is not sharded its kind is "none" and every parameter is outside.

    Example:
        >>> import torch, halfbyte.distributed
        >>> print(halfbyte.distributed.audit(torch.nn.Linear(1000, 1000, bias=False)))
        not sharded: 1 parameters, 4.00 MB on every rank
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    modules = list(model.modules())
    if any(isinstance(m, FullyShardedDataParallel) for m in modules):
        kind, units = "fsdp1", _fsdp1_units(model)
    elif any(isinstance(m, FSDPModule) for m in modules):
        kind, units = "fsdp2", _fsdp2_units(model)
    else:
        kind, units = "none", []
    outside = {
        clean_name(name): p
        for name, p in model.named_parameters()
        if not is_dtensor(p) and not getattr(p, "_fsdp_flattened", False)
    }
    replicated = sum(p.numel() * p.element_size() for p in outside.values())
    return WrapReport(
        kind,
        tuple(unit.name for unit in units),
        {unit.name: unit.full for unit in units},
        tuple(outside),
        replicated + sum(unit.local for unit in units),
        replicated + _expected_peak(units),
        sum(unit.local for unit in units if unit.offloaded),
    )


def _expected_peak(units: list[_Unit]) -> int:
    inner = [unit for unit in units if unit.name != ROOT]
    root = sum(unit.full for unit in units if unit.name == ROOT)

    def with_enclosing(unit: _Unit) -> int:
        return sum(u.full for u in inner if u is unit or unit.name.startswith(f"{u.name}."))

    return (
        sum(unit.local + unit.local_gradients for unit in units if not unit.offloaded)
        + root
        + max((with_enclosing(unit) for unit in inner), default=0)
        + max((unit.full for unit in inner), default=0)
        + max((unit.full_gradients for unit in units), default=0)
    )


def _fsdp2_units(model: nn.Module) -> list[_Unit]:
    from torch.distributed.fsdp import FSDPModule

    units: list[_Unit] = []
    owner: dict[nn.Module, _Unit] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, unit: _Unit | None) -> None:
        if module in owner:
            return
        if isinstance(module, FSDPModule):
            unit = _Unit(name or ROOT, offloaded=_offloads(module))
            units.append(unit)
        if unit is not None:
            owner[module] = unit
            for parameter in module.parameters(recurse=False):
                if is_dtensor(parameter) and id(parameter) not in seen:
                    seen.add(id(parameter))
                    _count_dtensor(unit, parameter)
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, unit)

    visit(model, "", None)
    return units


def _offloads(unit: Any) -> bool:
    """Whether an FSDP2 unit keeps its shards in the memory of another device than it computes on."""
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # torch < 2.13
    return any(p.offload_to_cpu for g in groups if g is not None and g.device.type != "cpu" for p in g.fsdp_params)


def _count_dtensor(unit: _Unit, parameter: Any) -> None:
    full = parameter.numel() * parameter.element_size()
    local = parameter.to_local().numel() * parameter.element_size()
    unit.full += full
    unit.local += local
    if parameter.requires_grad:
        unit.full_gradients += full
        unit.local_gradients += local


def _fsdp1_units(model: nn.Module) -> list[_Unit]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = []
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            unit = _Unit(clean_name(name) or ROOT)
            units.append(unit)
            handle = module._handle
            if handle is None:  # every parameter below it belongs to a unit further in
                continue
            unit.offloaded = handle._offload_params and handle.device.type != "cpu"
            flat: Any = handle.flat_param
            unit.full = flat._unpadded_unsharded_size.numel() * flat.element_size()
            unit.local = flat.numel() * flat.element_size()
            if flat.requires_grad:
                unit.full_gradients, unit.local_gradients = unit.full, unit.local
    return units
