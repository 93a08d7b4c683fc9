"""Sizes: simulated steps of one subject at several batch sizes and sequence lengths, and the largest that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from halfbyte.formats import Format
from halfbyte.memory.simulate import simulate
from halfbyte.memory.subject import Subject, packed_bytes

__all__ = ["VARY", "Sizes"]

VARY = ("batch_size", "seq_len")
PACKED = "weights, packed"


@dataclass(frozen=True)
class _Step:
    """A simulated step: bytes by kind at its peak, the sum at every moment, and what is added to each of them."""

    rows: dict[str, int]
    sums: list[int]
    constant: int

    @property
    def peak(self) -> int:
        return sum(self.rows.values())


@dataclass
class Sizes:
    """Steps of one subject; each (batch_size, seq_len) is simulated once.

    Attributes:
        make: makes the subject, with equal blocks folded or not.
        arguments: what `simulate` takes besides sizes.
        more: bytes that packed weights take more than in the simulated format.
    """

    make: Callable[[bool], Subject]
    arguments: dict[str, Any]
    more: int = 0
    _subject: Subject | None = None
    _steps: dict[tuple[int, int], _Step] = field(default_factory=dict)
    _exact: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        """What is simulated."""
        if self._subject is None:
            self._subject = self.make(True)
        return self._subject

    def in_format(self, format: Format) -> Sizes:
        """The same for another packed format. Nothing but the packed weights differs, which a rank holds all the time:
        not for sharded strategies, whose gathered units differ too.
        """
        more = packed_bytes(self.subject, format) - packed_bytes(self.subject, None)
        return Sizes(self.make, self.arguments, more, self.subject, self._steps, self._exact)

    def rows(self, batch_size: int, seq_len: int) -> dict[str, int]:
        """Bytes by kind at the peak."""
        rows = dict(self._step(batch_size, seq_len).rows)
        if self.more:
            rows[PACKED] = rows.get(PACKED, 0) + self.more
        return rows

    def _step(self, batch_size: int, seq_len: int) -> _Step:
        at = (batch_size, seq_len)
        if at not in self._steps:
            try:
                tracker = simulate(self.subject, batch_size=batch_size, seq_len=seq_len, **self.arguments)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise NotImplementedError(
                    f"plan: a step of {self.subject.name} depends on its data ({error.func}), and there is none; supported "
                    "are models whose shapes depend on the sizes of the batch, and mixtures with transformers' fused experts"
                ) from error
            except Exception:
                if not self.subject.folds:
                    raise
                # A model that finds its blocks by number, for example. The whole one works, or says what is wrong.
                self._subject = self.make(False)
                tracker = simulate(self.subject, batch_size=batch_size, seq_len=seq_len, **self.arguments)
            self._steps[at] = _Step(dict(tracker.at_peak), tracker.sums, tracker.peak - max(tracker.sums))
        return self._steps[at]

    def largest(self, available: int, vary: str, batch_size: int, seq_len: int, limit: int) -> int:
        """The largest batch size or sequence length whose peak fits into `available` bytes.

        At every moment of a step, what is alive grows with the batch as a line, with the sequence at most as a parabola. So
        two simulated sizes (three where it is a parabola) give every moment of any other, the largest of them its peak, and
        the size that fits, which is simulated too. The next one needs no simulation: peaks are largest values of such
        curves, which bend upwards only, so that the line through two smaller sizes runs below them.
        """
        available -= self.more

        def step(size: int) -> _Step:
            return self._step(size, seq_len) if vary == "batch_size" else self._step(batch_size, size)

        key = (vary, seq_len if vary == "batch_size" else batch_size)
        start = min(limit, batch_size if vary == "batch_size" else seq_len)
        known = points = {size: step(size) for size in (start, 2 * start)}
        low, high = 0, limit + 1  # the largest known to fit, the smallest known not to
        while high - low > 1:
            guess = min(high - 1, max(low + 1, _largest(points, available, limit)))
            first, last = self._exact.get(key, (1, 0))
            if first <= guess <= 1.05 * last:  # a search for another format has found the prediction exact here
                return guess
            predicted, got = _peak(points, guess), step(guess)
            known = {**known, guess: got}
            exact = abs(predicted - got.peak) <= 1e-6 * got.peak
            if exact:
                self._exact[key] = min(guess, *points), max(guess, *points)
            if got.peak > available:
                high = guess
            else:
                low = guess
                before = max((size for size in known if size < guess), default=0)
                slope = (got.peak - known[before].peak) / (guess - before) if before else 0
                if exact or got.peak + slope > available:
                    return guess
            # Sizes whose steps run the same ops, the nearest first; a third one where two did not suffice.
            nearest = sorted(known, key=lambda size: (len(known[size].sums) != len(got.sums), abs(size - guess)))
            points = {size: known[size] for size in nearest[: 2 if vary == "batch_size" or len(known) < 4 else 3]}
        return low


def _moments(points: dict[int, _Step], size: int) -> torch.Tensor:
    """Sums at every moment of a step of another size: the polynomial through the known ones."""
    same = len({len(step.sums) for step in points.values()}) == 1
    total = torch.zeros(1, dtype=torch.float64)
    for at, step in points.items():
        weight = 1.0
        for other in points:
            if other != at:
                weight *= (size - other) / (at - other)
        # Other ops at other sizes: the moments are not each other's, their largest still is.
        sums = step.sums if same else [max(step.sums)]
        total = total + weight * (torch.tensor(sums, dtype=torch.float64) + step.constant)
    return total


def _peak(points: dict[int, _Step], size: int) -> float:
    return float(_moments(points, size).max())


def _largest(points: dict[int, _Step], available: int, limit: int) -> int:
    """The largest size whose predicted peak fits, 0 if none."""
    low, high = 0, 1
    while high <= limit and _peak(points, high) <= available:
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _peak(points, middle) <= available else (low, middle)
    return low
