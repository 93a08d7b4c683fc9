"""FSDP1: packed rows travel as float32 containers, in units of their own with mixed precision off.

FSDP1 flattens the parameters of a unit into one, which must be floating. Rows are multiples of 16 bytes, so they can be
viewed as float32; nothing computes on that view, and copies of one dtype keep every bit. A unit shared with trainables
would cost the rows a gradient and a reduce-scatter, and one under mixed precision would destroy them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfbyte.distributed.grouping import blocks, candidates, shared_parameters, tables
from halfbyte.nn.experts import QuantExperts
from halfbyte.nn.packed import PackedRows

__all__ = ["chosen_by", "separate_parameters", "to_containers_", "units_of", "wrap_policy"]


def wrap_policy(model: nn.Module, policy: Any = None) -> Any:
    """The `auto_wrap_policy` for `FullyShardedDataParallel`: one unit per block, one per packed weight.

    The rows of every packed module become a float32 container in place (`packed` still gives the bytes, state dicts still
    hold uint8 under the same keys). Units: the model's blocks as `fully_shard` finds them, or what `policy` chooses; every
    packed module, with mixed precision off; the input and output embeddings of a transformers model, unless tied. Use it
    with `use_orig_params=True`.

    Args:
        model: the model that is about to be wrapped.
        policy: instead of the inferred blocks: a set of classes, or any policy that `FullyShardedDataParallel` takes.

    Returns:
        A `CustomPolicy` for this very model.

    Raises:
        ValueError: the policy, or the inference without one, matches no module: every rank would gather everything.
        NotImplementedError: a packed layer has a trainable bias that is not float32, or experts are packed.

    Note:
        A trainable bias costs the rows of its layer a gradient of zeros, of their packed size, and its reduce-scatter:
        FSDP1 can't keep the two apart. FSDP2 has no such cost. A unit is flattened into one dtype: pass
        `ignored_states=separate_parameters(model)`, as `HalfbyteFSDPStrategy` does, if a model mixes dtypes.
    """
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = units_of(model, policy)
    to_containers_(model)
    return CustomPolicy(lambda module: units.get(module, False))


def units_of(model: nn.Module, policy: Any = None) -> dict[nn.Module, bool | dict[str, Any]]:
    """Every module that becomes a unit, with the FSDP arguments it changes (or True); see `wrap_policy`."""
    if policy is None:
        found = blocks(model).values()
        if not found:
            raise ValueError(
                "halfbyte.distributed.wrap_policy: found no repeated blocks: no module has _no_split_modules and no "
                "ModuleList holds two modules of one class. Pass a policy that names the classes to wrap. Candidates: "
                f"{candidates(model)}"
            )
        units: dict[nn.Module, bool | dict[str, Any]] = dict.fromkeys(found, True)
        units.update(dict.fromkeys(tables(model, shared_parameters(model)).values(), True))
    else:
        units = chosen_by(policy, model, "auto_wrap_policy")
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            raise NotImplementedError(
                f"halfbyte.distributed.wrap_policy: {name} are packed experts, which FSDP1 can't shard; use FSDP2 "
                "(halfbyte.distributed.fully_shard, HalfbyteFSDP2Strategy)"
            )
        if isinstance(module, PackedRows):
            bias = module._parameters.get("bias")
            if bias is not None and bias.requires_grad and bias.dtype != torch.float32:
                raise NotImplementedError(
                    f"halfbyte.distributed.wrap_policy: {name}.bias is trainable and {bias.dtype}: FSDP1 keeps it in one "
                    "flat parameter with the packed rows, which is float32; freeze it, make it float32, or use FSDP2 "
                    "(halfbyte.distributed.fully_shard, HalfbyteFSDP2Strategy)"
                )
            units[module] = {"mixed_precision": None}
    return units


def chosen_by(policy: Any, model: nn.Module, argument: str) -> dict[nn.Module, bool | dict[str, Any]]:
    """The modules below `model` that a policy of any of FSDP1's kinds chooses.

    Raises:
        ValueError: it chooses none; the text says what was asked for and the candidates.
    """
    found = dict(_run(policy, model))
    found.pop(model, None)
    if not found:
        asked = getattr(policy, "_module_classes", None) or getattr(policy, "keywords", {}).get("transformer_layer_cls")
        if isinstance(policy, set):
            asked = policy
        names = ", ".join(sorted(f"{c.__module__}.{c.__qualname__}" for c in asked)) if asked else "the policy"
        raise ValueError(
            f"{argument}: {names} matches no module of {type(model).__name__}, so it would have no effect. Leave it out to "
            f"have it inferred, or choose from: {candidates(model)}"
        )
    return found


def _run(policy: Any, model: nn.Module) -> dict[nn.Module, Any]:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if isinstance(policy, set):
        policy = ModuleWrapPolicy(policy)
    if hasattr(policy, "_run_policy"):  # ModuleWrapPolicy, CustomPolicy
        return {
            module: kwargs or True
            for module, kwargs in policy._run_policy(model, ignored_modules=set(), root_kwargs={}).items()
        }
    return dict.fromkeys(_run_function(policy, model), True)


def _run_function(policy: Callable[..., bool], model: nn.Module) -> list[nn.Module]:
    """What FSDP's own recursion does with a policy function, without wrapping anything."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        total = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        taken = sum(visit(child) for child in module.children())
        if module is not model and policy(module=module, recurse=False, nonwrapped_numel=total - taken):
            chosen.append(module)
            return total
        return taken

    visit(model)
    return chosen


def to_containers_(model: nn.Module) -> None:
    """Turns the rows of every packed module into a float32 container where they stand; twice changes nothing."""
    for module in model.modules():
        if isinstance(module, PackedRows):
            module.to_container_()


def separate_parameters(model: nn.Module, policy: Any = None) -> list[nn.Parameter]:
    """Frozen parameters that can't be flattened with the rest of their unit, which has another dtype.

    Norms of a bfloat16 model beside float32 adapters, for example, or biases beside a float32 container. They are small:
    every rank keeps them whole (`ignored_states=`), and `audit` lists them. Call it before `wrap_policy`.

    Raises:
        ValueError: trainable parameters of one unit differ in dtype.
    """
    units, names = units_of(model, policy), {m: name for name, m in model.named_modules()}
    taken: set[int] = set()
    separate: list[nn.Parameter] = []
    for module in reversed(list(names)):  # children before their parents
        if module not in units and module is not model:
            continue
        own = [p for p in module.parameters() if id(p) not in taken]
        taken.update(id(p) for p in own)
        if isinstance(module, PackedRows):
            separate += [p for p in own if p.dtype not in (torch.uint8, torch.float32)]
            continue
        trained = {p.dtype for p in own if p.requires_grad}
        if len(trained) > 1:
            raise ValueError(
                f"halfbyte.distributed: the trainable parameters of one FSDP1 unit must have one dtype, "
                f"{names[module] or 'the root'} has {', '.join(sorted(map(str, trained)))}; cast them alike "
                f"(HalfbytePrecision(trainable_dtype=...) does)"
            )
        sizes: dict[torch.dtype, int] = {}
        for p in own:
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel() * p.element_size()
        kept = trained.pop() if trained else max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
        separate += [p for p in own if p.dtype != kept]
    return separate
