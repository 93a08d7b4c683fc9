"""halfbyte in Lightning: one argument of the Trainer (or of Fabric) makes a model train on packed weights."""

from lightning_plugin.loading import load_from_checkpoint
from lightning_plugin.precision import FabricHalfbytePrecision, HalfbytePrecision
from lightning_plugin.report import QuantizationReport
from lightning_plugin.strategy import (
    FabricHalfbyteFSDP2Strategy,
    FabricHalfbyteFSDPStrategy,
    HalfbyteFSDP2Strategy,
    HalfbyteFSDPStrategy,
)

__all__ = [
    "FabricHalfbyteFSDP2Strategy",
    "FabricHalfbyteFSDPStrategy",
    "FabricHalfbytePrecision",
    "HalfbyteFSDP2Strategy",
    "HalfbyteFSDPStrategy",
    "HalfbytePrecision",
    "QuantizationReport",
    "load_from_checkpoint",
]
