"""offload: state in host memory, streamed through the device in double-buffered chunks during the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfbyte.optim.sharding import local
from halfbyte.optim.work import Moment, State, Work

CHUNK_BYTES = 32 << 20
"""State that is on the device at a time, per buffer: long enough to reach the bus's rate, small against any GPU."""


def to_host(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` in host memory, pinned if the parameter's `device` is a GPU."""
    host = tensor.detach().to("cpu")
    return host.pin_memory() if device.type == "cuda" else host


@dataclass
class Chunk:
    """Some whole rows of one parameter: views of its local tensors.

    Attributes:
        index: the parameter's place in the work.
        param: rows of the parameter.
        grad: the same rows of the gradient.
        host: rows of every state tensor, by key, in host memory.
        offset: index of the first element in the optimizer.
    """

    index: int
    param: Tensor
    grad: Tensor
    host: dict[str, Tensor]
    offset: int


def chunks(work: Work, moments: tuple[Moment, ...], chunk_bytes: int) -> Iterator[list[Chunk]]:
    """Splits the work into lists of chunks of about `chunk_bytes` of state each, in order."""
    batch: list[Chunk] = []
    size = 0
    for i, param in enumerate(work.params):
        state = {k: local(work.states[i][k]) for m in moments for k in (m.codes, m.scales)}
        rows = param.shape[0] if param.dim() > 1 else 1
        total = sum(t.numel() * t.element_size() for t in state.values())
        if rows == 0 or total == 0:
            continue
        per_chunk = max(1, rows * chunk_bytes // total)
        for start in range(0, rows, per_chunk):
            end = min(start + per_chunk, rows)
            # A 1-D parameter is one row: its codes are cut nowhere and its scales have one row.
            part = slice(start, end) if param.dim() > 1 else slice(None)
            offset = work.offsets[i] + start * (param.numel() // rows) if work.offsets else 0
            batch.append(Chunk(i, param[part], work.grads[i][part], {k: t[part] for k, t in state.items()}, offset))
            size += total * (end - start) // rows
            if size >= chunk_bytes:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def step_streamed(
    work: Work,
    moments: tuple[Moment, ...],
    device: torch.device,
    run: Callable[[Work], None],
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Runs `run` on pieces of the work with their state copied to `device`, and copies it back.

    While one chunk is updated, the next one's state comes in and the previous one's goes out on a second stream. The
    host waits for the last copy out: the state is complete when the step returns.

    Args:
        work: parameters and gradients on `device`, state in host memory.
        moments: the rule's moments.
        device: where `run` computes.
        run: one op call; must not keep its work.
        chunk_bytes: state per chunk.
    """
    streamed = device.type == "cuda"
    copies = torch.cuda.Stream(device) if streamed else None
    compute = torch.cuda.current_stream(device) if streamed else None

    def on_copies() -> Any:
        return torch.cuda.stream(copies) if copies is not None else nullcontext()

    def bring(batch: list[Chunk]) -> tuple[list[State], Any]:
        with on_copies():
            states: list[State] = [
                {k: t.to(device, non_blocking=True) if streamed else t.clone() for k, t in chunk.host.items()}
                for chunk in batch
            ]
            return states, copies.record_event() if copies is not None else None

    def send(batch: list[Chunk], states: list[State], ready: Any) -> None:
        with on_copies():
            if copies is not None:
                copies.wait_event(ready)
            for chunk, state in zip(batch, states, strict=True):
                for key, host in chunk.host.items():
                    host.copy_(state[key], non_blocking=streamed)

    if copies is not None and compute is not None:
        copies.wait_stream(compute)  # the previous step's copies and anything that wrote the state
    batches = chunks(work, moments, chunk_bytes)
    upcoming = next(batches, None)
    brought = bring(upcoming) if upcoming is not None else None
    while upcoming is not None and brought is not None:
        batch, (states, arrived) = upcoming, brought
        upcoming = next(batches, None)
        brought = bring(upcoming) if upcoming is not None else None
        if compute is not None:
            compute.wait_event(arrived)
            for state in states:
                for tensor in state.values():
                    tensor.record_stream(compute)
        steps = work.steps if len(work.steps) == 1 else [work.steps[chunk.index] for chunk in batch]
        run(
            replace(
                work,
                params=[chunk.param for chunk in batch],
                grads=[chunk.grad for chunk in batch],
                states=states,
                steps=steps,
                offsets=[chunk.offset for chunk in batch] if work.offsets else [],
            )
        )
        send(batch, states, compute.record_event() if compute is not None else None)
    if copies is not None:
        copies.synchronize()  # the host may read the state as soon as the step returns (state_dict, checkpoints)
