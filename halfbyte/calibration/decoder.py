"""A causal language model as a chain of decoder blocks that can be run one by one, whatever its architecture.

The model itself says how it calls its blocks: one run in which every block only notes its arguments and hands its input on
gives masks, positions and whatever else differs from block to block, without a line about any architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from halfbyte.calibration.moments import Moment
from halfbyte.calibration.weights import is_quantizable, replaced_forward, watched
from halfbyte.errors import QuantizationError


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder blocks: the longest list of the classes the model itself names as its blocks.

    Raises:
        QuantizationError: there is none.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and (not named or all(type(block).__name__ in named for block in module))
        and any(is_quantizable(layer) for layer in module.modules())
    ]
    if not lists:
        raise QuantizationError(
            f"calibrate: {type(model).__name__} has no nn.ModuleList of decoder blocks with linear layers"
            + (f" (looked for {', '.join(sorted(named))})" if named else ""),
            names=(),
        )
    # Of equals the outermost: named_modules yields parents first.
    return max(lists, key=lambda item: sum(is_quantizable(m) for m in item[1].modules()))


class _Enough(Exception):  # noqa: N818 - not an error
    """Raised inside a forward whose rest is not needed."""


@dataclass(frozen=True)
class Call:
    """How the model calls one block, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None  # of the hidden states; None: the first positional argument

    def __call__(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Runs the block on hidden states (batch, tokens, width)."""
        if self.keyword is None:
            return first_of(block(hidden, *self.args, **self.kwargs))
        return first_of(block(*self.args, **{**self.kwargs, self.keyword: hidden}))


def first_of(output: Any) -> Tensor:
    """The hidden states among what a block returns."""
    return output if isinstance(output, Tensor) else output[0]


def record_calls(model: nn.Module, blocks: Sequence[nn.Module], ids: Tensor) -> tuple[Tensor, list[Call]]:
    """What enters the first block for token ids (batch, tokens), and how each block is called. Only the first one runs.

    Raises:
        NotImplementedError: the model does not run its blocks once each, in order, on a tensor.
    """
    entering: list[Tensor] = []
    calls: list[Call] = []

    def recorder(index: int, block: nn.Module) -> Callable[..., Any]:
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            keyword = None if args and isinstance(args[0], Tensor) else "hidden_states"
            hidden = args[0] if keyword is None else kwargs.get("hidden_states")
            if index != len(calls) or not isinstance(hidden, Tensor):
                raise NotImplementedError(
                    f"calibrate: {type(model).__name__} does not call its blocks once each, in order, with hidden states "
                    f"(call {len(calls)} went to block {index})"
                )
            rest = {name: value for name, value in kwargs.items() if name != keyword}
            calls.append(Call(args[1:] if keyword is None else args, rest, keyword))
            if index == 0:
                entering.append(hidden)
                like = original(*args, **kwargs)
                shapes.append(like[1:] if isinstance(like, tuple) else None)
            if index == len(blocks) - 1:
                raise _Enough
            return hidden if shapes[0] is None else (hidden, *shapes[0])

        return forward

    shapes: list[Any] = []
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.enter_context(replaced_forward(block, recorder(index, block)))
        try:
            model(input_ids=ids, use_cache=False)
        except _Enough:
            return entering[0], calls
    raise NotImplementedError(f"calibrate: {type(model).__name__} did not call all of its {len(blocks)} blocks")


def collect_moments(
    block: nn.Module, layers: dict[str, nn.Module], batches: Iterator[tuple[Call, Tensor]]
) -> tuple[dict[str, Moment], dict[str, str]]:
    """Second moments of what reaches the weights of a block, and for each weight the name of the one it shares them with.

    A weight nothing reached is in neither. Weights that multiply the same tensor share; should two that did so part later,
    the sharer is taken to have seen what the other saw.
    """
    moments: dict[str, Moment] = {}
    shared: dict[str, str] = {}
    seen: list[tuple[Tensor, str]] = []  # inputs of the running batch: kept, so that no other tensor gets their place
    order: list[str] = []
    last: str | None = None

    def note(name: str, input: Tensor) -> None:
        order.append(name)
        owner = next((other for tensor, other in seen if tensor is input), None)
        if owner is None or shared.get(name, owner) != owner:
            owner = name
            if name not in moments:
                moments[name] = Moment(input.shape[-1], input.device)
            moments[name].add(input)
            seen.append((input, name))
        shared.setdefault(name, owner)
        if name == last:
            raise _Enough

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(watched(name, layer, note))
        for call, hidden in batches:
            seen.clear()
            order.clear()
            try:
                call(block, hidden)
            except _Enough:
                continue
            if last is None and sorted(order) == sorted(layers):  # each once: what follows the last is not needed again
                last = order[-1]
        seen.clear()
    return moments, shared
