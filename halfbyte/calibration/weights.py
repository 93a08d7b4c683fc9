"""The weights of a block: linear layers, `Conv1D` and the experts of a fused mixture alike, as (N, K) matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import Format
from halfbyte.nn.experts import QuantExperts, expert_weights, quantize_experts_
from halfbyte.nn.linear import quantize_linear_
from halfbyte.nn.linear_classes import linear_shape, linear_weight
from halfbyte.nn.packed import PackedRows

Note = Callable[[str, Tensor], None]
"""Called with a weight's name and what is about to be multiplied with it, shape (..., K)."""


def is_quantizable(module: nn.Module) -> bool:
    """Whether `quantize_model` would pack the weights of this module itself."""
    return linear_shape(module) is not None or bool(expert_weights(module))


@dataclass(frozen=True)
class Weight:
    """One (N, K) matrix of a module.

    Attributes:
        name: of its module; of experts with the parameter's name and the expert's number behind it.
        module: who holds it.
        parameter: under which name.
        expert: number of the expert, None for a layer.
    """

    name: str
    module: nn.Module
    parameter: str = "weight"
    expert: int | None = None

    def dense(self) -> Tensor:
        """The matrix, shape (N, K), of the module's dtype."""
        weight = self.module.get_parameter(self.parameter).detach()
        if self.expert is None:
            return linear_weight(self.module, weight)
        module: Any = self.module
        return weight[self.expert].t().contiguous() if module.is_transposed else weight[self.expert]


def weights_of(name: str, module: nn.Module) -> list[Weight]:
    """The matrices of a quantizable module."""
    if linear_shape(module) is not None:
        return [Weight(name, module)]
    return [
        Weight(f"{name}.{parameter}.{expert}", module, parameter, expert)
        for parameter in expert_weights(module)
        for expert in range(len(module.get_parameter(parameter)))
    ]


def pack_(module: nn.Module, rows: list[Tensor], format: Format) -> None:
    """Turns a module into its packed class with the given rows, one (N, row_bytes) per matrix of `weights_of`."""
    by_parameter: dict[str, list[Tensor]] = {}
    for weight, packed in zip(weights_of("", module), rows, strict=True):
        by_parameter.setdefault(weight.parameter, []).append(packed)
    fused = linear_shape(module) is None
    for parameter in by_parameter:
        meta = torch.empty_like(module.get_parameter(parameter), device="meta")
        module._parameters[parameter] = nn.Parameter(meta, requires_grad=False)
    quantized: nn.Module = quantize_experts_(module, format, None) if fused else quantize_linear_(module, format, None)
    for parameter, parts in by_parameter.items():
        quantized._parameters[parameter] = nn.Parameter(torch.stack(parts) if fused else parts[0], requires_grad=False)


def packed_formats(module: nn.Module) -> dict[str, tuple[Format, int]]:
    """Format and K of every packed parameter, by its name in the state dict."""
    found = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, PackedRows):
            found[f"{prefix}weight"] = (part.format, part.weight_shape[1])
        elif isinstance(part, QuantExperts):
            found.update({prefix + parameter: (part.format, shape[2]) for parameter, shape in part.weight_shapes.items()})
    return found


@contextmanager
def watched(name: str, module: nn.Module, note: Note) -> Iterator[None]:
    """Calls `note` whenever the module multiplies with one of its matrices."""
    with ExitStack() as stack:
        if linear_shape(module) is not None:
            handle = module.register_forward_pre_hook(lambda _, args: note(name, args[0]))
            stack.callback(handle.remove)
        else:
            eager: Any = type(module).forward.__wrapped__  # type: ignore[attr-defined]
            shown = _Shown(name, module, note)
            stack.enter_context(replaced_forward(module, lambda *args, **kwargs: eager(shown, *args, **kwargs)))
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for one module; what else the model reads of it stays."""
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


class _Shown:
    """Stands for `self` in the forward of dense fused experts, which takes one expert after the other."""

    def __init__(self, name: str, module: nn.Module, note: Note) -> None:
        self._name, self._module, self._note = name, module, note

    def __getattr__(self, name: str) -> Any:
        if name in expert_weights(self._module):
            return _ShownWeights(f"{self._name}.{name}", self._module.get_parameter(name), self._note)
        return getattr(self._module, name)


@dataclass(frozen=True)
class _ShownWeights:
    name: str
    weight: Tensor
    note: Note

    def __getitem__(self, expert: Any) -> _ShownExpert:
        return _ShownExpert(f"{self.name}.{int(expert)}", self.weight[int(expert)], self.note)


@dataclass(frozen=True)
class _ShownExpert:
    name: str
    weight: Tensor
    note: Note

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        expert = next(value for value in args if isinstance(value, cls))
        expert.note(expert.name, args[0])  # of a linear and of a product alike
        return func(*(value.weight if isinstance(value, cls) else value for value in args), **(kwargs or {}))
