"""What transformers does to the tensors of a checkpoint on loading and on saving, as steps that can be taken one by one.

It renames, stacks, concatenates, permutes, transposes and splits; here its own mapping and operations are asked, so nothing
knows an architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from halfbyte.errors import QuantizationError

__all__ = ["Step", "load_steps", "save_steps"]

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """Some tensors become others.

    Attributes:
        sources: names of what goes in.
        made: what comes out, on meta; of one tensor that is split, all of its parts.
        convert: does it, by transformers' own operations: tensors of the sources by name to those of `made`.
    """

    sources: tuple[str, ...]
    made: Mapping[str, Tensor]
    convert: Convert

    @classmethod
    def renaming(cls, source: str, target: str, tensor: Tensor) -> Step:
        """One tensor under another name."""
        return cls((source,), {target: tensor}, lambda tensors: {target: tensors[source]})


def load_steps(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], conversions: list[Any]
) -> tuple[list[Step], list[str]]:
    """What `from_pretrained` does with each key of a checkpoint.

    Args:
        model: the model, on meta.
        shapes: of the checkpoint's tensors, by key.
        conversions: transformers' mapping for the model; those that match are marked as used.

    Returns:
        The steps, and the keys that the model has no place for.

    Raises:
        QuantizationError: an operation of transformers fails on tensors of these shapes.
    """
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    held, prefix = model.state_dict(), model.base_model_prefix
    gathered: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    unexpected = []
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, held)
        if name not in held and key in held:
            name, pattern = rename_source_key(key, [], [], prefix, held)
        if name not in held:
            unexpected.append(key)
            continue
        template = None if pattern is None else by_pattern[pattern]
        gathered.setdefault(name, (template, []))[1].append((pattern or key, key))
    steps = []
    for name, (template, collected) in gathered.items():
        if template is None:
            key = collected[0][1]
            steps.append(Step.renaming(key, name, torch.empty(shapes[key], device="meta")))
            continue
        convert = _converting(model, template, name, collected)
        sources = tuple(key for _, key in collected)
        try:
            made = convert({key: torch.empty(shapes[key], device="meta") for key in sources})
        except Exception as error:  # an operation may raise anything about what it was not made for
            raise QuantizationError(
                f"{name}: transformers can't make it of {', '.join(f'{key} {shapes[key]}' for key in sources[:4])}: {error}",
                sources,
            ) from error
        steps.append(Step(sources, made, convert))
    return steps, unexpected


def save_steps(model: PreTrainedModel, state: Mapping[str, Tensor], conversions: Iterable[Any]) -> list[Step]:
    """What `save_pretrained` does with a model's tensors.

    Args:
        model: the model.
        state: its tensors as they are to be saved (packed ones as rows), on meta.
        conversions: those that the load used, or transformers' own for a model that was not loaded.

    Returns:
        The steps, which make the tensors of the saved checkpoint.

    Raises:
        NotImplementedError: an operation of transformers fails on packed rows.
    """
    reverse = [each.reverse_transform() for each in list(conversions)[::-1]]
    renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    gathered: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for key in sorted(state, key=dot_natural_key):
        name, pattern = apply_converters(key, converters)
        if pattern is None:
            name = apply_renamings(key, renamings)
        gathered.setdefault(name, (None if pattern is None else by_pattern[pattern], []))[1].append((pattern or key, key))
    steps = []
    for name, (template, collected) in gathered.items():
        if template is None:
            key = collected[0][1]
            steps.append(Step.renaming(key, name, state[key]))
            continue
        convert, sources = _converting(model, template, name, collected), tuple(key for _, key in collected)
        try:
            made = convert({key: state[key] for key in sources})
        except Exception as error:  # as above
            raise NotImplementedError(f"{sources[0]}: transformers can't save it as rows: {error}") from error
        renamed = {key: apply_renamings(key, renamings) for key in made}
        steps.append(Step(sources, {renamed[key]: value for key, value in made.items()}, _renamed(convert, renamed)))
    return steps


def _converting(model: PreTrainedModel, template: WeightConverter, name: str, collected: list[tuple[str, str]]) -> Convert:
    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(template)
        for pattern, key in collected:
            converter.add_tensor(name, key, pattern, tensors[key])  # type: ignore[arg-type]
        made = converter.convert(name, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    return convert


def _renamed(convert: Convert, names: Mapping[str, str]) -> Convert:
    return lambda tensors: {names[key]: value for key, value in convert(tensors).items()}
