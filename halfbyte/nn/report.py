"""report and verify: what is packed, what is dense and why, and whether the packed rows are sound."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from halfbyte.distributed.grouping import clean_name
from halfbyte.errors import QuantizationError
from halfbyte.nn.experts import QuantExperts, expert_weights
from halfbyte.nn.linear_classes import is_linear, is_stored_transposed, linear_shape
from halfbyte.nn.packed import Packed, PackedRows
from halfbyte.nn.skip import dense_reason
from halfbyte.optim.sharding import annotate_fsdp1, global_shape, is_dtensor, is_fsdp1


@dataclass(frozen=True)
class ReportRow:
    """One module (or the rest of the model) in a `Report`.

    Attributes:
        name: dotted name of the module; "(everything else)" for the last row.
        format: its format's string, or None if it is dense.
        bytes: bytes of its parameters and buffers.
        dense_bytes: bytes they would take with a dense weight in the dtype the module was built with.
        reason: why it stayed dense, or None.
        error: relative error of the weight, ||W - dequantized|| / ||W||, if a reference was given to `verify`.
    """

    name: str
    format: str | None
    bytes: int
    dense_bytes: int
    reason: str | None = None
    error: float | None = None


@dataclass(frozen=True)
class Report:
    """What a model is made of; `str()` is an aligned table in which layers that differ only in numbers share a line.

    Attributes:
        rows: a `ReportRow` per packed module and per dense linear or embedding, and one for everything else.
    """

    rows: tuple[ReportRow, ...] = field(default=())

    @property
    def bytes(self) -> int:
        """Bytes of all parameters and buffers, tied ones counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def dense_bytes(self) -> int:
        """Bytes the model would take with dense weights."""
        return sum(row.dense_bytes for row in self.rows)

    @property
    def quantized(self) -> tuple[str, ...]:
        """Names of the packed modules."""
        return tuple(row.name for row in self.rows if row.format)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the modules that stayed dense for a recorded reason."""
        return tuple(row.name for row in self.rows if row.reason)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[ReportRow]] = {}
        for row in self.rows:
            if row.reason and row.reason.startswith("adapter"):  # dozens of lines that say the same
                key = ("(adapters)", "dense", "")
            else:
                key = (re.sub(r"\b\d+\b", "*", row.name), row.format or "dense", row.reason or "")
            groups.setdefault(key, []).append(row)
        table = [("module", "count", "format", "MB", "dense MB", "error", "why dense")]
        for (name, format, reason), rows in groups.items():
            errors = [row.error for row in rows if row.error is not None]
            size, dense = sum(r.bytes for r in rows), sum(r.dense_bytes for r in rows)
            error = f"{max(errors):.4f}" if errors else ""
            table.append((name, str(len(rows)), format, f"{size / 1e6:.2f}", f"{dense / 1e6:.2f}", error, reason))
        ratio = f"{self.dense_bytes / self.bytes:.2f}x smaller" if self.bytes else ""
        table.append(("total", "", "", f"{self.bytes / 1e6:.2f}", f"{self.dense_bytes / 1e6:.2f}", "", ratio))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        numeric = (1, 3, 4, 5)
        lines = [
            "  ".join(
                cell.rjust(widths[i]) if i in numeric else cell.ljust(widths[i]) for i, cell in enumerate(line)
            ).rstrip()
            for line in table
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def report(model: nn.Module) -> Report:
    """Lists what is packed, what is dense and why, and the bytes of both.

    Args:
        model: any module, quantized or not. Of a sharded one the bytes are those of all ranks together, and names are
            those of the model before it was wrapped.

    Returns:
        A `Report`.

    Raises:
        ValueError: a module inside FSDP1's root, from which sizes can't be told: pass the root, or call
            `halfbyte.optim.annotate_fsdp1` on it first, as our strategies do.

    Example:
        >>> import torch, halfbyte
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False))
        >>> halfbyte.quantize_model(model).bytes
        589824
    """
    if is_fsdp1(model):
        annotate_fsdp1(model)
    seen: set[int] = set()

    def size_of(module: nn.Module) -> int:
        total = 0
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                total += global_shape(tensor).numel() * tensor.element_size()
        return total

    rows, rest = [], 0
    for wrapped_name, module in model.named_modules():
        name, size = clean_name(wrapped_name), size_of(module)
        if isinstance(module, PackedRows):
            row_count, columns = module.weight_shape
            dense = size + row_count * (columns * module.dense_dtype.itemsize - module.format.row_bytes(columns))
            rows.append(ReportRow(name, str(module.format), size, dense))
        elif isinstance(module, QuantExperts):
            dense = size + sum(
                math.prod(shape[:-1]) * (shape[-1] * module.dense_dtype.itemsize - module.format.row_bytes(shape[-1]))
                for shape in module.weight_shapes.values()
            )
            rows.append(ReportRow(name, str(module.format), size, dense))
        elif isinstance(module, nn.Embedding) or linear_shape(module) or expert_weights(module):
            rows.append(ReportRow(name, None, size, size, dense_reason(module)))
        else:
            rest += size
    if rest or not rows:
        rows.append(ReportRow("(everything else)", None, rest, rest))
    return Report(tuple(rows))


def verify(model: nn.Module, reference: nn.Module | Mapping[str, Tensor] | None = None) -> Report:
    """Checks that a model is quantized as asked and that its rows are sound.

    Args:
        model: a quantized model.
        reference: the dense model, or its state dict, to compare the weights with; names must be the same.

    Returns:
        The `Report`; with `reference` the packed rows carry `.error`, worst first.

    Raises:
        ValueError: the model is sharded.
        QuantizationError: no packed module at all; a frozen `nn.Linear` without a recorded reason to be dense; rows of the
            wrong dtype or size; scales that are NaN or Inf; a layer that `reference` lacks. `.names` lists the modules.
    """
    problems: dict[str, str] = {}
    packed = {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
    if not packed:
        from halfbyte.nn.convert import nothing_quantized

        raise nothing_quantized(model, "verify")
    sharded = [
        name
        for name, module in packed.items()
        for rows in module.parameters(recurse=False)
        if is_dtensor(rows) or getattr(rows, "_fsdp_flattened", False)
    ]
    if sharded:
        raise ValueError(
            f"verify: {clean_name(sharded[0])} is sharded, no rank has all of its rows; verify the model before that"
        )
    for name, module in model.named_modules():
        if isinstance(module, Packed):
            problem = _unsound(module) if isinstance(module, PackedRows) else _unsound_experts(module)
            if problem:
                problems[name] = problem
        elif is_linear(module):
            frozen = not module.get_parameter("weight").requires_grad
            if frozen and not dense_reason(module):
                problems[name] = f"asked for but dense: a frozen {type(module).__name__} in a quantized model"
    if problems:
        listed = "; ".join(f"{name}: {problem}" for name, problem in list(problems.items())[:5])
        raise QuantizationError(f"verify: {len(problems)} modules are not sound: {listed}", names=problems)
    found = report(model)
    if reference is None:
        return found
    dense = reference.state_dict() if isinstance(reference, nn.Module) else reference
    missing = [f"{name}.{leaf}" for name, m in packed.items() for leaf in _leaves(m) if _key(name, leaf) not in dense]
    if missing:
        raise QuantizationError(f"verify: reference has no weight for {', '.join(missing[:5])}", names=missing)
    rows = []
    for row in found.rows:
        error = None
        if row.format:
            module = packed[row.name]
            pairs = ((leaf, dense[_key(row.name, leaf)]) for leaf in _leaves(module))
            error = max(_relative_error(module, leaf, weight) for leaf, weight in pairs)
        rows.append(ReportRow(row.name, row.format, row.bytes, row.dense_bytes, row.reason, error))
    return Report(tuple(sorted(rows, key=lambda row: -1.0 if row.error is None else row.error, reverse=True)))


def _leaves(module: nn.Module) -> tuple[str, ...]:
    return tuple(module.weight_shapes) if isinstance(module, QuantExperts) else ("weight",)


def _key(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _unsound_experts(module: nn.Module) -> str | None:
    assert isinstance(module, QuantExperts)
    for name, (E, N, K) in module.weight_shapes.items():
        packed = module.get_parameter(name)
        expected = (E, N, module.format.row_bytes(K))
        if packed.dtype != torch.uint8 or tuple(packed.shape) != expected:
            return f"{name} must be uint8 {expected} for {module.format}, got {packed.dtype} {tuple(packed.shape)}"
        if packed.is_meta:
            return "the rows are on meta: nothing was loaded"
        step = module.format.block_size or K
        bad = [e for e in range(E) if not bool(torch.isfinite(module.dequantize(name, e, torch.float32)[:, ::step]).all())]
        if bad:
            return f"{name} of experts {bad[:5]} has scales that are NaN or Inf"
    return None


def _unsound(module: PackedRows) -> str | None:
    rows, columns = module.weight_shape
    packed = module.packed
    expected = (rows, module.format.row_bytes(columns))
    if packed.dtype != torch.uint8 or tuple(packed.shape) != expected:
        return f"rows must be uint8 {expected} for {module.format}, got {packed.dtype} {tuple(packed.shape)}"
    if packed.is_meta:
        return "the rows are on meta: nothing was loaded"
    # One element per scale is enough: a bad scale makes all of its block NaN or Inf.
    values = module.dequantize(torch.float32)
    step = module.format.block_size or columns
    if not bool(torch.isfinite(values[:, ::step]).all()):
        bad = int((~torch.isfinite(values[:, ::step])).any(1).sum())
        return f"{bad} of {rows} rows have scales that are NaN or Inf"
    return None


def _relative_error(module: nn.Module, leaf: str, dense: Tensor) -> float:
    if isinstance(module, QuantExperts):
        E = module.weight_shapes[leaf][0]
        values = torch.stack([module.dequantize(leaf, expert, torch.float32) for expert in range(E)])
        values = values.transpose(-1, -2) if module.is_transposed else values
    else:
        assert isinstance(module, PackedRows)
        values = module.dequantize(torch.float32)
        values = values.t() if is_stored_transposed(module) else values
    reference = dense.detach().to(values.device, torch.float32)
    difference = values - reference
    norm = float(reference.norm())
    return float(difference.norm()) / norm if norm else float(difference.norm())
