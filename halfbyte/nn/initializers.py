"""Initializers that models run on their weights, made to work on packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfbyte.nn.settings import on_dense, owner_of


class Initializers(TorchFunctionMode):
    """Runs in-place arithmetic on packed rows (`weight.data.normal_(0, 0.02)`, `nn.init.*`) on a temporary dense weight.

    Without it torch raises "not implemented for 'Byte'", or, for `zero_` and `fill_`, silently writes nonsense.
    """

    # In-place methods that don't touch values.
    _STRUCTURAL = frozenset({"requires_grad_", "detach_", "share_memory_", "set_", "resize_", "retains_grad_"})

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if not isinstance(target, Tensor) or target.dtype != torch.uint8:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        initializer = getattr(func, "__module__", None) == "torch.nn.init"
        in_place = name.endswith("_") and not name.startswith("__") and name not in self._STRUCTURAL
        if not (initializer or in_place or name in ("__imul__", "__iadd__", "__isub__", "__itruediv__", "__setitem__")):
            return func(*args, **kwargs)
        if target.is_meta:
            return target  # no values to draw
        source = args[1] if len(args) > 1 else None
        if name == "copy_" and isinstance(source, Tensor) and source.dtype == torch.uint8:
            return func(*args, **kwargs)  # packed rows into packed rows
        owner = owner_of(target)
        if owner is None:
            return func(*args, **kwargs)
        if target.shape != owner.module.get_parameter(owner.name).shape:
            raise TypeError(
                f"init_quantized: {name} on part of the packed rows of {owner.module}; initialize the whole weight, "
                f"or build this layer outside the context"
            )
        if args:
            on_dense(owner, lambda dense: func(dense, *args[1:], **kwargs))
        else:
            on_dense(owner, lambda dense: func(**{**kwargs, "tensor": dense}))
        return target
