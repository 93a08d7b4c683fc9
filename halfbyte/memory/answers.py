"""Answers: what a step without data is told where it asks for values, above all which experts get how many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfbyte.nn.experts import expert_weights

__all__ = ["Answers"]

_READ = torch.ops.aten._local_scalar_dense.default
_NONZERO = torch.ops.aten.nonzero.default


@dataclass
class _Routing:
    """The routing of the experts that run: `hits` of them, the first `top_k` with all tokens, further ones with one."""

    tokens: int
    top_k: int
    hits: int
    asked: int = 0

    def count(self) -> int:
        """Tokens of the next expert that asks."""
        self.asked += 1
        return 1 if self.asked > self.top_k else self.tokens


class Answers(TorchDispatchMode):
    """Enter it between a `FakeTensorMode` and what counts: numbers that a step reads back, and a mixture's routing.

    Numbers (`.item()`, as torch's own optimizers do with the step count) are 1. How many tokens an expert gets is decided by
    data, so the routing that takes the most is assumed: all tokens choose the same `top_k` experts, each of which gets them
    all. What a step keeps for its backward grows with the pairs of token and expert, of which there are tokens * top_k in
    any case; what it needs besides is that of one expert at a time, and largest where one gets every token. Gradients of
    experts that train are summed when the second one's arrives: two further experts, the last in forward, get a single
    token each, so that nearly all that was kept is still there at that moment. No routing takes more.

    Known are fused experts of transformers, packed or dense ("eager" loops over experts; other implementations take the
    same for any routing).
    """

    def __init__(self) -> None:
        super().__init__()
        self._routing: _Routing | None = None

    def watch(self, model: nn.Module) -> Iterator[Any]:
        """Hooks that tell when the experts of a model run."""
        for module in model.modules():
            names = expert_weights(module)
            if names:
                experts = module.get_parameter(names[0]).shape[0]
                yield module.register_forward_pre_hook(partial(self._begins, experts), with_kwargs=True)
                yield module.register_forward_hook(self._ends, always_call=True)  # a recomputation may stop early

    def _begins(self, experts: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        indices = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dtype == torch.int64]
        tokens, top_k = indices[0].shape
        self._routing = _Routing(tokens, top_k, min(experts, top_k + 2))

    def _ends(self, *_: Any) -> None:
        self._routing = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every op."""
        if func is _READ and isinstance(args[0], torch._subclasses.FakeTensor):
            return self._number(args[0].dtype)
        if func is _NONZERO and self._routing is not None:
            # Of one dimension: which experts are hit. Of two, (top_k, tokens): which tokens have chosen one.
            found = self._routing.hits if args[0].dim() == 1 else self._routing.count()
            return args[0].new_empty((found, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))

    def _number(self, dtype: torch.dtype) -> float | bool | int:
        if self._routing is not None:  # which expert (any), and whether it is the one behind the last that masks
            return False if dtype == torch.bool else 0
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
