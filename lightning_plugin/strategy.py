"""HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy: a LightningModule for one device, sharded by changing `strategy=`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfbyte.distributed.audit import audit
from halfbyte.distributed.fsdp1 import chosen_by, separate_parameters, wrap_policy
from halfbyte.distributed.fsdp2 import fully_shard
from halfbyte.distributed.grouping import clean_name, shared_parameters
from halfbyte.nn.packed import PackedRows
from halfbyte.optim import Optimizer8bit, annotate_fsdp1
from halfbyte.optim.sharding import is_dtensor
from lightning_plugin.distribution import (
    FSDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
    Trainer,
    fsdp_module,
    rank_zero_info,
)

__all__ = ["HalfbyteFSDP2Strategy", "HalfbyteFSDPStrategy"]


class HalfbyteFSDP2Strategy(ModelParallelStrategy):
    """FSDP2 for a LightningModule that knows nothing of it: `halfbyte.distributed.fully_shard` is called by itself.

    It happens after `configure_model` and before the optimizers are created. A module that its `configure_model` has
    sharded stays as it is. Registered as "fsdp2_halfbyte".

    Args:
        checkpointing: recompute each block in backward, see `fully_shard`.
        reshard_after_forward: release a block's gathered parameters between forward and backward.
        mp_policy: a `MixedPrecisionPolicy` for the trainable and dense parameters; packed rows are left alone.
        offload_policy: an `OffloadPolicy`.
        save_distributed_checkpoint: True: a folder to which each rank writes its part; False: one file, gathered on rank 0.
        **kwargs: as for Lightning's `ModelParallelStrategy`. `data_parallel_size` is all ranks unless it is given.

    Raises:
        RuntimeError: packed rows and torch older than 2.12.
        ValueError: see `fully_shard`; or tensor parallelism is asked for, which a model sharded by itself can't have.

    Example:
        >>> from lightning_plugin import HalfbyteFSDP2Strategy
        >>> strategy = HalfbyteFSDP2Strategy(save_distributed_checkpoint=False)
    """

    def __init__(
        self,
        *,
        checkpointing: bool = True,
        reshard_after_forward: bool = True,
        mp_policy: Any = None,
        offload_policy: Any = None,
        save_distributed_checkpoint: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)
        self._shard_arguments = {
            "checkpointing": checkpointing,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
        }

    def setup_environment(self) -> None:
        """Called by the Trainer before it builds the model: all ranks are data parallel unless sizes are given."""
        if self._data_parallel_size == "auto" and self._tensor_parallel_size == "auto":
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Called by the Trainer after `configure_model`: packs what is dense, shards, then sets up as usual."""
        from torch.distributed.fsdp import FSDPModule

        model = self.model
        assert model is not None
        units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        if units:
            for unit in units:  # a root keeps its parameters gathered after validation; optimizers must get the shards
                unit.reshard()
        elif not any(is_dtensor(p) for p in model.parameters()):
            if self._tensor_parallel_size != 1:
                raise ValueError(
                    "HalfbyteFSDP2Strategy: tensor_parallel_size must be 1 for a model that is sharded by itself, got "
                    f"{self._tensor_parallel_size}; apply the tensor-parallel plan and fully_shard in configure_model"
                )
            model = self.precision_plugin.convert_module(model)
            fully_shard(model, mesh=self.device_mesh["data_parallel"], **self._shard_arguments)
            rank_zero_info(f"{type(self).__name__}: {audit(model)}")
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Called when a checkpoint is saved; a full one carries the formats of its packed rows."""
        state = super().lightning_module_state_dict()
        return state if self._save_distributed_checkpoint else with_metadata(state, self.lightning_module)


class HalfbyteFSDPStrategy(FSDPStrategy):
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
            as for `FSDPStrategy`.

    Raises:
        ValueError: a policy or checkpointing policy matches no module, or no block could be inferred; the text lists the
            candidates.
        NotImplementedError: a packed layer has a trainable bias that is not float32; NO_SHARD with trainable tied weights.

    Note:
        State dicts have the keys, shapes and dtypes of a single process; 8-bit moments are saved as float32, because FSDP1
        refuses uint8 optimizer state, and restored exactly. `halfbyte.optim.annotate_fsdp1` is called after wrapping.

    Example:
        >>> from lightning_plugin import HalfbyteFSDPStrategy
        >>> strategy = HalfbyteFSDPStrategy(state_dict_type="sharded")
    """

    _registered_strategies: list[str] = []  # noqa: RUF012 - Lightning's class has a list, which it refuses on the CPU

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Called by `setup` with the converted module, and by no one else: wraps it once, whatever runs follow."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        module = self.lightning_module
        assert module is not None
        root: Any = module.__dict__.get(_ROOT)
        if root is None:
            if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
                return super()._setup_model(model)  # wrapped by the user
            root = self._wrap(model)
            # Not a submodule: the wrapper holds the module. A second run must not wrap the same module again.
            module.__dict__[_ROOT] = root
            rank_zero_info(f"{type(self).__name__}: {audit(root)}")
        annotate_fsdp1(root)
        if not hasattr(self.precision_plugin, "_fsdp_root"):  # Lightning's own plugin for FSDP refuses to clip by norm
            plugin: Any = self.precision_plugin
            plugin.clip_grad_by_norm = lambda optimizer, clip_val: root.clip_grad_norm_(clip_val)
        return root

    def _wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        checkpointing = self._activation_checkpointing_kwargs
        if "auto_wrap_policy" in checkpointing:
            chosen_by(checkpointing["auto_wrap_policy"], model, "activation_checkpointing_policy")
        elif "check_fn" in checkpointing and not any(checkpointing["check_fn"](m) for m in model.modules()):
            chosen_by(set(), model, "activation_checkpointing")
        arguments = dict(self.kwargs)
        on_cpu = self.root_device.type == "cpu"
        if on_cpu and self.cpu_offload is not None and self.cpu_offload.offload_params:
            raise ValueError(f"{type(self).__name__}: cpu_offload is for accelerators; on the CPU leave it out")
        policy = arguments.get("auto_wrap_policy")
        ignored = separate_parameters(model, policy)
        for item in arguments.pop("ignored_states", None) or ():  # modules or parameters
            ignored += item.parameters() if isinstance(item, nn.Module) else [item]
        if self.world_size == 1 or self.sharding_strategy == ShardingStrategy.NO_SHARD:
            ignored += self._tied_without_sharding(model)
        if ignored:
            arguments["ignored_states"] = ignored
            for parameter in ignored:  # FSDP leaves them where they are
                parameter.data = parameter.data.to(self.root_device)
        arguments["auto_wrap_policy"] = wrap_policy(model, policy)
        root = FullyShardedDataParallel(
            model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device if on_cpu else self.root_device.index,
            **arguments,
        )
        fsdp_module._move_torchmetrics_to_device(root, self.root_device)
        fsdp_module._setup_activation_checkpointing(root, checkpointing)
        return root

    def _tied_without_sharding(self, model: nn.Module) -> list[nn.Parameter]:
        """Tied parameters where nothing is sharded: FSDP1 with use_orig_params asserts on them (torch 2.13)."""
        tied = shared_parameters(model)
        if self.world_size > 1 and any(p.requires_grad for p in tied):
            raise NotImplementedError(
                f"{type(self).__name__}: sharding_strategy='NO_SHARD' with a trainable tied parameter of shape "
                f"{tuple(tied[0].shape)} does not work in FSDP1; use strategy='ddp', which shards nothing either"
            )
        return tied

    def teardown(self) -> None:
        """Called at the end of every run."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()

    def _state(self) -> AbstractContextManager[Any]:
        """Lightning's contexts for state dicts, without the offload to the CPU that crashes there (torch 2.13)."""
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            FullyShardedDataParallel,
            StateDictType,
        )

        assert self.model is not None
        if self._state_dict_type != "full":
            return fsdp_module._get_sharded_state_dict_context(self.model)
        offload = self.root_device.type != "cpu"
        return FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Called when a checkpoint is saved; a full one carries the formats of its packed rows."""
        assert self.model is not None
        with self._state():
            state = self.model.state_dict()
        return with_metadata(state, self.lightning_module) if self._state_dict_type == "full" else state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Called when a checkpoint is saved. 8-bit moments are saved as float32, from which they come back bit for bit."""
        from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

        assert self.model is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        own = optimizer.torch_state_dict() if isinstance(optimizer, Optimizer8bit) else None
        with self._state():
            state = FullyShardedDataParallel.optim_state_dict(self.model, optimizer, own)
            if self._state_dict_type == "full" and state:
                state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)
        return state

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called when a run resumes; see `optimizer_state`."""
        eight_bit = [o for o in self.optimizers if isinstance(o, Optimizer8bit)]
        for optimizer in eight_bit:
            vars(optimizer)["load_state_dict"] = optimizer.load_torch_state_dict
        try:
            return super().load_checkpoint(*args, **kwargs)
        finally:
            for optimizer in eight_bit:
                del vars(optimizer)["load_state_dict"]


_ROOT = "_halfbyte_fsdp_root"


def with_metadata(state: Mapping[str, Any], module: nn.Module | None) -> dict[str, Any]:
    """A full state dict with what `Module.state_dict` records beside the tensors, which FSDP's ways to gather one drop.

    `load_from_checkpoint` reads the formats of packed rows there.
    """
    result: OrderedDict[str, Any] = OrderedDict(state)
    if module is not None and result:
        metadata: OrderedDict[str, dict[str, Any]] = OrderedDict()
        for name, child in module.named_modules():
            entry: dict[str, Any] = {"version": child._version}
            if isinstance(child, PackedRows):
                entry.update(format=str(child.format), in_features=child.weight_shape[1])
            metadata.setdefault(clean_name(name), {}).update(entry)
        result._metadata = metadata  # type: ignore[attr-defined]
    return result


StrategyRegistry.register(
    "fsdp2_halfbyte", HalfbyteFSDP2Strategy, description="FSDP2 in units read off the model", override=True
)
StrategyRegistry.register(
    "fsdp_halfbyte", HalfbyteFSDPStrategy, description="FSDP1 with packed weights and a checked policy", override=True
)
