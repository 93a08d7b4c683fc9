"""Which of Lightning's two class trees this process uses, and its names.

`lightning` holds `lightning.pytorch` and `lightning.fabric`; `pytorch-lightning` and `lightning-fabric` hold the same code
under other module names. Their classes don't mix: a Trainer refuses the plugins of the other tree.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["TRAINER_PACKAGE"]


def _chosen() -> tuple[str, str]:
    """(Trainer package, Fabric package): the tree that is imported already, else the one that is installed."""
    trees = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
    imported = [tree for tree in trees if tree[0] in sys.modules]
    found = imported or [tree for tree in trees if importlib.util.find_spec(tree[0].partition(".")[0])]
    if not found:
        raise ImportError("lightning_plugin needs Lightning: pip install lightning (or pytorch-lightning)")
    return found[0]


if TYPE_CHECKING:
    from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
    from lightning.fabric.plugins.precision.precision import Precision as FabricPrecision
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FabricStrategyRegistry  # noqa: N811
    from lightning.fabric.strategies.fsdp import FSDPStrategy as FabricFSDPStrategy
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
    from lightning.pytorch.plugins.precision.precision import Precision
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

    fsdp_module: Any  # its private helpers
    TRAINER_PACKAGE = "lightning.pytorch"
else:
    TRAINER_PACKAGE, _FABRIC_PACKAGE = _chosen()
    _trainer = importlib.import_module(TRAINER_PACKAGE)
    Callback, LightningModule, Trainer = _trainer.Callback, _trainer.LightningModule, _trainer.Trainer
    Precision = importlib.import_module(f"{TRAINER_PACKAGE}.plugins.precision.precision").Precision
    FSDPPrecision = importlib.import_module(f"{TRAINER_PACKAGE}.plugins.precision.fsdp").FSDPPrecision
    _strategies = importlib.import_module(f"{TRAINER_PACKAGE}.strategies")
    Strategy, StrategyRegistry = _strategies.Strategy, _strategies.StrategyRegistry
    FSDPStrategy, ModelParallelStrategy = _strategies.FSDPStrategy, _strategies.ModelParallelStrategy
    fsdp_module = importlib.import_module(f"{TRAINER_PACKAGE}.strategies.fsdp")
    _utilities = importlib.import_module(f"{TRAINER_PACKAGE}.utilities")
    rank_zero_info, rank_zero_warn = _utilities.rank_zero_info, _utilities.rank_zero_warn
    FabricPrecision = importlib.import_module(f"{_FABRIC_PACKAGE}.plugins.precision.precision").Precision
    FabricFSDPPrecision = importlib.import_module(f"{_FABRIC_PACKAGE}.plugins.precision.fsdp").FSDPPrecision
    _fabric_strategies = importlib.import_module(f"{_FABRIC_PACKAGE}.strategies")
    FabricStrategyRegistry = _fabric_strategies.STRATEGY_REGISTRY
    FabricFSDPStrategy = _fabric_strategies.FSDPStrategy
    FabricModelParallelStrategy = _fabric_strategies.ModelParallelStrategy

__all__ += [
    "Callback",
    "FSDPPrecision",
    "FSDPStrategy",
    "FabricFSDPPrecision",
    "FabricFSDPStrategy",
    "FabricModelParallelStrategy",
    "FabricPrecision",
    "FabricStrategyRegistry",
    "LightningModule",
    "ModelParallelStrategy",
    "Precision",
    "Strategy",
    "StrategyRegistry",
    "Trainer",
    "fsdp_module",
    "rank_zero_info",
    "rank_zero_warn",
]
