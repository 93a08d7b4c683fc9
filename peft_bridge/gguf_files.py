"""GGUF files as transformers maps them onto its models: names, layouts and values, without loading one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as legacy
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported

from peft_bridge.conversion import Step, load_steps
from peft_bridge.readers import GgufReader

__all__ = ["DTYPE", "gguf_model", "gguf_reader", "gguf_steps"]

DTYPE = torch.bfloat16
"""What the values of a GGUF file are loaded in."""

_PROBE = 4  # columns of the arrays that stand in for tensors while it is found out where they go


def architecture_of(file: Path) -> str:
    """What the file calls its architecture."""
    if not file.is_file():
        raise FileNotFoundError(f"SRC: {file} does not exist")
    metadata, _ = read_gguf_metadata(str(file))
    return str(metadata["general.architecture"])


def gguf_model(file: Path) -> PreTrainedModel:
    """The model that the file describes, dense, on meta.

    Raises:
        FileNotFoundError: no such file.
        NotImplementedError: transformers doesn't know its architecture.
    """
    architecture = architecture_of(file)
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except ValueError as error:
        raise NotImplementedError(
            f"{file}: transformers has no mapping for the GGUF architecture {architecture!r} ({error})"
        ) from error
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    return model


def gguf_reader(file: Path) -> GgufReader:
    """Decodes rows as transformers does for this architecture: newer ones in `DTYPE`, the others in float32."""
    if is_gguf_arch_supported(architecture_of(file)):
        return GgufReader(file, _decoded_as_transformers, DTYPE)
    return GgufReader(file, _decoded_as_gguf, torch.float32)


def _decoded_as_transformers(rows: Any, kind: Any) -> Tensor:
    values = torch.from_numpy(np.array(rows)).view(torch.uint8)
    return values.view(torch.bfloat16) if kind.name == "BF16" else dequantize(values, int(kind), DTYPE)


def _decoded_as_gguf(rows: Any, kind: Any) -> Tensor:
    from gguf import quants

    return torch.from_numpy(quants.dequantize(np.array(rows), kind))


def gguf_steps(
    model: PreTrainedModel, file: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Step], list[str], list[Any]]:
    """(steps from the file's tensors to the model's, tensors that the model has no place for, what saving reverses)."""
    architecture = architecture_of(file)
    if is_gguf_arch_supported(architecture):
        steps, unexpected = load_steps(model, shapes, get_gguf_conversion_mapping(architecture, model.config))
    else:
        steps, unexpected = _legacy_steps(model, file, architecture, shapes)
    # transformers drops what the load used (5.23 the older architectures' not): saving starts from the model's own mapping
    own = get_model_conversion_mapping(model, add_legacy=False)
    return steps, unexpected, [each for each in own if not isinstance(each, PrefixChange)]


def _legacy_steps(
    model: PreTrainedModel, file: Path, architecture: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Step], list[str]]:
    content = legacy.load_gguf_checkpoint(str(file))
    processor: Any = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)(config=content["config"])
    names: dict[str, str] = legacy.get_gguf_hf_weights_map(model, processor)

    def process(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, values in tensors.items():
            done = processor.process(
                weights=values, name=name, tensor_key_mapping=names, parsed_parameters={"tensors": made}
            )
            if done.name in names:
                made[names[done.name]] = torch.from_numpy(np.copy(done.weights))
        return made

    sources: dict[str, list[str]] = {}
    state, unexpected = model.state_dict(), []
    for name, shape in shapes.items():
        try:
            made = list(process({name: np.zeros((*shape[:-1], _PROBE), dtype=np.float32)}))
        except (ValueError, IndexError):  # it needs the true size of a row
            made = [names[name]] if name in names else []
        made = [target for target in made if target in state]
        for target in made:
            sources.setdefault(target, []).append(name)
        if not made:
            unexpected.append(name)
    grouped: dict[tuple[str, ...], list[str]] = {}
    for target, found in sources.items():
        grouped.setdefault(tuple(found), []).append(target)
    steps = []
    for names_in, targets in grouped.items():

        def convert(tensors: dict[str, Tensor], targets: tuple[str, ...] = tuple(targets)) -> dict[str, Tensor]:
            made = process({name: tensor.numpy() for name, tensor in tensors.items()})
            return {target: made[target] for target in targets}

        steps.append(Step(names_in, {target: state[target] for target in targets}, convert))
    return steps, unexpected
