"""halfbyte in Lightning: one argument of the Trainer (or of Fabric) makes a model train on packed weights."""

from lightning_plugin.loading import load_from_checkpoint
from lightning_plugin.memory import ActivationOffloading, MemoryMonitor
from lightning_plugin.precision import FabricHalfbytePrecision, HalfbytePrecision
from lightning_plugin.report import QuantizationReport
from lightning_plugin.scheduled import GradualUnfreezing, ProgressiveQuantization
from lightning_plugin.strategy import (
    FabricHalfbyteFSDP2Strategy,
    FabricHalfbyteFSDPStrategy,
    HalfbyteFSDP2Strategy,
    HalfbyteFSDPStrategy,
)

__all__ = [
    "ActivationOffloading",
    "FabricHalfbyteFSDP2Strategy",
    "FabricHalfbyteFSDPStrategy",
    "FabricHalfbytePrecision",
    "GradualUnfreezing",
    "HalfbyteFSDP2Strategy",
    "HalfbyteFSDPStrategy",
    "HalfbytePrecision",
    "MemoryMonitor",
    "ProgressiveQuantization",
    "QuantizationReport",
    "load_from_checkpoint",
]
