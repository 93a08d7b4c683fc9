"""What a calibration did, layer by layer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from halfbyte.nn.report import Report


@dataclass(frozen=True)
class CalibratedLayer:
    """One quantized layer of a `CalibrationReport`.

    Attributes:
        name: dotted name of the module.
        tokens: calibration tokens that reached it.
        plain_error: relative error of its output on them with plain (absmax) rows, ||X (Q - W)^T|| / ||X W^T||; None where
            nothing was measured.
        error: the same with the rows it got.
        dead_channels: input channels that were 0 for every token.
        dropped_tokens: tokens left out because an activation was NaN or infinite.
        damping: what was added to the diagonal of the inputs' second moment, in multiples of its mean.
        note: why the layer got plain rows, or None.
    """

    name: str
    tokens: int
    plain_error: float | None
    error: float | None
    dead_channels: int = 0
    dropped_tokens: int = 0
    damping: float = 0.0
    note: str | None = None


@dataclass(frozen=True)
class CalibrationReport(Report):
    """The `Report` of a calibrated model, with what was measured on the way.

    Attributes:
        rows: as in `Report`.
        layers: a `CalibratedLayer` per quantized layer, in the order of the model.
        settings: format, method, tokens and whatever else decides the bytes.
        seconds: time it took, runs before a resume not counted.
    """

    layers: tuple[CalibratedLayer, ...] = field(default=())
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def fallbacks(self) -> tuple[CalibratedLayer, ...]:
        """Layers that got plain rows, each with its `note`."""
        return tuple(layer for layer in self.layers if layer.note)

    def to_json(self) -> str:
        """Settings, seconds and layers as JSON text (what `calibration.json` in the folder holds)."""
        content = {"settings": self.settings, "seconds": self.seconds, "layers": [asdict(layer) for layer in self.layers]}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        measured = [layer for layer in self.layers if layer.error is not None and layer.plain_error]
        lines = [super().__str__()] if self.rows else []
        if measured:
            mean = sum((layer.error or 0.0) / (layer.plain_error or 1.0) for layer in measured) / len(measured)
            lines.append(f"output error: {mean:.2f} of plain rows', mean of {len(measured)} layers ({self.seconds:.0f} s)")
        lines += [f"plain rows: {layer.name}: {layer.note}" for layer in self.fallbacks]
        return "\n".join(lines)
