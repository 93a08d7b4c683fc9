"""Tensor parallelism: packed rows shared out among ranks, as torch's ColwiseParallel shares the rows of a dense weight.

Each rank holds whole rows, computes the outputs that belong to them, and gives back a DTensor that is sharded like them.
A plan that cuts inside rows can't be: a row's codes and scales are one unit of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte.optim.sharding import first_row, rows_are_whole

__all__ = ["embed_sharded", "linear_sharded", "refuse_cut_rows"]


def refuse_cut_rows(module: Any, weight: Any) -> None:
    """Called when a packed module is given a DTensor, by `parallelize_module` and by FSDP2.

    Raises:
        NotImplementedError: the tensor is sharded inside its rows; the text names what works.
    """
    if rows_are_whole(weight):
        return
    rows, columns = module.weight_shape
    advice = (
        "RowwiseParallel, which shares an embedding's rows"
        if isinstance(module, torch.nn.Embedding)
        else "ColwiseParallel, which shares a linear layer's rows (its output features), or leave it out of the plan"
    )
    raise NotImplementedError(
        f"halfbyte: {module} can't be sharded as {weight.placements}: that would cut each of its {rows} rows of {columns} "
        f"weights through packed codes and scales. Use {advice}"
    )


def linear_sharded(
    input: Tensor, weight: Any, bias: Any, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Tensor:
    """A linear layer whose rows are a DTensor.

    Args:
        input: DTensor on the weight's mesh, shape (..., K).
        weight: packed rows, DTensor of shape (N, row_bytes); on every mesh dimension sharded by rows or replicated.
        bias: DTensor of shape (N,) with the weight's placements, or None.
        compute: the layer on this rank's tensors.

    Returns:
        DTensor of shape (..., N): sharded on its last dimension where the weight is sharded; elsewhere as the input.

    Raises:
        TypeError: `input` is a plain tensor: whether it is replicated or one rank's share can't be known.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not isinstance(input, DTensor):
        raise TypeError(
            f"QuantLinear: the layer is sharded over {weight.device_mesh}, so its input must be a DTensor, got a "
            f"{type(input).__name__}; torch.distributed.tensor.parallel.parallelize_module makes it one"
        )
    last = input.dim() - 1
    placed: list[tuple[Any, Any, Any, Any]] = []  # of the input, its gradient, the bias's gradient, the output
    for rows, given in zip(weight.placements, input.placements, strict=True):
        if not rows.is_replicate():  # each rank has part of the sum over output features
            placed.append((Replicate(), Partial(), rows, Shard(last)))
        elif given.is_replicate() or getattr(given, "dim", last) == last:
            placed.append((Replicate(), Replicate(), Replicate(), Replicate()))
        else:
            placed.append((given, given, Partial(), given))
    inputs, input_grads, bias_grads, outputs = zip(*placed, strict=True)
    local = compute(
        input.redistribute(placements=inputs).to_local(grad_placements=input_grads),
        weight.to_local(),
        None if bias is None else bias.to_local(grad_placements=bias_grads),
    )
    return _whole(local, weight, outputs, (*input.shape[:-1], weight.shape[0]))


def embed_sharded(indices: Tensor, weight: Any, compute: Callable[[Tensor, Tensor], Tensor], columns: int) -> Tensor:
    """An embedding whose rows are a DTensor: each rank looks up the rows it has, the others count as zeros.

    Args:
        indices: shape (...), a replicated DTensor or the same plain tensor on every rank.
        weight: packed rows, DTensor of shape (V, row_bytes).
        compute: the lookup in this rank's rows.
        columns: K, elements of a row before packing.

    Returns:
        DTensor of shape (..., K), partial (to be summed) where the weight is sharded.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Replicate()] * weight.device_mesh.ndim
    if isinstance(indices, DTensor):
        indices = indices.redistribute(placements=placements).to_local()
    rows = weight.to_local()
    own = indices - first_row(weight)
    outside = (own < 0) | (own >= rows.shape[0])
    if rows.shape[0]:
        local = compute(own.masked_fill(outside, 0), rows).masked_fill(outside.unsqueeze(-1), 0.0)
    else:  # a rank without a row has nothing to look up, only the shape
        local = compute(torch.zeros_like(own), rows.new_zeros((1, rows.shape[1]))) * 0.0
    outputs = [Replicate() if p.is_replicate() else Partial() for p in weight.placements]
    return _whole(local, weight, outputs, (*indices.shape, columns))


def _whole(local: Tensor, weight: Any, placements: Any, shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return DTensor.from_local(
        local, weight.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )
