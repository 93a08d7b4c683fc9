"""QuantizationReport: what is packed, said once at the start of training."""

from __future__ import annotations

from torch import nn

from halfbyte.distributed import WrapReport, audit
from halfbyte.nn.report import Report, report
from lightning_plugin.distribution import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_plugin.strategy import HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy

__all__ = ["QuantizationReport"]


class QuantizationReport(Callback):
    """Reports, once per fit and on rank 0, what is packed, what stayed dense and why, and the bytes of both.

    The table goes to Lightning's log; `halfbyte/bytes` and `halfbyte/dense_bytes` go to the Trainer's loggers. Warns if
    a part of the model is in eval mode: Lightning never calls `train()`, and `from_pretrained` returns models in eval
    mode, where dropout and gradient checkpointing are silently off.

    A model sharded by FSDP is audited as well; our own strategies have printed that when they wrapped the model.

    Attributes:
        report: the `Report` of the last fit, or None.
        wrap: the `WrapReport` of the last fit, or None if the model is not sharded.

    Example:
        >>> import lightning.pytorch as L
        >>> from lightning_plugin import QuantizationReport
        >>> trainer = L.Trainer(callbacks=[QuantizationReport()], accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        self.report: Report | None = None
        self.wrap: WrapReport | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called by the Trainer when the strategy has set the model up, before weights of an FSDP checkpoint arrive."""
        self.report = report(pl_module)
        rank_zero_info(f"Quantization report\n{self.report}")
        wrap = audit(trainer.strategy.model or pl_module)
        self.wrap = None if wrap.kind == "none" else wrap
        if self.wrap is not None and not isinstance(trainer.strategy, (HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy)):
            rank_zero_info(f"Wrap audit\n{self.wrap}")
        if trainer.is_global_zero:
            metrics = {"halfbyte/bytes": float(self.report.bytes), "halfbyte/dense_bytes": float(self.report.dense_bytes)}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        sleeping = _topmost_in_eval(pl_module)
        if sleeping:
            listed = ", ".join(sleeping[:5]) + (", ..." if len(sleeping) > 5 else "")
            rank_zero_warn(
                f"QuantizationReport: training starts with modules in eval mode: {listed}. Their dropout and gradient "
                f"checkpointing are off. Lightning keeps the mode it finds (from_pretrained returns eval): call .train() "
                f"on them in configure_model, or ignore this if it is meant."
            )


def _topmost_in_eval(module: nn.Module) -> list[str]:
    """Names of the modules in eval mode whose parents are not."""
    found: list[str] = []
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{parent}.") or parent == "" for parent in found)
        if not child.training and not inside:
            found.append(name)
    return [name or type(module).__name__ for name in found]
