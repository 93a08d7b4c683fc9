"""LoRA on packed rows: the layer, and the one place where PEFT is told of it."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft.mixed_model import PeftMixedModel
from peft.peft_model import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from halfbyte.distributed.grouping import unwrapped
from halfbyte.nn.linear import QuantLinear, dequantize_linear_
from halfbyte.nn.settings import InitSettings, paused, register_host
from halfbyte.nn.skip import mark_dense
from halfbyte.optim.sharding import is_dtensor
from peft_bridge.methods import accept_unsupported, refuse_unsupported
from peft_bridge.originals import decompose, original_weight
from peft_bridge.patch import WhileActive

_INITIALIZERS = (True, False, "gaussian", "orthogonal", "eva")
_FROM_ORIGINAL = ("pissa", "pissa_niter_[n]", "olora", "loftq")


class HalfbyteLoraLinear(LoraLinear):
    """PEFT's LoRA layer around a `QuantLinear`: everything that reads or writes the dense weight works on packed rows.

    Forward and backward are one autograd node (`halfbyte.ops.lora_linear`) while a single plain LoRA adapter is active and
    nothing stands between it and the base: no DoRA or other variant, no `lora_bias`, no `adapter_names`, no hooks on the
    base, A, B or the dropout, A and B plain `nn.Linear`, no `activations` of the base. Otherwise they are PEFT's own.
    `lora_dropout` is part of the node, which keeps a bit for each element of the input in place of another input; what it
    drops after a `manual_seed` is not what `nn.Dropout` would. A base that is an FSDP1 unit of its own is no obstacle: the
    product happens inside its call. Merging, and variants that look at the weight (DoRA), get a dense float32 base for as
    long as the call takes. `merge()` packs the sum again, which rounds it to the format; what that cost is in
    `merge_error`, and `unmerge()` brings the original rows back bit by bit (a packed copy is kept in between).
    `merge_and_unload()` ends in a dense `nn.Linear`, with nothing lost.

    PiSSA, OLoRA and LoftQ start from the original weight, which is read again from the checkpoint: the rows become the
    quantization of what the adapters leave of it, so base and adapters together are closer to the original than its plain
    quantization. The base of such an adapter is therefore not the checkpoint's. `PeftModel.from_pretrained` on a freshly
    quantized base decomposes again, with the same result, and needs the dense checkpoint for it. Without it, save the
    modified base too (`model.unload().save_pretrained(...)`) and the adapter with `init_lora_weights=True` in its config.
    PEFT's `path_initial_model_for_weight_conversion` makes an ordinary adapter for the *dense* original.

    PEFT constructs it for every `QuantLinear` it is to adapt; no code of a user's needs to.

    Args:
        base_layer: the `QuantLinear`.
        adapter_name: name of the first adapter.
        config: its `peft.LoraConfig`.
        **kwargs: what PEFT hands to its own `lora.Linear`: r, lora_alpha, ...

    Raises:
        NotImplementedError: `init_lora_weights` is CorDA, LoRA-GA or MiCA, or KaSA is asked for, or a second adapter is to
            decompose a base that holds the residual of a first.
        QuantizationError: PiSSA, OLoRA or LoftQ, and the original weight can't be read again.
        ValueError: LoftQ for another number of bits than the format has.

    Attributes:
        merge_error: after `merge()`: norm of what packing lost, relative to the norm of the merged update; else None.
    """

    merge_error: float | None = None
    _unmerged: tuple[Tensor, Tensor | None] | None = None  # rows and bias as they were before `merge`

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
        if config.fan_in_fan_out:
            warnings.warn("fan_in_fan_out is for Conv1D; the target is a QuantLinear: set to False", stacklevel=2)
            config.fan_in_fan_out = False
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Called by PEFT for every adapter that is added to the layer."""
        config: Any = kwargs["config"]
        packed = self._packed_base() is not None
        if packed and _decomposes(config.init_lora_weights):
            self._start_from_original(adapter_name, *args, **kwargs)
            return
        kasa = getattr(config, "kasa_config", None) is not None
        if packed and (kasa or config.init_lora_weights not in _INITIALIZERS):
            what = "kasa_config" if kasa else f"init_lora_weights={config.init_lora_weights!r}"
            raise NotImplementedError(
                f"{what} rewrites or decomposes the dense weight, which packed rows don't hold; supported on packed layers: "
                f"init_lora_weights = {', '.join(map(repr, (*_INITIALIZERS, *_FROM_ORIGINAL)))}"
            )
        reads_weight = config.use_dora or config.init_lora_weights == "orthogonal"  # the latter: only its dtype
        with self._dense_base() if packed and reads_weight else nullcontext():
            super().update_layer(adapter_name, *args, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Applies the base and the active adapters; see the class for when that is one node."""
        adapter = None if args or kwargs else self._fusible_adapter()
        if adapter is None:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        dropout = self.lora_dropout[adapter]
        p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
        lora = (self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.scaling[adapter], p)
        fused: Tensor = self.base_layer(x, lora=lora)
        return fused

    def _fusible_adapter(self) -> str | None:
        """The one active adapter that the base can take into its own product, or None."""
        base: Any = self.base_layer
        inside: Any = unwrapped(base)
        if self.disable_adapters or self.merged or type(inside) is not QuantLinear:
            return None
        if is_dtensor(inside.weight) or inside.activations is not None:
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        if len(names) != 1 or names[0] in self.lora_variant:
            return None
        down, up, dropout = self.lora_A[names[0]], self.lora_B[names[0]], self.lora_dropout[names[0]]
        if type(dropout) not in (nn.Identity, nn.Dropout) or up.bias is not None:
            return None
        if any(_hooked(m) for m in (base, inside, down, up, dropout)):
            return None
        plain = all(type(m) is nn.Linear and type(m.weight) in (nn.Parameter, Tensor) for m in (down, up))
        return names[0] if plain and down.weight.dtype == up.weight.dtype else None

    @torch.no_grad()
    def _start_from_original(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """PiSSA, OLoRA, LoftQ: adapters from the original weight, rows from what they leave of it."""
        base, config = self._packed_base(), kwargs["config"]
        assert base is not None
        other = base.__dict__.get("residual_of")
        if other is not None:
            raise NotImplementedError(
                f"init_lora_weights={config.init_lora_weights!r}: the packed base already holds the residual of adapter "
                f"{other!r}; load the base anew, or give the second adapter init_lora_weights=True"
            )
        weight = original_weight(base)
        bits = config.loftq_config.get("loftq_bits", base.format.bits)  # an empty dict for the others
        if bits != base.format.bits:
            raise ValueError(f"loftq_bits must be {base.format.bits} for a base in {base.format}, got {bits}")
        plain = copy.copy(config)
        plain.init_lora_weights = True
        with self._dense_base(weight):  # DoRA takes its norms from it, which base and adapters together keep
            super().update_layer(adapter_name, *args, **{**kwargs, "config": plain})
        scaling = self.scaling[adapter_name]
        A, B = decompose(weight, base, config, self.r[adapter_name], scaling)
        dtype: Any = base.compute_dtype or base.dense_dtype  # the adapter's, before PEFT may cast it
        A, B = A.to(dtype).contiguous(), B.to(dtype).contiguous()
        for adapters, value in ((self.lora_A, A), (self.lora_B, B)):
            parameter: Any = adapters[adapter_name].weight
            if not parameter.is_meta:  # PEFT is about to load it (low_cpu_mem_usage)
                parameter.data = value.to(parameter.dtype)
        base.quantize_(weight - scaling * (B.float() @ A.float()))
        base.__dict__["residual_of"] = adapter_name

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the adapters to the base and packs the sum; see the class for what it costs.

        Args:
            safe_merge: raise instead of merging values that are not finite.
            adapter_names: adapters to merge; None: the active ones. Adapters merged before are packed again together
                with them, from the original rows, so that rounding happens once.

        Raises:
            ValueError: `safe_merge` found a value that is not finite; the layer is then unmerged.
        """
        base = self._packed_base()
        if base is None:  # inside `_dense_base`, or a base that was dequantized
            super().merge(safe_merge, adapter_names)
            return
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        names = [*self.merged_adapters, *names]
        if self.merged:
            self.unmerge()
        original = (base.packed.clone(), None if base.bias is None else base.bias.detach().clone())
        try:
            with self._dense_base() as dense:
                before = dense.weight.detach().clone()
                super().merge(safe_merge, names)
        except BaseException:
            self._restore(base, original)
            raise
        base.quantize_(dense.weight)
        self._unmerged = original
        update = (dense.weight - before).norm()
        self.merge_error = float((base.dequantize(torch.float32) - dense.weight).norm() / update) if update else 0.0
        warnings.warn(
            f"merge() rounds the merged weights to {base.format} (see merge_error of each layer); "
            f"merge_and_unload() gives dense layers without that loss",
            stacklevel=2,
        )

    @torch.no_grad()
    def unmerge(self) -> None:
        """Brings back the rows (and the bias) as they were before `merge`, bit by bit."""
        base = self._packed_base()
        if base is None or not self.merged or self._unmerged is None:
            super().unmerge()
            return
        with self._dense_base():
            super().unmerge()  # for PEFT's own book-keeping
        self._restore(base, self._unmerged)

    @torch.no_grad()
    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Called by `unload()` and `merge_and_unload()`: the packed base, or a dense layer with the adapters merged."""
        base = self._packed_base()
        if base is None:
            if merge:
                self.merge(safe_merge, adapter_names)
            return self.get_base_layer()
        if not merge:
            return base
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        names = [*self.merged_adapters, *names]
        if self.merged:
            self.unmerge()
        with self._dense_base() as dense:
            if names:
                super().merge(safe_merge, names)
        merged = dequantize_linear_(base, nn.Parameter(dense.weight.to(base.dense_dtype), requires_grad=False))
        mark_dense(merged, "adapters were merged into it")
        return merged

    def _packed_base(self) -> QuantLinear | None:
        base = self.base_layer
        return base if isinstance(base, QuantLinear) else None

    @contextmanager
    def _dense_base(self, weight: Tensor | None = None) -> Iterator[nn.Linear]:
        """Presents a dense float32 base, sharing its bias, with the given weight or a copy of the base's own."""
        packed = self._packed_base()
        assert packed is not None
        dense: Any = nn.Linear.__new__(nn.Linear)  # __init__ would allocate, and draw, a weight
        nn.Module.__init__(dense)
        dense.in_features, dense.out_features = packed.in_features, packed.out_features
        weight = packed.dequantize(torch.float32) if weight is None else weight
        # Not by assignment: under low_cpu_mem_usage PEFT sends every parameter that is registered to meta.
        dense._parameters.update(weight=nn.Parameter(weight, requires_grad=False), bias=packed.bias)
        dense.compute_dtype = packed.compute_dtype or packed.dense_dtype  # the dtype PEFT gives a new adapter
        self.base_layer = dense
        try:
            yield dense
        finally:
            self.base_layer = packed

    def _restore(self, base: QuantLinear, original: tuple[Tensor, Tensor | None]) -> None:
        base.packed.copy_(original[0])
        if base.bias is not None and original[1] is not None:
            base.bias.data.copy_(original[1])
        self.merged_adapters.clear()
        self._unmerged = self.merge_error = None

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[Any, Any]:
        """Called by PEFT to place a new adapter: where the rows are, in the dtype that a dense base would have."""
        device, dtype = super()._get_base_layer_device_and_dtype(base_layer)
        if isinstance(base_layer, QuantLinear):
            dtype = base_layer.compute_dtype or base_layer.dense_dtype
        return device, dtype


def _decomposes(initializer: Any) -> bool:
    """Whether an `init_lora_weights` starts from the original weight and leaves a residual as the base."""
    name = initializer.lower() if isinstance(initializer, str) else ""
    return name in ("pissa", "olora", "loftq") or name.startswith("pissa_niter_")


def _hooked(module: nn.Module) -> bool:
    """Whether something sees or changes what goes in or comes out, which with the branch inside is something else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__  # accelerate replaces the method


# ---- registration ---------------------------------------------------------------------------------------------------


class _Original:
    method: Any = None  # PEFT's own, while ours stands in its place


def install() -> None:
    """Makes PEFT use `HalfbyteLoraLinear` for every `QuantLinear`; called on import, undone by `uninstall`.

    PEFT has no registry: `LoraConfig._custom_modules` belongs to one config and is not saved with it. So the static method
    that chooses the layer is wrapped; a user's `_custom_modules` still come first.
    """
    if _Original.method is not None:
        return
    refuse_unsupported()
    original = LoraModel._create_new_module
    parameters = list(inspect.signature(original).parameters)
    if parameters != ["lora_config", "adapter_name", "target", "kwargs"]:
        warnings.warn(
            f"peft_bridge: LoraModel._create_new_module has changed to ({', '.join(parameters)}); adapters on packed layers "
            f"are plain lora.Linear: they train, but merging and DoRA fail. Use peft 0.19 to 0.21",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    @functools.wraps(original)
    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        custom = any(isinstance(base, key) for key in lora_config._custom_modules or ())
        if isinstance(base, QuantLinear) and not custom and kwargs.get("parameter_name") is None:
            kwargs.pop("parameter_name", None)
            return HalfbyteLoraLinear(target, adapter_name, config=lora_config, **kwargs)
        module: nn.Module = original(lora_config, adapter_name, target, **kwargs)
        return module

    _Original.method = original
    LoraModel._create_new_module = staticmethod(create_new_module)  # type: ignore[method-assign]


def uninstall() -> None:
    """Gives PEFT its own method back."""
    if _Original.method is not None:
        LoraModel._create_new_module = staticmethod(_Original.method)  # type: ignore[method-assign]
        _Original.method = None
    accept_unsupported()


def dense_adapters(settings: InitSettings) -> AbstractContextManager[None]:
    """Registered with the core, entered by every `init_quantized` context: PEFT builds its layers with it paused."""
    return _BUILDERS.entered()


def _with_context_paused(build: Any) -> Any:
    @functools.wraps(build)
    def with_context_paused(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return build(*args, **kwargs)

    return with_context_paused


# Everything that builds adapters goes through one of these. Marking modules as adapters would not do: PEFT builds some
# before it knows their parent, and copies `modules_to_save` into a temporary ModuleDict.
_BUILDERS = WhileActive(
    _with_context_paused,
    [
        *((model, name) for model in (PeftModel, PeftMixedModel) for name in ("__init__", "add_adapter", "load_adapter")),
        (BaseTuner, "__init__"),
        (BaseTuner, "inject_adapter"),
    ],
)

install()
register_host(dense_adapters)
