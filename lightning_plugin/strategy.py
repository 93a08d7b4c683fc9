"""The strategies: a module for one device, sharded by changing `strategy=`, in the Trainer and in Fabric."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfbyte.errors import QuantizationError
from halfbyte.optim import Optimizer8bit
from lightning_plugin.distribution import (
    FabricFSDPStrategy,
    FabricModelParallelStrategy,
    FabricStrategyRegistry,
    FSDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
    Trainer,
)
from lightning_plugin.sharding import (
    FSDP1,
    FSDP2,
    float_moments,
    formats_of,
    is_sharded,
    lending,
    with_metadata,
)

__all__ = ["FabricHalfbyteFSDP2Strategy", "FabricHalfbyteFSDPStrategy", "HalfbyteFSDP2Strategy", "HalfbyteFSDPStrategy"]

_ROOT = "_halfbyte_fsdp_root"
_FORMATS = "halfbyte_formats"


class HalfbyteFSDP2Strategy(FSDP2, ModelParallelStrategy):
    """FSDP2 for a LightningModule that knows nothing of it: `halfbyte.distributed.fully_shard` is called by itself.

    It happens after `configure_model` and before the optimizers are created. A module that its `configure_model` has
    sharded stays as it is. Registered as "fsdp2_halfbyte".

    Args:
        checkpointing: recompute each block in backward, see `fully_shard`.
        reshard_after_forward: release a block's gathered parameters between forward and backward.
        mp_policy: a `MixedPrecisionPolicy` for the trainable and dense parameters; packed rows are left alone.
        offload_policy: an `OffloadPolicy`, see `fully_shard`.
        device_mesh: (replicas, ranks that share one replica), or a two-dimensional `DeviceMesh`: shards inside each replica.
            None: one replica over all ranks.
        save_distributed_checkpoint: True: a folder to which each rank writes its part; False: one file, gathered on rank 0.
        **kwargs: as for Lightning's `ModelParallelStrategy`. `data_parallel_size` is all ranks unless it is given.

    Raises:
        RuntimeError: packed rows and torch older than 2.12.
        ValueError: see `fully_shard`; tensor parallelism is asked for, which a model sharded by itself can't have; the sizes
            of `device_mesh` don't multiply to the world size.

    Example:
        >>> from lightning_plugin import HalfbyteFSDP2Strategy
        >>> strategy = HalfbyteFSDP2Strategy(save_distributed_checkpoint=False)
    """

    def setup(self, trainer: Trainer) -> None:
        """Called by the Trainer after `configure_model`: packs what is dense, shards, then sets up as usual."""
        from torch.distributed.fsdp import FSDPModule

        model = self.model
        assert model is not None
        if is_sharded(model):
            for unit in model.modules():  # a root keeps its parameters gathered after validation; optimizers must get shards
                if isinstance(unit, FSDPModule):
                    unit.reshard()
        else:
            self.model = self.shard(self.precision_plugin.convert_module(model), self.device_mesh)
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Called when a checkpoint is saved; a full one carries the formats of its packed rows."""
        state = super().lightning_module_state_dict()
        return state if self._save_distributed_checkpoint else with_metadata(state, self.lightning_module)


class HalfbyteFSDPStrategy(FSDP1, FSDPStrategy):
    """A drop-in for Lightning's `FSDPStrategy` (FSDP1) that shards packed weights, and dense models with a checked policy.

    Packed weights are units of their own, as float32 containers with mixed precision off. Small frozen parameters of another
    dtype than the rest of their unit (norms of a bfloat16 model beside float32 adapters) stay whole. Without
    `auto_wrap_policy` the blocks are inferred from the model; a policy that matches nothing raises instead of gathering the
    whole model on every rank. The result is audited and printed once. Gradients are clipped by the global norm. Runs on CPU
    with gloo too. Registered as "fsdp_halfbyte".

    Args:
        auto_wrap_policy: as for `FSDPStrategy`: a set of classes or a policy; None: inferred.
        activation_checkpointing_policy: as for `FSDPStrategy`, but it must match something.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout,
            cpu_offload, mixed_precision, activation_checkpointing, sharding_strategy, state_dict_type, device_mesh, kwargs:
            as for `FSDPStrategy`. On the CPU `cpu_offload` has no effect, which is said.

    Raises:
        ValueError: a policy or checkpointing policy matches no module, or no block could be inferred; the text lists the
            candidates.
        NotImplementedError: a packed layer has a trainable bias that is not float32; NO_SHARD with trainable tied weights;
            resuming a hybrid run from a folder (`state_dict_type="sharded"`), of which torch restores wrong moments.

    Note:
        State dicts have the keys, shapes and dtypes of a single process; 8-bit moments are saved as float32, because FSDP1
        refuses uint8 optimizer state, and restored exactly. `halfbyte.optim.annotate_fsdp1` is called after wrapping.

    Example:
        >>> from lightning_plugin import HalfbyteFSDPStrategy
        >>> strategy = HalfbyteFSDPStrategy(state_dict_type="sharded")
    """

    _registered_strategies: list[str] = []  # noqa: RUF012 - Lightning's class has a list, which it refuses on the CPU

    @property
    def _fsdp_arguments(self) -> dict[str, Any]:
        return self.kwargs

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Called by `setup` with the converted module, and by no one else: wraps it once, whatever runs follow."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        module = self.lightning_module
        assert module is not None
        root: Any = module.__dict__.get(_ROOT)
        if root is None:
            if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
                return super()._setup_model(model)  # wrapped by the user
            # Not a submodule: the wrapper holds the module. A second run must not wrap the same module again.
            root = module.__dict__[_ROOT] = self.wrap(model)
        if not hasattr(self.precision_plugin, "_fsdp_root"):  # Lightning's own plugin for FSDP refuses to clip by norm
            plugin: Any = self.precision_plugin
            plugin.clip_grad_by_norm = lambda optimizer, clip_val: root.clip_grad_norm_(clip_val)
        return root

    def teardown(self) -> None:
        """Called at the end of every run."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Called when a checkpoint is saved; a full one carries the formats of its packed rows."""
        assert self.model is not None
        return self.module_state(self.model, self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Called when a checkpoint is saved. 8-bit moments are saved as float32, from which they come back bit for bit."""
        from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

        assert self.model is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        state = self.moments(self.model, optimizer)
        if self._state_dict_type == "full" and state:
            with self.state_context(self.model):
                state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)
        return state

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called when a run resumes; see `optimizer_state`."""
        with self.resuming(checkpoint_path, self.optimizers):
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)


class _FabricCheckpoints:
    """Mixin: Fabric saves no plugin state and FSDP no metadata, so the formats of packed rows are saved as an entry."""

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Called by `fabric.save`."""
        formats = {key: formats_of(value) for key, value in state.items() if isinstance(value, nn.Module)}
        super().save_checkpoint(path, {**state, _FORMATS: formats}, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by `fabric.load`.

        Raises:
            QuantizationError: the checkpoint holds rows of another format than the module's.
        """
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]
        for key, saved in rest.pop(_FORMATS, {}).items():
            ours = formats_of(state[key]) if isinstance(state, dict) and isinstance(state.get(key), nn.Module) else {}
            wrong = [name for name, format in ours.items() if saved.get(name, format) != format]
            if wrong:
                raise QuantizationError(
                    f"{type(self).__name__}.load_checkpoint: {path} holds {saved[wrong[0]]} rows for {wrong[0]}, the module "
                    f"is {ours[wrong[0]]}; the module's weights are unusable now, build it with the checkpoint's format",
                    names=wrong,
                )
        return rest


class FabricHalfbyteFSDPStrategy(_FabricCheckpoints, FSDP1, FabricFSDPStrategy):
    """A drop-in for Fabric's `FSDPStrategy` (FSDP1); what `HalfbyteFSDPStrategy` is for the Trainer.

    Registered as "fsdp_halfbyte". A model that the user has wrapped stays as it is.

    Args:
        auto_wrap_policy: as for Fabric's `FSDPStrategy`: a set of classes or a policy; None: inferred.
        activation_checkpointing_policy: as for `FSDPStrategy`, but it must match something.
        accelerator, parallel_devices, cluster_environment, precision, process_group_backend, timeout, cpu_offload,
            mixed_precision, activation_checkpointing, sharding_strategy, state_dict_type, device_mesh, kwargs: as for
            `FSDPStrategy`.

    Raises:
        ValueError: a policy or checkpointing policy matches no module, or no block could be inferred; the text lists the
            candidates.
        NotImplementedError: a packed layer has a trainable bias that is not float32; NO_SHARD with trainable tied weights;
            resuming a hybrid run from a folder (`state_dict_type="sharded"`), of which torch restores wrong moments.
        QuantizationError: a checkpoint is loaded that holds rows of another format.

    Note:
        `fabric.save` writes keys, shapes and dtypes of a single process; 8-bit moments as float32, restored exactly.

    Example:
        >>> from lightning_plugin import FabricHalfbyteFSDPStrategy
        >>> strategy = FabricHalfbyteFSDPStrategy(state_dict_type="full")
    """

    @property
    def _fsdp_arguments(self) -> dict[str, Any]:
        return self._fsdp_kwargs

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Called by `fabric.setup` with the converted module."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
            return super().setup_module(module)
        return self.wrap(module)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Called by `fabric.save`; see the class."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        roots = [value for value in state.values() if isinstance(value, FullyShardedDataParallel)]
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        if len(roots) != 1:
            super().save_checkpoint(path, state, *args, **kwargs)  # which refuses it
            return
        root = roots[0]
        saved = self.module_state(root, root)
        if self._state_dict_type == "full":  # Lightning writes what is neither module nor optimizer as it is
            moments = {key: self.moments(root, v) for key, v in state.items() if isinstance(v, Optimizer)}
            state, optimizers = {**state, **moments}, []
        with lending(root, state_dict=lambda: saved), float_moments(optimizers, saving=True):
            super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by `fabric.load`; see the class."""
        values = state.values() if isinstance(state, dict) else ()
        with self.resuming(path, [value for value in values if isinstance(value, Optimizer)]):
            return super().load_checkpoint(path, state, *args, **kwargs)


class FabricHalfbyteFSDP2Strategy(_FabricCheckpoints, FSDP2, FabricModelParallelStrategy):
    """FSDP2 without a `parallelize_fn`: `fabric.setup` calls `halfbyte.distributed.fully_shard` by itself.

    A module that is sharded already stays as it is. An optimizer that was created before, and given to `fabric.setup` with
    the module, gets the sharded parameters in place of the ones it has: with Fabric's own `ModelParallelStrategy` it would
    go on training the unsharded ones. Registered as "fsdp2_halfbyte".

    Args:
        **kwargs: those of `HalfbyteFSDP2Strategy`; others as for Fabric's `ModelParallelStrategy`.

    Raises:
        RuntimeError: packed rows and torch older than 2.12.
        ValueError: see `HalfbyteFSDP2Strategy`; or `fabric.setup` is given an optimizer that has state or hooks already.
        QuantizationError: a checkpoint is loaded that holds rows of another format.

    Example:
        >>> from lightning_plugin import FabricHalfbyteFSDP2Strategy
        >>> strategy = FabricHalfbyteFSDP2Strategy(checkpointing=False, save_distributed_checkpoint=False)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(parallelize_fn=self.shard, **kwargs)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Called by `fabric.setup` with a module and its optimizers."""
        names = {id(p): name for name, p in module.named_parameters()}
        for optimizer in optimizers:
            if optimizer.state or (isinstance(optimizer, Optimizer8bit) and optimizer.fused_backward):
                raise ValueError(
                    f"{type(self).__name__}: the {type(optimizer).__name__} given to fabric.setup has state or hooks on the "
                    "unsharded parameters; call model = fabric.setup_module(model) first, create the optimizer after it, "
                    "and call fabric.setup_optimizers"
                )
        module = self.setup_module(module)
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [sharded[names[id(p)]] if id(p) in names else p for p in group["params"]]
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler


for _registry, _fsdp1, _fsdp2 in (
    (StrategyRegistry, HalfbyteFSDPStrategy, HalfbyteFSDP2Strategy),
    (FabricStrategyRegistry, FabricHalfbyteFSDPStrategy, FabricHalfbyteFSDP2Strategy),
):
    _registry.register("fsdp2_halfbyte", _fsdp2, description="FSDP2 in units read off the model", override=True)
    _registry.register("fsdp_halfbyte", _fsdp1, description="FSDP1 with packed weights and a checked policy", override=True)
