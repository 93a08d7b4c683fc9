"""Which modules become sharding units: read off the model itself, the same for FSDP1 and FSDP2.

A unit is gathered as a whole before its forward and released after it, so the blocks a model repeats are the right size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

__all__ = ["block_classes", "blocks", "candidates", "clean_name", "shared_parameters", "tables", "unwrapped"]

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """A module's or parameter's name without what FSDP1, checkpointing and torch.compile wrap around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module whose forward runs in the end, inside what FSDP1, checkpointing and torch.compile wrap around it."""
    for name in _WRAPPERS:
        inside = module._modules.get(name)
        if inside is not None:
            return unwrapped(inside)
    return module


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, outermost first.

    They are the modules of the classes that `_no_split_modules` of the model (or of a model inside it, as under PEFT or a
    LightningModule) names; if none does, the members of outermost `ModuleList`s that hold two or more modules of one class.

    Args:
        model: any module.

    Returns:
        Names and modules; empty if the model repeats nothing.
    """
    wanted = {name for m in model.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    modules = _named(model)
    found = {name: m for name, m in modules if type(m).__name__ in wanted and _has_parameters(m)}
    return found or dict(_repeated(modules))


def _repeated(modules: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    taken: set[nn.Module] = set()
    for name, module in modules:
        if not isinstance(module, nn.ModuleList) or module in taken:
            continue
        members = [(i, m) for i, m in enumerate(module) if _has_parameters(m)]
        counts = Counter(type(m) for _, m in members)
        for index, member in members:
            if counts[type(member)] > 1:
                taken.update(member.modules())
                yield f"{name}.{index}" if name else str(index), member


def block_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of `blocks(model)`."""
    return tuple(dict.fromkeys(type(m) for m in blocks(model).values()))


def candidates(model: nn.Module) -> str:
    """What a policy for this model could name, for error messages: its blocks, else the classes it repeats."""
    classes = block_classes(model)
    if classes:
        return ", ".join(f"{c.__module__}.{c.__qualname__}" for c in classes)
    counts = Counter(type(m) for m in model.modules() if any(True for _ in m.children()) and _has_parameters(m))
    repeated = [f"{c.__module__}.{c.__qualname__} ({n}x)" for c, n in counts.most_common(5) if n > 1]
    return ", ".join(repeated) or "none: no class with parameters occurs twice"


def shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that two or more modules hold, as tied embeddings do."""
    count: Counter[int] = Counter()
    kept: dict[int, nn.Parameter] = {}
    for module in dict.fromkeys(m for _, m in _named(model)):
        for parameter in module._parameters.values():
            if parameter is not None:
                count[id(parameter)] += 1
                kept[id(parameter)] = parameter
    return [parameter for key, parameter in kept.items() if count[key] > 1]


def tables(model: nn.Module, shared: Iterable[Tensor]) -> dict[str, nn.Module]:
    """Input and output embeddings that can be units of their own: named by the model (transformers) and not tied."""
    tied = {id(p) for p in shared}
    named: list[nn.Module] = []
    for module in model.modules():
        for accessor in ("get_input_embeddings", "get_output_embeddings"):
            try:
                found = getattr(module, accessor)() if hasattr(module, accessor) else None
            except (NotImplementedError, AttributeError):  # transformers' way to say that there is none
                found = None
            if isinstance(found, nn.Module):
                named.append(found)
    inside = {m for block in blocks(model).values() for m in block.modules()}
    return {
        name: m
        for name, m in _named(model)
        if any(m is n for n in named)
        and m not in inside
        and _has_parameters(m)
        and not any(id(p) in tied for p in m.parameters())
    }


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(clean_name(name), m) for name, m in model.named_modules() if type(m).__name__ not in _WRAPPER_CLASSES]


_WRAPPER_CLASSES = ("FullyShardedDataParallel", "CheckpointWrapper", "OptimizedModule")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
