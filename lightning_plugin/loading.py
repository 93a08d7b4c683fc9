"""load_from_checkpoint: Lightning's own, under the format the checkpoint was made with."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.embedding import QuantEmbedding, quantize_embedding_
from halfbyte.nn.init import entered
from halfbyte.nn.linear import dequantize_linear_, quantize_linear_
from halfbyte.nn.packed import PackedRows, as_dtype
from halfbyte.nn.settings import InitSettings
from halfbyte.nn.skip import mark_dense
from lightning_plugin.distribution import LightningModule
from lightning_plugin.precision import HalfbytePrecision, cast_trainable_
from lightning_plugin.resume import layout_of, packed_formats

__all__ = ["load_from_checkpoint"]

_Module = TypeVar("_Module", bound=LightningModule)


def load_from_checkpoint(module_class: type[_Module], path: str | Path, **kwargs: Any) -> _Module:
    """`LightningModule.load_from_checkpoint` for a checkpoint with packed weights.

    Lightning builds the module without any precision plugin; here it is built under `init_quantized` with what the
    checkpoint says. Which layers are packed, and in which format, is then made equal to the checkpoint layer by layer, so
    packed rows and dense weights arrive unchanged.

    Args:
        module_class: the LightningModule's class.
        path: a local checkpoint file.
        **kwargs: as for Lightning's method: `map_location`, `hparams_file`, `strict`, `weights_only`, and arguments that
            override the saved hyperparameters.

    Returns:
        The module with the checkpoint's values, on `map_location` or the devices they were saved from.

    Raises:
        QuantizationError: the checkpoint has no packed weight, or packs a layer that the module has not as a linear or
            embedding.
        TypeError: `module_class` is not a LightningModule class of the Lightning distribution in use.

    Note:
        `compute_dtype` and `trainable_dtype` are part of a full checkpoint only, not of one with `save_weights_only`.

    Example:
        >>> import lightning.pytorch as L, torch, tempfile, os
        >>> from lightning_plugin import HalfbytePrecision, load_from_checkpoint
        >>> class Module(L.LightningModule):
        ...     def configure_model(self):
        ...         self.fc = torch.nn.Linear(64, 64)
        ...     def predict_step(self, batch, index):
        ...         return self.fc(batch)
        >>> trainer = L.Trainer(plugins=HalfbytePrecision("nf4"), accelerator="cpu", logger=False, barebones=True)
        >>> _ = trainer.predict(Module(), [torch.zeros(1, 64)])
        >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
        >>> trainer.save_checkpoint(path)
        >>> type(load_from_checkpoint(Module, path).fc).__name__
        'QuantLinear'
    """
    if not (isinstance(module_class, type) and issubclass(module_class, LightningModule)):
        raise TypeError(
            f"load_from_checkpoint: module_class must be a class derived from {LightningModule.__module__}."
            f"{LightningModule.__qualname__}, got {module_class!r}"
        )
    # mmap: only the pickled structure is read here, the weights once, by Lightning.
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=kwargs.get("weights_only"))
    state_dict: Mapping[str, Any] = checkpoint["state_dict"]
    saved: dict[str, Any] = checkpoint.get(HalfbytePrecision.__qualname__, {})
    formats = packed_formats(state_dict)
    if not formats:
        raise QuantizationError(
            f"load_from_checkpoint: {path} has no packed weight; load it with {module_class.__name__}.load_from_checkpoint"
        )
    # Mixed formats: the commonest one is built at once, the others are put right before the values arrive.
    names = list(formats.values())
    settings = InitSettings(max(set(names), key=names.count), saved.get("skip"), saved.get("compute_dtype"))
    trainable = as_dtype("trainable_dtype", saved.get("trainable_dtype"))
    with entered(settings), _before_loading(module_class, formats, settings.compute_dtype, trainable):
        return module_class.load_from_checkpoint(path, **kwargs)


@contextmanager
def _before_loading(
    module_class: type[LightningModule],
    formats: Mapping[str, str],
    compute_dtype: torch.dtype | None,
    trainable_dtype: torch.dtype | None,
) -> Iterator[None]:
    """Lets the module built on this thread take the checkpoint's layout when Lightning calls its `load_state_dict`."""
    original, thread = module_class.load_state_dict, threading.get_ident()
    own = "load_state_dict" in vars(module_class)

    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            _take_layout(self, state_dict, formats, compute_dtype)
            if trainable_dtype is not None:
                cast_trainable_(self, trainable_dtype)
        return original(self, state_dict, *args, **kwargs)

    module_class.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            module_class.load_state_dict = original  # type: ignore[method-assign]
        else:
            del module_class.load_state_dict


def _take_layout(
    module: nn.Module, state_dict: Mapping[str, Any], formats: Mapping[str, str], compute_dtype: torch.dtype | None
) -> None:
    """Makes the layers of `module` packed or dense as in `state_dict`; their values are about to be replaced."""
    layers = dict(module.named_modules())
    for name in layout_of(module, state_dict).dense_in_checkpoint:
        layer, value = layers[name], state_dict[f"{name}.weight"]
        if isinstance(layer, QuantEmbedding):
            raise QuantizationError(
                f"load_from_checkpoint: {name} is packed by the module and dense in the checkpoint", [name]
            )
        empty = torch.empty(value.shape, dtype=value.dtype, device=layer.weight.device)
        mark_dense(dequantize_linear_(layer, nn.Parameter(empty)), "dense in the checkpoint")
    for name, text in formats.items():
        layer, format = layers.get(name), Format.parse(text)
        if isinstance(layer, PackedRows):
            if layer.format != format:
                layer.format = format
                size = (layer.weight_shape[0], format.row_bytes(layer.weight_shape[1]))
                rows = torch.empty(size, dtype=torch.uint8, device=layer.weight.device)
                layer.weight = nn.Parameter(rows, requires_grad=False)
        elif isinstance(layer, nn.Linear):
            quantize_linear_(layer, format, compute_dtype)
        elif isinstance(layer, nn.Embedding):
            quantize_embedding_(layer, format, compute_dtype)
        elif layer is not None:
            raise QuantizationError(
                f"load_from_checkpoint: {name} is packed in the checkpoint, the module has a {type(layer).__name__} there",
                [name],
            )
