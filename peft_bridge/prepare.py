"""prepare_model: what has to happen between loading a packed model and training adapters on it."""

from __future__ import annotations

from typing import Any

from torch import nn

from halfbyte.nn.packed import Packed


def prepare_model(model: nn.Module, *, gradient_checkpointing: bool = True) -> nn.Module:
    """Freezes the base model and turns on gradient checkpointing; nothing is cast and nothing grows.

    PEFT's `prepare_model_for_kbit_training` upcasts embeddings and norms to float32, which with a large vocabulary takes
    more memory than a 16-bit model; here every parameter keeps its dtype. Parameters that were not in the checkpoint (fresh
    heads) and adapters that exist already stay trainable.

    Args:
        model: a transformers model with packed layers, before or after `get_peft_model`.
        gradient_checkpointing: checkpoint non-reentrantly, let the input embeddings require grad and put the model in
            training mode (in eval mode, in which `from_pretrained` returns it, transformers skips checkpointing).

    Returns:
        The same model.

    Raises:
        TypeError: the model has no packed layer, or can't checkpoint (no `activation_checkpointing_enable`).
    """
    if not any(isinstance(module, Packed) for module in model.modules()):
        raise TypeError(f"prepare_model: model must have packed layers, {type(model).__name__} has none")
    if not any(_is_adapter(module) for module in model.modules()):
        fresh: frozenset[str] = getattr(model, "_halfbyte_fresh", frozenset())  # recorded by the quantizer
        for name, parameter in model.named_parameters():
            if name not in fresh:
                parameter.requires_grad_(False)
    if gradient_checkpointing:
        enable: Any = getattr(model, "activation_checkpointing_enable", None)
        if enable is None:
            raise TypeError(
                f"prepare_model: {type(model).__name__} has no activation_checkpointing_enable; "
                f"pass gradient_checkpointing=False"
            )
        enable(activation_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()  # type: ignore[operator]
        model.train()
    return model


def _is_adapter(module: nn.Module) -> bool:
    # By name: PEFT need not be installed.
    return any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__)
