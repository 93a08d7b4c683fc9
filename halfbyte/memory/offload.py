"""offload_activations: what backward needs waits in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["offload_activations"]


@contextmanager
def offload_activations(model: nn.Module, *, min_bytes: int = 1 << 20, pin_memory: bool = False) -> Iterator[None]:
    """Inside, tensors that autograd saves for backward move to host memory, and back when backward asks for them.

    `torch.autograd.graph.save_on_cpu` without its cost for quantized models: parameters, packed rows among them, stay where
    they are, and so does what is too small to be worth two copies.

    Args:
        model: its parameters and buffers are never moved.
        min_bytes: smaller tensors stay.
        pin_memory: copy to pinned memory, which is faster and needs as much of it.

    Raises:
        ValueError: `min_bytes` is negative.

    Note:
        Values are unchanged. Tensors that are on the CPU already stay as they are.

    Example:
        >>> import torch, halfbyte.memory
        >>> layer = torch.nn.Linear(8, 8)
        >>> with halfbyte.memory.offload_activations(layer):
        ...     loss = layer(torch.ones(1, 8)).sum()
        >>> loss.backward()
    """
    if min_bytes < 0:
        raise ValueError(f"offload_activations: min_bytes must not be negative, got {min_bytes}")
    kept = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
        small = tensor.numel() * tensor.element_size() < min_bytes
        if small or _on_host(tensor) or tensor.untyped_storage()._cdata in kept:
            return tensor
        return tensor.device, _to_host(tensor, pin_memory)

    def unpack(packed: tuple[torch.device, Tensor] | Tensor) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], non_blocking=pin_memory)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _to_host(tensor: Tensor, pin_memory: bool) -> Tensor:
    if not pin_memory:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
