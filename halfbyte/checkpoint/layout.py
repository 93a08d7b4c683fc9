"""Which tensors of a model come from a checkpoint, as what, and where they go: decided before any of them is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.sources import Entry, Found, Source
from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.convert import nothing_quantized
from halfbyte.nn.embedding import quantize_embedding_
from halfbyte.nn.experts import QuantExperts, expert_shape, expert_weights, quantize_experts_
from halfbyte.nn.linear import quantize_linear_
from halfbyte.nn.linear_classes import is_conv1d, linear_shape
from halfbyte.nn.packed import Packed, PackedRows
from halfbyte.nn.skip import SkipRules, mark_dense, tell_config
from halfbyte.optim.sharding import is_dtensor

__all__ = ["Layout", "Slot", "apply_layout", "fill_rest", "plan_layout", "skeleton", "slots_of"]

DENSE_THERE = "dense in the checkpoint"
FRESH = "not in the checkpoint: keeps the values it was built with"


@dataclass(frozen=True)
class Layout:
    """What a load will put into a model; made by the rank that sees the checkpoint, followed by all.

    Attributes:
        entries: every parameter and persistent buffer, tied ones once, in the order of the model.
        fresh: those of `entries` that the checkpoint doesn't hold: the source rank's own values travel.
        reasons: why modules stay dense, by name.
    """

    entries: tuple[Entry, ...]
    fresh: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Slot:
    """Where an entry lives in this process.

    Attributes:
        entry: what it is.
        owners: (module, attribute) pairs that hold it; several if it is tied.
        start: first row of the whole tensor that this rank holds.
        stop: its last row + 1.
    """

    entry: Entry
    owners: list[tuple[nn.Module, str]]
    start: int
    stop: int

    @property
    def tensor(self) -> Any:
        """The parameter or buffer, a DTensor if it is sharded."""
        module, attribute = self.owners[0]
        return module._parameters.get(attribute, module._buffers.get(attribute))

    @property
    def local(self) -> Tensor:
        """This rank's rows."""
        tensor = self.tensor.detach()
        return tensor.to_local() if is_dtensor(tensor) else tensor

    def memory(self) -> Tensor | None:
        """This rank's rows as flat bytes where they can be written in place, else None."""
        local = self.local
        if not local.is_cpu or not local.is_contiguous():
            return None
        return local.reshape(-1).view(torch.uint8)

    def write(self, first: int, data: Tensor) -> None:
        """Copies the bytes of whole rows (uint8, CPU) to this rank's rows from `first` on."""
        if data.numel():
            rows = data.view(self.entry.dtype).view(-1, *self.entry.shape[1:])
            target = self.local if self.entry.shape else self.local.reshape(1)
            target[first : first + rows.shape[0]].copy_(rows)


def named_tensors(model: nn.Module, *, aliases: bool = False) -> dict[str, list[tuple[nn.Module, str]]]:
    """Owners of every parameter and persistent buffer by key; tied ones under their first key, or under each."""
    from halfbyte.distributed.grouping import clean_name

    found: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or attribute in module._non_persistent_buffers_set:
                continue
            owners = found.setdefault(id(tensor), [])
            if aliases or not owners:
                names[clean_name(f"{path}.{attribute}" if path else attribute)] = id(tensor)
            if all(module is not owner or attribute != other for owner, other in owners):
                owners.append((module, attribute))
    return {name: found[key] for name, key in names.items()}


def _all_names(model: nn.Module) -> set[str]:
    """Every key that names something of the model: tied ones under each name, buffers that are not saved, too."""
    from halfbyte.distributed.grouping import clean_name

    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        found |= {clean_name(f"{path}.{name}" if path else name) for name in [*module._parameters, *module._buffers]}
    return found


def packed_shape(module: nn.Module, attribute: str) -> tuple[int, ...] | None:
    """Shape (..., K) of the dense tensor that packed rows of a module stand for; None if the tensor is not packed."""
    if isinstance(module, QuantExperts):
        return module.weight_shapes.get(attribute)
    return module.weight_shape if isinstance(module, PackedRows) and attribute == "weight" else None


def dense_shape(owners: list[tuple[nn.Module, str]]) -> tuple[int, ...]:
    """Shape of the dense tensor that an entry stands for."""
    module, attribute = owners[0]
    rows_of = packed_shape(module, attribute)
    if rows_of is not None:
        return rows_of
    tensor: Any = module._parameters.get(attribute, module._buffers.get(attribute))
    return tuple(tensor.shape)


def skeleton(model: nn.Module) -> list[list[Any]]:
    """What a model is made of, in JSON: equal on all ranks that may load together."""
    found = []
    for name, owners in named_tensors(model).items():
        module, attribute = owners[0]
        tensor: Any = module._parameters.get(attribute, module._buffers.get(attribute))
        packed = isinstance(module, Packed) and packed_shape(module, attribute) is not None
        kind = str(module.format) if packed else str(tensor.dtype).removeprefix("torch.")
        found.append([name, kind, list(dense_shape(owners))])
    return found


def plan_layout(model: nn.Module, source: Source, format: Format | None, skip: Iterable[str] | None) -> Layout:
    """Decides what becomes of every tensor.

    A layer that the source holds as rows becomes packed in their format; in a quantized checkpoint the others stay dense.
    From a dense checkpoint, what `quantize_model` would quantize is.

    Raises:
        QuantizationError: a tensor is missing, unexpected or of another shape, or a format contradicts another.
        ValueError: the model is wrapped in FSDP1, or would have to change a layer that is sharded already.
    """
    by_rule = SkipRules(skip).of_model(model)
    by_owner = by_rule if skip is not None else SkipRules(()).of_model(model)  # names don't bind what is rows already
    named, held, aliases = named_tensors(model), set(source.names()), _aliases(model)
    problems: dict[str, str] = {}
    entries, fresh, reasons = [], set(), {}
    for name, owners in named.items():
        module, attribute = owners[0]
        tensor: Any = module._parameters.get(attribute, module._buffers.get(attribute))
        owner = name.rpartition(".")[0]
        if getattr(module, "_contained", False):
            raise ValueError(f"load_quantized: {owner} is prepared for FSDP1; load the model before it is wrapped")
        key = next((other for other in aliases[name] if other in held), None)
        shape = dense_shape(owners)
        if key is None:
            packed = packed_shape(module, attribute) is not None
            whole_layer = isinstance(module, nn.Linear) and not (packed or is_dtensor(tensor) or f"{owner}.weight" in held)
            if not whole_layer or tensor.is_meta:
                problems[name] = "missing from the checkpoint"
                continue
            fresh.add(name)
            reasons[owner] = by_rule.get(module, FRESH)
            entries.append(Entry(name, shape, tensor.dtype))
            continue
        found = source.find(key, shape, isinstance(module, nn.Embedding))
        if found.format is not None and not isinstance(module, Packed):
            # Rows lie along K even where the dense module stores them across.
            if attribute in expert_weights(module):
                shape = expert_shape(module, tensor)
            elif is_conv1d(module) and attribute == "weight":
                shape = linear_shape(module) or shape
        if found.shape is not None and tuple(found.shape) != shape:
            problems[name] = f"has shape {tuple(found.shape)} in the checkpoint, {shape} in the model"
            continue
        chosen, why = _format_for(module, attribute, found, source.quantized, format, by_rule, by_owner)
        if why and chosen is None:
            reasons[owner] = why
        elif why:
            problems[name] = why
            continue
        if chosen is not None and not isinstance(module, Packed) and is_dtensor(tensor):
            raise ValueError(
                f"load_quantized: {owner} is sharded while it is dense, so it can't become packed; build the model under "
                f"halfbyte.init_quantized (or call quantize_model) before sharding it"
            )
        entries.append(Entry(key, shape, tensor.dtype) if chosen is None else Entry.packed(key, shape, chosen))
    for path, module in model.named_modules():  # tied ones: their tensor was decided under another name
        if isinstance(module, nn.Linear) and not isinstance(module, PackedRows) and module in by_rule:
            reasons.setdefault(path, by_rule[module])
    packed_names = {entry.name.rpartition(".")[0] for entry in entries if entry.format}
    reasons = {path: reason for path, reason in reasons.items() if path not in packed_names}
    unexpected = sorted(held - _all_names(model))
    problems.update((name, "not in the model") for name in unexpected)
    if problems:
        listed = "; ".join(f"{name}: {problem}" for name, problem in list(problems.items())[:8])
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise QuantizationError(f"load_quantized: model and checkpoint don't fit: {listed}{more}", problems)
    if not any(entry.format for entry in entries):
        for name, reason in reasons.items():
            mark_dense(model.get_submodule(name), reason)
        raise nothing_quantized(model, "load_quantized")
    return Layout(tuple(entries), frozenset(fresh), reasons)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Every key of a tied tensor by its first."""
    grouped: dict[tuple[int, str], list[str]] = {}
    for name, owners in named_tensors(model, aliases=True).items():
        grouped.setdefault((id(owners[0][0]), owners[0][1]), []).append(name)
    return {names[0]: names for names in grouped.values()}


def _format_for(
    module: nn.Module,
    attribute: str,
    found: Found,
    quantized: bool,
    format: Format | None,
    by_rule: Mapping[nn.Module, str],
    by_owner: Mapping[nn.Module, str],
) -> tuple[Format | None, str | None]:
    """(format of the rows or None, why it stays dense or what is wrong)."""
    if isinstance(module, Packed) and packed_shape(module, attribute) is not None:
        wanted = format if format is not None and not isinstance(module, nn.Embedding) else module.format
        if wanted != module.format:
            return module.format, f"the module is {module.format} already, format={str(format)!r} was asked for"
        if found.format not in (None, wanted) or found.reason:
            stored = f"holds {found.format} rows" if found.format else found.reason
            return module.format, f"the checkpoint {stored}, the module is {module.format}"
        return module.format, None
    if found.format is not None and attribute in expert_weights(module):
        return found.format, None
    if attribute != "weight":
        return (None, None) if found.format is None else (found.format, "rows that are no layer's weight")
    if not isinstance(module, nn.Linear | nn.Embedding) and not (is_conv1d(module) and found.format):
        return (None, None) if found.format is None else (found.format, "rows that are no layer's weight")
    if found.reason or (found.format is not None and module in by_owner):
        return None, f"dequantized on loading: {found.reason or by_owner[module]}"
    if found.format is not None:
        if format is not None and linear_shape(module) and format != found.format:
            return found.format, f"the checkpoint holds {found.format} rows, format={str(format)!r} was asked for"
        return found.format, None
    if isinstance(module, nn.Embedding):
        return None, by_rule.get(module)
    if module in by_rule:
        return None, by_rule[module]
    if quantized:
        return None, DENSE_THERE
    return format or Format.parse("nf4"), None


def apply_layout(
    model: nn.Module, layout: Layout, compute_dtype: torch.dtype | None, device: torch.device | None
) -> list[Slot]:
    """Gives layers their packed class and every tensor memory; values come afterwards.

    Dense weights are released before memory for rows is taken.
    """
    for path, module in model.named_modules():
        if path in layout.reasons:
            mark_dense(module, layout.reasons[path])
        if isinstance(module, Packed) and compute_dtype is not None:
            module.compute_dtype = compute_dtype
    named = named_tensors(model, aliases=True)
    devices = {owners[0][0]: device or _device_of(owners) for owners in named.values()}
    for entry in layout.entries:
        module, _ = named[entry.name][0]
        if entry.format is None or isinstance(module, Packed):
            continue
        if expert_weights(module):
            for name in expert_weights(module):
                module._parameters[name] = nn.Parameter(module.get_parameter(name).to("meta"), requires_grad=False)
            quantize_experts_(module, entry.format, compute_dtype)
            continue
        weight: Any = module._parameters["weight"]
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        module._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        if linear_shape(module):
            quantize_linear_(module, entry.format, compute_dtype)
        else:
            assert isinstance(module, nn.Embedding)
            quantize_embedding_(module, entry.format, compute_dtype)
    for module in model.modules():
        tell_config(module)
    slots = slots_of(layout, named)
    for slot in slots:
        tensor = slot.tensor
        target = devices[slot.owners[0][0]] if tensor.is_meta else device
        if tensor.is_meta or (device is not None and tensor.device.type != device.type):
            _materialize(slot, tensor, target or torch.device("cpu"))
    return slots


def _device_of(owners: list[tuple[nn.Module, str]]) -> torch.device:
    module, attribute = owners[0]
    tensor: Any = module._parameters.get(attribute, module._buffers.get(attribute))
    if is_dtensor(tensor):
        return torch.device(tensor.device_mesh.device_type)
    return torch.device("cpu") if tensor.is_meta else tensor.device


def slots_of(layout: Layout, named: Mapping[str, list[tuple[nn.Module, str]]]) -> list[Slot]:
    """Where each entry lives here, with the rows that this rank holds.

    Raises:
        ValueError: a DTensor is placed otherwise than in whole rows.
    """
    slots = []
    for entry in layout.entries:
        slot = Slot(entry, named[entry.name], 0, entry.rows)
        tensor = slot.tensor
        if is_dtensor(tensor):
            slot.start, slot.stop = _rows_of(entry.name, tensor)
        slots.append(slot)
    return slots


def _rows_of(name: str, tensor: Any) -> tuple[int, int]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in tensor.placements:
        if not (placement.is_replicate() or (isinstance(placement, Shard) and placement.dim == 0)):
            raise ValueError(
                f"load_quantized: {name} is placed as {tensor.placements}; only Shard(0) and Replicate() keep rows whole"
            )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not tensor.dim():
        return 0, 1
    rows = int(shape[0])
    first = int(offset[0]) if rows else int(tensor.shape[0])
    return first, first + rows


def _materialize(slot: Slot, tensor: Any, device: torch.device) -> None:
    """Replaces the tensor in all of its owners by uninitialized memory."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    fresh: Any = torch.empty(local.shape, dtype=local.dtype, device=device)
    if not tensor.is_meta:
        fresh.copy_(local.detach())
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor

        fresh = DTensor.from_local(
            fresh, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    for module, attribute in slot.owners:
        (module._parameters if attribute in module._parameters else module._buffers)[attribute] = fresh


def fill_rest(model: nn.Module, device: torch.device | None) -> None:
    """Computes what no checkpoint holds and is still on meta: buffers that are not saved, such as rotary frequencies.

    Those that have values only move to `device`. The others are computed by the model's own `_init_weights`
    (transformers) or the module's `reset_parameters`.

    Raises:
        QuantizationError: neither computes it; the buffers are named.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if device is not None and buffer is not None and buffer.device.type not in ("meta", device.type):
                module._buffers[name] = buffer.to(device)
    left = []
    initializers: list[Any] = [m._init_weights for m in model.modules() if callable(getattr(m, "_init_weights", None))]
    for path, module in model.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        for name in names:  # NaN (or -1) stands for what nobody has computed
            buffer = module._buffers[name]
            assert buffer is not None
            empty = torch.empty_like(buffer, device=device or "cpu")
            module._buffers[name] = empty.fill_(float("nan") if empty.is_floating_point() else -1)
        own: Any = getattr(module, "reset_parameters", None)
        alone = not any(True for _ in module.parameters())  # nothing in it that would be drawn anew
        if alone and initializers:
            initializers[0](module)
        elif alone and callable(own):
            own()
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            unset = buffer.isnan().all() if buffer.is_floating_point() else (buffer == -1).all()
            if buffer.numel() and bool(unset):
                left.append(f"{path}.{name}" if path else name)
    if left:
        raise QuantizationError(
            f"load_quantized: {', '.join(left[:5])} are buffers that checkpoints don't hold, and are on meta; build the "
            f"model with them on a real device",
            left,
        )
