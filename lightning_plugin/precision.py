"""The precision plugins: packed linear layers under every strategy of the Trainer and of Fabric.

Both derive from Lightning's FSDPPrecision, the only class its FSDPStrategy accepts, and take none of its behaviour: it
casts whole modules, sets FSDP's `param_dtype` (which would rewrite packed bytes), enters autocast for "cuda" and refuses
norm clipping. Its constructor is not called.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.convert import convert_layers_
from halfbyte.nn.init import entered
from halfbyte.nn.packed import PackedRows, as_dtype
from halfbyte.nn.settings import InitSettings, active_settings
from halfbyte.nn.skip import SkipRules, dense_reason
from halfbyte.optim.sharding import is_dtensor
from lightning_plugin.distribution import (
    TRAINER_PACKAGE,
    FabricFSDPPrecision,
    FabricPrecision,
    FSDPPrecision,
    Precision,
    rank_zero_warn,
)
from lightning_plugin.resume import convert_before_loading

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision

__all__ = ["FabricHalfbytePrecision", "HalfbytePrecision", "cast_trainable_"]

_PRECISION_OF = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}


class _PluginSettings(InitSettings):
    """The settings of a context that a plugin entered."""

    one_reader = True

    def __init__(self, plugin: _HalfbyteMixin) -> None:
        super().__init__(plugin.format, plugin.skip, plugin.compute_dtype)
        self.plugin = plugin


class _HalfbyteMixin:
    """What the plugins share: what is quantized, when, and what is left alone."""

    def __init__(
        self,
        format: str | Format = "nf4",
        *,
        compute_dtype: str | torch.dtype | None = None,
        trainable_dtype: str | torch.dtype | None = None,
        skip: Sequence[str] | None = None,
    ) -> None:
        self.format = str(Format.parse(format))
        self.compute_dtype = as_dtype("compute_dtype", compute_dtype)
        self.trainable_dtype = as_dtype("trainable_dtype", trainable_dtype)
        self.skip = None if skip is None else SkipRules(skip).patterns
        # Read by ModelSummary and the throughput monitor, which know a closed list of names; nothing here acts on them.
        self.precision: Any = _PRECISION_OF.get(self.compute_dtype or torch.float32, "32-true")
        self.scaler: Any = None
        self._desired_input_dtype = self.compute_dtype or torch.float32
        if isinstance(self, Precision):  # the Trainer's
            convert_before_loading()

    def __repr__(self) -> str:
        # The Trainer of the other class tree prints this when it refuses the plugin.
        return f"{type(self).__name__}({self.format!r}, built for {TRAINER_PACKAGE})"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Quantizes, where they stand, the linear layers that were not quantized at birth; casts trainables if asked to.

        Called by every strategy before it wraps the module and creates the optimizers, and before checkpoint weights are
        loaded (`resume.py`); a second call changes nothing. Layers recorded as dense (by `init_quantized`, by a host's
        quantizer) stay dense. DDP drops the return value, so everything happens in place.

        Raises:
            QuantizationError: the module has no quantized layer at the end.
        """
        if any(is_dtensor(p) or getattr(p, "_fsdp_flattened", False) for p in module.parameters()):
            return self._accept_sharded(module)
        rules = SkipRules(self.skip)
        reasons = rules.of_model(module)
        reasons.update((m, reason) for m in module.modules() if (reason := dense_reason(m)))
        before = {
            name: weakref.ref(m.weight)
            for name, m in module.named_modules()
            if isinstance(m, nn.Linear) and not isinstance(m, PackedRows)
        }
        convert_layers_(module, Format.parse(self.format), reasons, self.compute_dtype, caller=type(self).__name__)
        kept = {id(p) for p in module.parameters()}
        held = [name for name, ref in before.items() if (weight := ref()) is not None and id(weight) not in kept]
        if held:
            rank_zero_warn(
                f"{type(self).__name__}: {len(held)} dense weights were quantized but something still refers to them, so "
                f"their memory is not released: {', '.join(held[:3])}. An optimizer created before the conversion does "
                f"that: build the model quantized (`with fabric.init_module():` or `configure_model`), or create the "
                f"optimizer from parameters that stay trainable."
            )
        if self.trainable_dtype is not None:
            cast_trainable_(module, self.trainable_dtype)
        return module

    def _accept_sharded(self, module: nn.Module) -> nn.Module:
        """A module that is sharded already (FSDP2 in `configure_model`, a second run) stays as it is, or is refused."""
        if any(isinstance(m, PackedRows) for m in module.modules()):
            dtype = self.trainable_dtype
            if dtype is not None and any(p.requires_grad and p.dtype != dtype for p in module.parameters()):
                raise QuantizationError(
                    f"{type(self).__name__}: trainable_dtype={_name_of(dtype)} can't be applied to a module that is sharded "
                    f"already; cast its trainable parameters before fully_shard"
                )
            return module
        names = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
        raise QuantizationError(
            f"{type(self).__name__}: the module was sharded before its layers were quantized: {', '.join(names[:5])}. Build "
            f"it in configure_model, where it is quantized from birth, and shard it after that.",
            names=names,
        )

    def module_init_context(self) -> AbstractContextManager:
        """`init_quantized` without its demand that something was built.

        Entered around `configure_model` (Trainer) and by `Fabric.init_module`. The default dtype stays as it is.
        """
        active = active_settings()
        if isinstance(active, _PluginSettings) and active.plugin is self:
            return nullcontext()  # the Trainer enters tensor_init_context around this one
        return entered(_PluginSettings(self))

    def tensor_init_context(self) -> AbstractContextManager:
        """Nothing: tensors are created as the user writes them."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager:
        """Nothing: a default dtype set around forward would not hold in backward, where checkpointed blocks run again."""
        return nullcontext()

    def convert_input(self, data: Any) -> Any:
        """The batch as it is.

        The first module decides what it accepts, and embeddings and norms are as the model was built; targets and masks
        must not lose bits. Packed layers cast their own input to `compute_dtype`.
        """
        return data

    def convert_output(self, data: Any) -> Any:
        """The outputs as they are."""
        return data

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        """Read by FSDP strategies: cast nothing (a `param_dtype` rewrites packed bytes), give no module a unit for it."""
        from torch.distributed.fsdp import MixedPrecision

        return MixedPrecision(_module_classes_to_ignore=())

    def state_dict(self) -> dict[str, Any]:
        """What the run was configured with, as JSON-able values; saved with every full checkpoint."""
        return {
            "format": self.format,
            "skip": None if self.skip is None else list(self.skip),
            "compute_dtype": _name_of(self.compute_dtype),
            "trainable_dtype": _name_of(self.trainable_dtype),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to resume a run of another format.

        Raises:
            QuantizationError: the checkpoint was made under another format.
        """
        saved = state_dict.get("format", self.format)
        if saved != self.format:
            raise QuantizationError(
                f"{type(self).__name__}: the checkpoint was made with format {saved!r}, this run asks for "
                f"{self.format!r}; resume with {type(self).__name__}({saved!r})"
            )


class HalfbytePrecision(_HalfbyteMixin, FSDPPrecision):
    """Precision plugin of the Trainer: packed linear layers, whatever the strategy.

    Models built in `configure_model` or inside `with trainer.init_module():` are quantized while they are built, also by
    transformers' `from_pretrained`; what is built elsewhere is converted in place before it goes to the device. Batches,
    outputs and the default dtype are never touched.

    Args:
        format: a `Format` or its name, for example "nf4" or "nf4-dq:64".
        compute_dtype: dtype (or its name) packed layers compute in; None: autocast's, else that of their input.
        trainable_dtype: dtype (or its name) that trainable floating parameters are cast to before the optimizers are
            created; None: as the model was built.
        skip: names that stay dense, see `halfbyte.quantize_model`; None: the output embedding.

    Raises:
        ValueError: unknown format or dtype name.
        TypeError: `skip` is a plain string, or a dtype is not a floating one.

    Note:
        Checkpoints record the format; resuming under another one raises `QuantizationError`. Lightning exists as two
        class trees (`lightning.pytorch` and `pytorch_lightning`): the class belongs to the one that was imported before
        `lightning_plugin`, and the Trainer of the other one refuses it. Gradients are clipped by the global norm on
        every strategy, FSDP included.

    Example:
        >>> import lightning.pytorch as L
        >>> from lightning_plugin import HalfbytePrecision
        >>> trainer = L.Trainer(plugins=HalfbytePrecision("nf4"), accelerator="cpu", logger=False)
        >>> trainer.precision
        '32-true'
    """

    _fsdp_root: Any = None

    def tensor_init_context(self) -> AbstractContextManager:
        """`init_quantized`: `Trainer.init_module` enters this context alone. It touches modules, not tensors."""
        return self.module_init_context()

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Called by every strategy with the wrapped model; FSDP's root alone can compute the global gradient norm."""
        self._fsdp_root = model if hasattr(model, "clip_grad_norm_") else None
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Refuses what an optimizer that steps during backward cannot do.

        Raises:
            NotImplementedError: an optimizer with `fused_backward` and gradient clipping or accumulation.
        """
        trainer = module.trainer
        if any(getattr(optimizer, "fused_backward", False) for optimizer in trainer.optimizers):
            if trainer.gradient_clip_val:
                raise NotImplementedError(
                    f"fused_backward=True steps during backward, before Trainer(gradient_clip_val="
                    f"{trainer.gradient_clip_val}) could clip the gradients; use one or the other"
                )
            if trainer.accumulate_grad_batches > 1:
                raise NotImplementedError(
                    f"fused_backward=True steps after every backward, so Trainer(accumulate_grad_batches="
                    f"{trainer.accumulate_grad_batches}) would not accumulate; use one or the other"
                )
        return Precision.pre_backward(self, tensor, module)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips the gradients to a total norm of `clip_val`, over all ranks."""
        if self._fsdp_root is not None:
            self._fsdp_root.clip_grad_norm_(clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(list(self.main_params(optimizer)), clip_val)

    def teardown(self) -> None:
        """Called at the end of every run: lets go of the wrapped model."""
        self._fsdp_root = None

    # FSDPPrecision's versions serve a gradient scaler.
    optimizer_step = Precision.optimizer_step


class FabricHalfbytePrecision(_HalfbyteMixin, FabricFSDPPrecision):
    """Precision plugin of Fabric: packed linear layers, whatever the strategy.

    Build models inside `with fabric.init_module():`, so that they are quantized while they are built. A model built
    elsewhere is converted by `fabric.setup`; an optimizer that was created before from all of its parameters keeps the
    dense weights alive, which is warned about.

    Args:
        format: a `Format` or its name, for example "nf4" or "nf4-dq:64".
        compute_dtype: dtype (or its name) packed layers compute in; None: autocast's, else that of their input.
        trainable_dtype: dtype (or its name) that `fabric.setup` casts trainable floating parameters to; None: as built.
        skip: names that stay dense, see `halfbyte.quantize_model`; None: the output embedding.

    Raises:
        ValueError: unknown format or dtype name.
        TypeError: `skip` is a plain string, or a dtype is not a floating one.

    Note:
        Fabric saves no plugin state: the format of every packed layer is in the state dict's own metadata, and loading
        rows of another format raises.

    Example:
        >>> import torch
        >>> from lightning.fabric import Fabric
        >>> from lightning_plugin import FabricHalfbytePrecision
        >>> fabric = Fabric(accelerator="cpu", plugins=FabricHalfbytePrecision("nf4"))
        >>> with fabric.init_module():
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> type(model[0]).__name__
        'QuantLinear'
    """

    # FSDPPrecision's versions serve a gradient scaler.
    backward = FabricPrecision.backward
    optimizer_step = FabricPrecision.optimizer_step
    unscale_gradients = FabricPrecision.unscale_gradients


def cast_trainable_(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the trainable floating parameters of `module` to `dtype`; they stay the same Parameter objects.

    A dense layer or norm whose own parameters change so takes its input in `dtype` from then on: packed layers return the
    dtype that they were given, and torch multiplies only tensors of one dtype.
    """
    for part in module.modules():
        cast = False
        for parameter in part.parameters(recurse=False):
            if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
                cast = True
        if cast and not part._modules and not isinstance(part, PackedRows) and "_halfbyte_input" not in part.__dict__:
            part.__dict__["_halfbyte_input"] = dtype
            part.register_forward_pre_hook(_cast_input)


def _cast_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return None
    if torch.is_autocast_enabled(args[0].device.type):
        return None
    return (args[0].to(module.__dict__["_halfbyte_input"]), *args[1:])


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
