"""A checkpoint seen as the saved folder that transformers would make of it: each row traced to the stored row it is.

Which rows end up where is found by letting transformers' own operations work on numbers that stand for rows: what comes out
says, for every row of the saved folder, which row (or column) of which stored tensor it is, so a merged tensor never exists
in full. An operation that computes something (a norm that is stored as w + 1) is noticed, and done on the values.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.sources import Entry, Found, fill_rows
from halfbyte.formats import Format
from peft_bridge.conversion import Step
from peft_bridge.readers import Reader, row_length

__all__ = ["ConvertedSource", "ModelTensor"]

_PIECE = 8 << 20  # bytes of rows, as float32, that are gathered before they are quantized or cast
_WIDTH = 4  # numbers that stand for a row: enough to notice what is reversed, rolled or interleaved within it
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: int64 products with it are undone by products with its inverse
_GATHER = pow(_SPREAD, -1, 1 << 64)
_GATHER -= (_GATHER >> 63) << 64


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer of the model.

    Attributes:
        shape: in the dense model, if it lies (..., K, N) there but its rows along K are to be packed: (..., N, K).
        dtype: that it is loaded in: what is stored is cast to it first.
        format: that it is to be packed in, or None.
        across: it lies (..., K, N).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    format: Format | None = None
    across: bool = False


@dataclass(frozen=True)
class _Origin:
    """Rows that can be had: those of a stored tensor, its columns, or those of a tensor that is computed."""

    kind: str  # "rows", "columns" or "computed"
    name: str
    start: int  # number of its first row
    count: int


class _Numbers:
    """Numbers for rows, of which any arithmetic makes something that is noticed."""

    def __init__(self) -> None:
        self._origins: dict[tuple[str, str], _Origin] = {}
        self._in_order: list[_Origin] = []
        self._starts = torch.full((1024,), torch.iinfo(torch.int64).max)  # of the origins, and room for more
        self._total = 0

    def stand_for(self, kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """int64 numbers in the place of a tensor of this shape, in which the dimension along a row has `_WIDTH` elements."""
        width = _WIDTH if len(shape) > 1 else 1
        dims = [*shape[:-1]] if len(shape) > 1 else [*shape]
        if kind == "columns":
            dims = [*shape[:-2], shape[-1]]
        origin = self._origins.get((kind, name))
        if origin is None:
            origin = _Origin(kind, name, self._total, torch.Size(dims).numel())
            self._origins[kind, name] = origin
            if len(self._in_order) == len(self._starts):
                self._starts = torch.cat([self._starts, torch.full_like(self._starts, torch.iinfo(torch.int64).max)])
            self._starts[len(self._in_order)] = origin.start
            self._in_order.append(origin)
            self._total += origin.count
        first, last = origin.start, origin.start + origin.count
        numbers = torch.arange(first * _WIDTH + 1, last * _WIDTH + 1).view(-1, _WIDTH)[:, :width]
        placed = (numbers * _SPREAD).view(*dims, width) if len(shape) > 1 else (numbers * _SPREAD).view(dims)
        return placed.transpose(-1, -2).contiguous() if kind == "columns" else placed

    def rows(self, numbers: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Numbers of rows, flat, of what stands in the place of a tensor of this shape; None if they are no rows of it."""
        width = _WIDTH if len(shape) > 1 else 1
        if numbers.dtype != torch.int64 or tuple(numbers.shape) != ((*shape[:-1], width) if len(shape) > 1 else shape):
            return None
        found = (numbers.reshape(-1, width) * _GATHER) - 1
        sound = (found >= 0) & (found < self._total * _WIDTH) & (found % _WIDTH == torch.arange(width))
        sound &= found // _WIDTH == found[:, :1] // _WIDTH
        return found[:, 0] // _WIDTH if bool(sound.all()) else None

    def segments(self, rows: Tensor) -> Iterator[tuple[_Origin, Tensor]]:
        """Stretches of rows of one origin, numbered within it."""
        owners, counts = torch.unique_consecutive(torch.searchsorted(self._starts, rows, right=True) - 1, return_counts=True)
        for owner, part in zip(owners.tolist(), rows.split(counts.tolist()), strict=True):
            origin = self._in_order[owner]
            yield origin, part - origin.start


class ConvertedSource:
    """Fills the tensors of a saved folder from the rows of a checkpoint, a few megabytes at a time.

    Args:
        reader: the checkpoint.
        loads: from its tensors to the model's.
        saves: from the model's, packed ones as rows, to those of the saved folder.
        tensors: the model's, by name.
        held_as: another name that the model's tensor was loaded under, where it is tied.
        cast_first: values are cast before, not after an operation computes with them.
        made_by: what else the content depends on, in JSON.
    """

    quantized = False

    def __init__(
        self,
        reader: Reader,
        loads: Sequence[Step],
        saves: Sequence[Step],
        tensors: Mapping[str, ModelTensor],
        held_as: Mapping[str, str],
        *,
        cast_first: bool,
        made_by: Any,
    ) -> None:
        self._reader, self._tensors, self._held_as = reader, tensors, held_as
        self._cast_first, self._made_by = cast_first, made_by
        self._loads = {name: step for step in loads for name in step.made}
        self._saves = {name: step for step in saves for name in step.made}
        self._numbers = _Numbers()
        self._loaded, self._saved, self._computed, self._matrix = _Recent(4), _Recent(4), _Recent(1), _Recent(1)

    def names(self) -> Iterator[str]:
        """Keys of the saved folder."""
        return iter(self._saves)

    def find(self, name: str, dense_shape: tuple[int, ...] | None, embedding: bool = False) -> Found:
        """As it will be saved."""
        made = self._saves[name].made[name]
        return Found(dense_shape or tuple(made.shape), made.dtype)

    def fill(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        """Gathers rows, casts them and quantizes them."""
        step = self._saves[entry.name]
        dtype = self._tensors[step.sources[0]].dtype
        wanted = self._saved.get_or(id(step), lambda: self._trace_saved(step))[entry.name]
        each, K = wanted.numel() // max(1, entry.rows), row_length(entry.dense_shape)
        wanted = wanted[start * each : stop * each]
        size, pieces = max(1, _PIECE // (4 * max(1, K))), out.view(max(1, wanted.numel()), -1)
        for first in range(0, wanted.numel(), size):
            rows = wanted[first : first + size]
            dense = torch.empty((rows.numel(), K), dtype=dtype)
            done = 0
            for origin, numbers in self._numbers.segments(rows):
                self._read(origin, numbers, dense[done : done + numbers.numel()])
                done += numbers.numel()
            fill_rows(entry, dense, pieces[first : first + size].view(-1))

    def _read(self, origin: _Origin, numbers: Tensor, out: Tensor) -> None:
        if origin.kind == "computed":
            values = self._compute(self._loads[origin.name])[origin.name]
            out.copy_(values.reshape(-1, out.shape[1])[numbers])
        elif origin.kind == "columns":
            *_, K, N = self._reader.shapes[origin.name]
            matrices, counts = torch.unique_consecutive(numbers // N, return_counts=True)
            for m, part, rows in zip(
                matrices.tolist(), (numbers % N).split(counts.tolist()), out.split(counts.tolist()), strict=True
            ):
                read = partial(self._reader.rows, origin.name, m * K, (m + 1) * K)
                rows.copy_(self._matrix.get_or((origin.name, m), read)[:, part].t())
        else:
            low, high = int(numbers.min()), int(numbers.max()) + 1
            if high - low <= numbers.numel() + 256:  # all of them or nearly so: heads that are permuted
                stored = self._reader.rows(origin.name, low, high)
                out.copy_(stored if high - low == numbers.numel() and _ascends(numbers) else stored[numbers - low])
                return
            ends = [0, *(torch.nonzero(numbers.diff() != 1).view(-1) + 1).tolist(), numbers.numel()]
            for first, last in pairwise(ends):
                low = int(numbers[first])
                out[first:last].copy_(self._reader.rows(origin.name, low, low + last - first))

    # ---- what is which row -------------------------------------------------------------------------------------------

    def _trace_saved(self, step: Step) -> dict[str, Tensor]:
        """Row numbers of each tensor that a saving step makes."""
        made = step.convert({name: self._stand_in(name) for name in step.sources})
        found = {}
        for name, numbers in made.items():
            rows = self._numbers.rows(numbers, tuple(step.made[name].shape))
            if rows is None:
                raise NotImplementedError(f"{name}: transformers saves something else of it than whole rows")
            found[name] = rows
        return found

    def _stand_in(self, name: str) -> Tensor:
        """Numbers in the place of a tensor of the model, its rows along the last dimension."""
        held = self._held_as.get(name, name)
        step = self._loads[held]
        numbers: Tensor = self._loaded.get_or(id(step), lambda: self._trace_loaded(step))[held]
        return numbers

    def _trace_loaded(self, step: Step) -> dict[str, Tensor]:
        shapes = {name: self._reader.shapes[name] for name in step.sources}
        kinds = ["rows", "columns"] if all(len(shape) > 1 for shape in shapes.values()) else ["rows"]
        for kind in kinds:
            stand_ins = {name: self._numbers.stand_for(kind, name, shape) for name, shape in shapes.items()}
            try:
                made = step.convert(stand_ins)
            except Exception:  # whatever it raises: it needs the length of a row, or the values in it
                continue
            made = {name: self._as_rows(name, numbers) for name, numbers in made.items()}
            if all(self._numbers.rows(made[name], self._tensors[name].shape) is not None for name in step.made):
                return made
        return {name: self._numbers.stand_for("computed", name, self._tensors[name].shape) for name in step.made}

    def _compute(self, step: Step) -> dict[str, Tensor]:
        """The tensors that a loading step makes, with values."""

        def compute() -> dict[str, Tensor]:
            values = {}
            dtype = self._tensors[next(iter(step.made))].dtype
            for name in step.sources:
                shape = self._reader.shapes[name]
                rows = torch.Size(shape).numel() // max(1, row_length(shape))
                value = self._reader.rows(name, 0, rows).reshape(shape)
                values[name] = value.to(dtype) if self._cast_first else value
            made = step.convert(values)
            return {name: self._as_rows(name, value.to(self._tensors[name].dtype)) for name, value in made.items()}

        computed: dict[str, Tensor] = self._computed.get_or(id(step), compute)
        return computed

    def _as_rows(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.transpose(-1, -2).contiguous() if self._tensors[name].across else tensor

    # ---- the checkpoint ----------------------------------------------------------------------------------------------

    def identity(self) -> Any:
        """The reader's, and what else the content depends on."""
        return json.loads(json.dumps([self._reader.identity(), self._made_by]))

    def check_unchanged(self) -> None:
        """Raises QuantizationError if a file was changed."""
        self._reader.check_unchanged()

    def close(self) -> None:
        """Closes the files."""
        self._reader.close()


class _Recent(OrderedDict[Any, Any]):
    """The last few results: neighbours in a folder are parts of the same tensors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def get_or(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result under `key`, made if it is not among them."""
        if key not in self:
            while len(self) >= self._size:  # before another one is made: both need not be in memory
                self.popitem(last=False)
            self[key] = make()
        self.move_to_end(key)
        return self[key]


def _ascends(numbers: Tensor) -> bool:
    return bool((numbers.diff() == 1).all())
