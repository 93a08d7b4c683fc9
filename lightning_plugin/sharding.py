"""What the sharding strategies of the Trainer and of Fabric share: wrapping, meshes, and state dicts on every device.

Lightning has each strategy twice, as classes that don't know each other. `FSDP1` and `FSDP2` stand before either of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
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
from lightning_plugin.distribution import fsdp_module, rank_zero_info

__all__ = ["FSDP1", "FSDP2", "float_moments", "formats_of", "is_sharded", "lending", "with_metadata"]

MESH_NAMES = ("replicate", "shard")


class FSDP1:
    """Mixin before an `FSDPStrategy`: packed weights, a checked policy, the CPU."""

    root_device: Any
    world_size: Any
    cpu_offload: Any
    sharding_strategy: Any
    mixed_precision_config: Any
    _activation_checkpointing_kwargs: dict[str, Any]
    _state_dict_type: Any

    @property
    def _fsdp_arguments(self) -> dict[str, Any]:
        """The keyword arguments for `FullyShardedDataParallel`, which the two base classes keep under other names."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        """Called first; Lightning makes meshes of CUDA devices only."""
        sizes = self._fsdp_arguments.get("device_mesh")
        if not isinstance(sizes, tuple):
            super().setup_environment()  # type: ignore[misc]
            return
        del self._fsdp_arguments["device_mesh"]
        super().setup_environment()  # type: ignore[misc]
        self._fsdp_arguments["device_mesh"] = mesh_of(type(self).__name__, sizes, self.root_device, self.world_size)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wraps a module, once, and says what became of it; see `HalfbyteFSDPStrategy`."""
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        checkpointing = self._activation_checkpointing_kwargs
        if "auto_wrap_policy" in checkpointing:
            chosen_by(checkpointing["auto_wrap_policy"], model, "activation_checkpointing_policy")
        elif "check_fn" in checkpointing and not any(checkpointing["check_fn"](m) for m in model.modules()):
            chosen_by(set(), model, "activation_checkpointing")
        arguments = dict(self._fsdp_arguments)
        on_cpu = self.root_device.type == "cpu"
        offload = self.cpu_offload
        if on_cpu and offload is not None and offload.offload_params:
            rank_zero_info(f"{type(self).__name__}: cpu_offload has no effect: the parameters of a CPU are in its memory")
            # FSDP1 would pin memory, which torch can't without an accelerator, and add each gradient to the last step's.
            offload = None
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
            cpu_offload=offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device if on_cpu else self.root_device.index,
            **arguments,
        )
        fsdp_module._move_torchmetrics_to_device(root, self.root_device)
        fsdp_module._setup_activation_checkpointing(root, checkpointing)
        annotate_fsdp1(root)
        rank_zero_info(f"{type(self).__name__}: {audit(root)}")
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

    def state_context(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Lightning's contexts for state dicts, without the offload to the CPU on the CPU itself.

        There it crashes, and gives one moment the values of another: what is to be copied out is the buffer of the next
        gather (torch 2.13).
        """
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            FullyShardedDataParallel,
            StateDictType,
        )

        if self._state_dict_type != "full":
            return fsdp_module._get_sharded_state_dict_context(root)
        offload = self.root_device.type != "cpu"
        return FullyShardedDataParallel.state_dict_type(
            root,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
        )

    def module_state(self, root: nn.Module, module: nn.Module | None) -> dict[str, Any]:
        """The state dict of a wrapped module as this strategy saves it; a full one carries the formats of its rows."""
        with self.state_context(root):
            state = nn.Module.state_dict(root)
        return with_metadata(state, module) if self._state_dict_type == "full" else state

    def moments(self, root: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state as this strategy saves it, by parameter names; see `float_moments`."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        with self.state_context(root), float_moments([optimizer], saving=True):
            return FullyShardedDataParallel.optim_state_dict(root, optimizer)

    @contextmanager
    def resuming(self, path: Any, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Around the loading of a checkpoint with these optimizers.

        Raises:
            NotImplementedError: a folder with optimizer state under a hybrid strategy.
        """
        optimizers = list(optimizers)
        if optimizers and "HYBRID" in self.sharding_strategy.name and Path(path).is_dir():
            # torch's load_sharded_optimizer_state_dict splits among all ranks, whatever a replica is (torch 2.13).
            raise NotImplementedError(
                f"{type(self).__name__}: FSDP1 restores wrong optimizer state from a folder (state_dict_type='sharded') "
                f"under sharding_strategy={self.sharding_strategy.name!r}; resume from a checkpoint saved with "
                "state_dict_type='full', or use HalfbyteFSDP2Strategy(device_mesh=...)"
            )
        with float_moments(optimizers, saving=False):
            yield


class FSDP2:
    """Mixin before a `ModelParallelStrategy`: calls `fully_shard` by itself, in a mesh of one dimension or of two."""

    root_device: Any
    world_size: Any
    num_nodes: Any
    num_processes: Any
    _tensor_parallel_size: Any
    _data_parallel_size: Any

    def __init__(
        self,
        *,
        checkpointing: bool = True,
        reshard_after_forward: bool = True,
        mp_policy: Any = None,
        offload_policy: Any = None,
        device_mesh: Any = None,
        save_distributed_checkpoint: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)  # type: ignore[call-arg]
        self._replicate_and_shard = device_mesh
        self._shard_arguments = {
            "checkpointing": checkpointing,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
        }

    def setup_environment(self) -> None:
        """Called first: all ranks are data parallel unless sizes are given."""
        if self._data_parallel_size == "auto" and self._tensor_parallel_size == "auto":
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()  # type: ignore[misc]
        if isinstance(self._replicate_and_shard, tuple):
            sizes = self._replicate_and_shard
            self._replicate_and_shard = mesh_of(type(self).__name__, sizes, self.root_device, self.world_size)

    def shard(self, model: nn.Module, mesh: Any) -> nn.Module:
        """Shards a module unless it is sharded already, and says what became of it; see `HalfbyteFSDP2Strategy`."""
        if is_sharded(model):
            return model
        if self._tensor_parallel_size != 1:
            raise ValueError(
                f"{type(self).__name__}: tensor_parallel_size must be 1 for a model that is sharded by itself, got "
                f"{self._tensor_parallel_size}; apply the tensor-parallel plan and fully_shard yourself, in configure_model "
                "(Trainer) or before fabric.setup (Fabric)"
            )
        if self._replicate_and_shard is not None:
            mesh = self._replicate_and_shard
        else:
            mesh = mesh["data_parallel"]
        fully_shard(model, mesh=mesh, **self._shard_arguments)
        rank_zero_info(f"{type(self).__name__}: {audit(model)}")
        return model


def is_sharded(model: nn.Module) -> bool:
    """Whether something of a model is sharded by FSDP2 or tensor parallel already."""
    from torch.distributed.fsdp import FSDPModule

    # Units may be gathered at the moment, their parameters plain tensors.
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(is_dtensor(p) for p in model.parameters())


def mesh_of(name: str, sizes: tuple[int, ...], device: Any, world_size: int) -> Any:
    """A mesh of (replicas, ranks that share one replica).

    Raises:
        ValueError: the sizes are not two, or their product is not the world size.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if len(sizes) != 2 or sizes[0] * sizes[1] != world_size:
        raise ValueError(
            f"{name}: device_mesh must be (replicas, shards per replica) with a product of {world_size}, the world size, "
            f"got {sizes}"
        )
    return init_device_mesh(device.type, sizes, mesh_dim_names=MESH_NAMES)


@contextmanager
def lending(owner: Any, **methods: Any) -> Iterator[None]:
    """Inside, `owner` has these methods instead of its class's: Lightning calls them by name in long functions."""
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(owner)[name]


@contextmanager
def float_moments(optimizers: Iterable[Optimizer], *, saving: bool) -> Iterator[None]:
    """Inside, 8-bit optimizers save their moments as float32 or take them back, which restores every code and scale.

    FSDP1 refuses uint8 optimizer state.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer8bit):
                if saving:
                    state = optimizer.torch_state_dict()
                    stack.enter_context(lending(optimizer, state_dict=lambda state=state: state))
                else:
                    stack.enter_context(lending(optimizer, load_state_dict=optimizer.load_torch_state_dict))
        yield


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


def formats_of(module: nn.Module) -> dict[str, str]:
    """The format of every packed module by its clean name."""
    return {clean_name(name): str(m.format) for name, m in module.named_modules() if isinstance(m, PackedRows)}
