"""FSDP1 through accelerate: whatever policy it wraps a model with, packed weights get units of their own.

accelerate offers no place for a policy that knows the model, nor for parameters to leave alone. So one method of its FSDP
plugin is wrapped, which `Accelerator.prepare_model` calls right before `FullyShardedDataParallel`, and, once that happened,
functions by which adapters and optimizers are saved and loaded. All do what they did for models without packed weights.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy

from halfbyte.distributed.fsdp1 import separate_parameters, to_containers_, units_of
from halfbyte.distributed.grouping import clean_name, shared_parameters
from halfbyte.nn.packed import Packed


class PackedPolicy(CustomPolicy):
    """The units of `halfbyte.distributed.wrap_policy`, with what doesn't fit any unit left whole on every rank.

    Frozen parameters of another dtype than the rest of their unit don't (biases beside packed rows, norms beside float32
    adapters), nor do tied ones where nothing is sharded.

    Args:
        model: the model that is about to be wrapped; its rows become containers.
        plugin: accelerate's; its own policy chooses the units of everything that is not packed, or, if it has none, the
            repeated blocks are found.

    Raises:
        ValueError: the plugin's policy matches nothing, or the trainable parameters of one unit differ in dtype.
        NotImplementedError: the model has packed experts, or a trainable bias that doesn't fit.
    """

    def __init__(self, model: nn.Module, plugin: Any) -> None:
        self.asked = plugin.auto_wrap_policy  # for the next model that the plugin wraps
        self._whole = separate_parameters(model, self.asked)
        if PartialState().num_processes == 1 or plugin.sharding_strategy == ShardingStrategy.NO_SHARD:
            self._whole += shared_parameters(model)  # FSDP1 with use_orig_params asserts on them (torch 2.13)
        self._units = units_of(model, self.asked)
        to_containers_(model)
        for parameter in self._whole:  # FSDP leaves them where they are
            parameter.data = parameter.data.to(PartialState().device)
        super().__init__(lambda module: self._units.get(module, False))

    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]) -> Any:
        if not root_kwargs:  # activation checkpointing: accelerate applies it by the same policy, after wrapping
            return {module: {} for module, how in self._units.items() if how is True and any(module.children())}
        root_kwargs["ignored_states"].update(self._whole)  # the root's own set, which its units get too
        return super()._run_policy(root_module, ignored_modules, root_kwargs)


_originals: dict[tuple[Any, str], Any] = {}  # what stands where ours does, by owner and name


def install() -> None:
    """Lets accelerate wrap packed models by FSDP1; called on import, undone by `uninstall`."""
    _replace(FullyShardedDataParallelPlugin, "set_auto_wrap_policy", _packed_apart)


def uninstall() -> None:
    """Gives accelerate and PEFT their own functions back."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _replace(owner: Any, name: str, wrap: Any) -> None:
    if (owner, name) not in _originals:
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, wrap(_originals[owner, name]))


def _packed_apart(original: Any) -> Any:
    @functools.wraps(original)
    def set_auto_wrap_policy(self: Any, model: nn.Module) -> None:
        if isinstance(self.auto_wrap_policy, PackedPolicy):
            self.auto_wrap_policy = self.auto_wrap_policy.asked
        original(self, model)
        if self.fsdp_version == 1 and _is_packed(model):
            self.auto_wrap_policy = PackedPolicy(model, self)
            for wrap, names, modules in _CHECKPOINTS:
                for module, name in itertools.product(modules, names):
                    if module in sys.modules:
                        _replace(sys.modules[module], name, wrap)

    return set_auto_wrap_policy


def _by_clean_names(original: Any) -> Any:
    """PEFT 0.21 finds the adapters of a wrapped model by names in which wrappers occur, and their values by names without.

    It then saves an empty adapter, and loads nothing, and does not say so. And it asks the modules of `modules_to_save` for
    their state dicts, of which it needs the keys, on the one rank that writes files.
    """

    @functools.wraps(original)
    def by_clean_names(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not (_is_packed(model) and FullyShardedDataParallel.fsdp_modules(model)):
            return original(model, *args, **kwargs)
        lent: list[tuple[Any, str, Any]] = [
            (model, name, _cleaned(getattr(model, name))) for name in ("named_modules", "named_parameters")
        ]
        units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
        lent += [(unit, "state_dict", _keys_of(unit)) for unit in units if unit is not model]
        for owner, name, method in lent:
            vars(owner)[name] = method
        try:
            return original(model, *args, **kwargs)
        finally:
            for owner, name, _ in lent:
                del vars(owner)[name]

    return by_clean_names


def _cleaned(named: Any) -> Any:
    return lambda *args, **kwargs: ((clean_name(name), each) for name, each in named(*args, **kwargs))


def _keys_of(unit: FullyShardedDataParallel) -> Any:
    gathered, flat = unit.state_dict, unit._flat_param
    names = () if flat is None else flat._fqns

    def state_dict(*args: Any, **kwargs: Any) -> Any:  # with arguments: as a part of the model's
        return gathered(*args, **kwargs) if args or kwargs else dict.fromkeys(map(clean_name, names))

    return state_dict


def _with_state(original: Any) -> Any:
    """What sharded optimizer state is read into: accelerate 1.15 takes what a new optimizer has, and restores nothing."""

    @functools.wraps(original)
    def load_fsdp_optimizer(
        fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        sharded = fsdp_plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
        if sharded and fsdp_plugin.fsdp_version == 1 and _is_packed(model):
            _init_optim_state(getattr(optimizer, "optimizer", optimizer))
        return original(fsdp_plugin, accelerator, optimizer, model, *args, **kwargs)

    return load_fsdp_optimizer


# What saves and loads wrapped models, and the modules that call it by that name.
_CHECKPOINTS = (
    (_by_clean_names, ("get_peft_model_state_dict", "set_peft_model_state_dict"), ("peft", "peft.peft_model")),
    (_with_state, ("load_fsdp_optimizer",), ("accelerate.accelerator", "transformers.trainer")),
)


def _is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, Packed) for module in model.modules())


install()
