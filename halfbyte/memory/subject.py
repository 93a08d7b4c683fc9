"""What a plan is about: any model the user has, turned into a fake one that holds shapes and no data."""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.formats import Format
from halfbyte.memory.fold import Fold, fold_
from halfbyte.nn.experts import QuantExperts, dequantize_experts_
from halfbyte.nn.init import entered
from halfbyte.nn.linear import QuantLinear, dequantize_linear_
from halfbyte.nn.packed import Packed, PackedRows
from halfbyte.nn.settings import InitSettings
from halfbyte.nn.skip import SkipRules

__all__ = ["Subject", "like_transformers", "make_subject", "on_meta", "packed_bytes", "packed_parameters"]


@dataclass
class Subject:
    """A fake model and what a training step of it is.

    Attributes:
        model: its parameters and buffers are fake tensors on the device that is planned for.
        mode: the fake mode they belong to.
        device: that device.
        step: computes the loss of a batch.
        batch: makes a batch of (batch_size, seq_len); called inside the mode.
        optimizer: the model's own optimizers (a LightningModule's), or None.
        zero_grad_first: gradients of the last step live until the next backward (Lightning's order).
        name: what it is called in tables.
        folds: equal blocks that were taken out of the model.
    """

    model: nn.Module
    mode: FakeTensorMode
    device: torch.device
    step: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int, int], Any]
    optimizer: Callable[[], list[torch.optim.Optimizer]] | None
    zero_grad_first: bool
    name: str
    folds: list[Fold]


def make_subject(
    source: Any,
    *,
    format: str | Format | None,
    lora_rank: int | None,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    batch: Callable[[int, int], Any] | None,
    step: Callable[[nn.Module, Any], Tensor] | None,
    folded: bool = True,
) -> Subject:
    """A fake copy of a module, a LightningModule or the model that a folder's config.json describes.

    Raises:
        TypeError: `source` is none of them, or its parameters are of a foreign tensor class.
        ImportError: transformers (for a folder) or peft (for `lora_rank`) is missing.
    """
    dense = format == "dense"
    fmt = None if format is None or dense else Format.parse(format)
    name = type(source).__name__
    if isinstance(source, (str, os.PathLike)):
        model, name = _from_folder(Path(source), fmt, dense, dtype), Path(source).name
    elif isinstance(source, nn.Module):
        model = source
        if _is_lightning(source) and next(source.parameters(), None) is None:
            model = _configured(source, fmt)
    else:
        raise TypeError(f"plan: model_or_config must be a module or a folder with config.json, got {type(source).__name__}")
    where = _device(model, device)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    meta = torch.device("meta")
    with meta:
        model = _copy(model, meta)
        _set_format(model, fmt, dense)
        folds = fold_(model) if folded else []
        if lora_rank is not None:
            model = _with_lora(model, lora_rank)
    names = {module: name for name, module in model.named_modules()}
    with mode:
        fake = _copy(model, where)
    modules = dict(fake.named_modules())
    copied = [
        Fold(tuple(modules[names[m]] for m in fold.middle), modules[names[fold.after]], fold.extra) for fold in folds
    ]
    lightning = _is_lightning(fake)
    return Subject(
        model=fake.train(),
        mode=mode,
        device=where,
        step=step or (_training_step if lightning else _loss_of),
        batch=batch or (lambda rows, length: _tokens(rows, length, where)),
        optimizer=partial(_own_optimizers, fake) if lightning else None,
        zero_grad_first=lightning,
        name=name,
        folds=copied,
    )


def _is_lightning(module: nn.Module) -> Any:
    methods = ("training_step", "configure_model", "configure_optimizers")
    return all(callable(getattr(module, each, None)) for each in methods)


def _training_step(module: Any, batch: Any) -> Tensor:
    out = module.training_step(batch, 0)
    return out["loss"] if isinstance(out, dict) else out


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = out["loss"] if isinstance(out, dict) else getattr(out, "loss", out)
    return loss if loss.dim() == 0 else loss.float().mean()


def _tokens(rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


def _own_optimizers(module: Any) -> list[torch.optim.Optimizer]:
    return _optimizers(module.configure_optimizers())


def _optimizers(configured: Any) -> list[torch.optim.Optimizer]:
    """What `configure_optimizers` may return: one, a dict, a list of either, or (optimizers, schedulers)."""
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return [configured["optimizer"]]
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        configured = configured[0]
    return [each for entry in configured or () for each in _optimizers(entry)]


def _device(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is not None:
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("plan: device='cuda' needs a GPU that torch sees: autograd asks for it, tensors are fake")
        return torch.device(device)
    found = {p.device for p in model.parameters()} - {torch.device("meta")}
    return found.pop() if len(found) == 1 else torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- building without data ------------------------------------------------------------------------------------------


def on_meta(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The dense model that a folder's config.json describes, on meta; in its dtype unless another is given."""
    return _from_folder(folder, None, True, dtype)


def _from_folder(folder: Path, format: Format | None, dense: bool, dtype: torch.dtype | None) -> nn.Module:
    """The model that config.json describes, on meta; a quantization it names is applied unless another is asked for."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("plan: reading a model folder needs transformers; pip install transformers") from error
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"plan: model_or_config must be a folder with config.json, got {str(folder)!r}")
    config = transformers.AutoConfig.from_pretrained(folder)
    own = getattr(config, "quantization_config", None) or {}
    if format is None and not dense and own:
        if own.get("quant_method") != "halfbyte":
            raise NotImplementedError(
                f"plan: {folder.name} is quantized by {own.get('quant_method')!r}; name the format to plan for (format=)"
            )
        format = Format.parse(own["format"])
    config.quantization_config = None
    del config.quantization_config
    return _on_meta(lambda: _from_config(transformers, config, dtype), format)


def _from_config(transformers: Any, config: Any, dtype: torch.dtype | None) -> nn.Module:
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    names = getattr(config, "architectures", None) or ()
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if cls is not None:
        return cls._from_config(config, dtype=dtype)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _on_meta(build: Callable[[], nn.Module], format: Format | None) -> nn.Module:
    with torch.device("meta"):
        if format is None:
            return build()
        with entered(InitSettings(format, None, None)):
            return build()


def _configured(module: nn.Module, format: Format | None) -> nn.Module:
    """A LightningModule whose `configure_model` has run on meta; `from_pretrained` in it reads config.json alone."""
    module = copy.deepcopy(module)

    def build() -> nn.Module:
        with _reading_configs_only():
            module.configure_model()  # type: ignore[operator]
        return module

    return _on_meta(build, format)


@contextmanager
def _reading_configs_only() -> Iterator[None]:
    """Inside, transformers' `from_pretrained` builds the model of a config and reads no weights."""
    try:
        import transformers
    except ImportError:
        yield
        return
    owner: Any = transformers.PreTrainedModel
    original = owner.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, path: Any, *_: Any, config: Any = None, dtype: Any = None, **__: Any) -> Any:
        if not isinstance(config, transformers.PreTrainedConfig):
            config = transformers.AutoConfig.from_pretrained(config or path)
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype)
        model = cls._from_config(config, dtype=dtype or getattr(config, "dtype", None) or torch.float32)
        return model.eval()

    owner.from_pretrained = classmethod(from_pretrained)  # type: ignore[arg-type]
    try:
        yield
    finally:
        owner.from_pretrained = original


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
    except ImportError as error:
        raise ImportError("plan: lora_rank needs peft; pip install peft") from error
    config: Any = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    # Names instead: to "all-linear" PEFT adds the fused weights of experts, which are trained around if they are packed.
    return get_peft_model(model, _maybe_include_all_linear_layers(config, model))


# ---- empty copies ---------------------------------------------------------------------------------------------------


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy with empty tensors on a device: they are put into deepcopy's memo, so no data is ever read."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise TypeError(f"plan: parameter {name} is a {type(parameter).__name__}; plans are made of plain parameters")
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return copy.deepcopy(model, memo)


def _set_format(model: nn.Module, format: Format | None, dense: bool) -> None:
    """Makes every linear layer that can be packed `format`; "dense" turns packed ones back, trainable unless adapted."""
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, Packed)]
    if dense:
        adapted = any(name.endswith("base_layer") for name, _ in model.named_modules())  # PEFT freezes all the rest
        for _, module in named:
            if isinstance(module, QuantExperts):
                dequantize_experts_(module, module.dense_dtype).requires_grad_(not adapted)
            elif isinstance(module, QuantLinear):
                values = torch.empty(module.weight_shape, dtype=module.dense_dtype, device=module.weight.device)
                dequantize_linear_(module, nn.Parameter(values, requires_grad=not adapted))
            else:
                raise NotImplementedError(f"plan: format 'dense' can't replace a {type(module).__name__}")
    elif format is not None and named:
        for _, module in named:
            module.format = format
            for key, (*rows, columns) in _dense_shapes(module).items():
                device = module.get_parameter(key).device
                empty = torch.empty((*rows, format.row_bytes(columns)), dtype=torch.uint8, device=device)
                module._parameters[key] = nn.Parameter(empty, requires_grad=False)
    elif format is not None:
        from halfbyte.nn.convert import convert_layers_  # it imports this package for its Report

        convert_layers_(model, format, SkipRules(None).of_model(model), None, caller="plan")


def _dense_shapes(module: Packed) -> dict[str, tuple[int, ...]]:
    """Parameters that hold packed rows, and the shapes that they stand for."""
    if isinstance(module, QuantExperts):
        return dict(module.weight_shapes)
    assert isinstance(module, PackedRows)
    return {"weight": module.weight_shape}


def packed_parameters(model: nn.Module) -> dict[int, tuple[Format, tuple[int, ...]]]:
    """Format and dense shape of everything packed, by the parameter's id."""
    return {
        id(module.get_parameter(name)): (module.format, shape)
        for module in model.modules()
        if isinstance(module, Packed)
        for name, shape in _dense_shapes(module).items()
    }


def packed_bytes(subject: Subject, format: Format | None) -> int:
    """Bytes of all packed weights of the whole model, in a format or (None) as they are."""
    times = {id(p): 1 + fold.extra for fold in subject.folds for module in fold.middle for p in module.parameters()}
    return sum(
        math.prod(rows) * (format or own).row_bytes(columns) * times.get(key, 1)
        for key, (own, (*rows, columns)) in packed_parameters(subject.model).items()
    )


@contextmanager
def like_transformers() -> Iterator[None]:
    """Inside, transformers treats fake tensors as real ones.

    It builds explicit attention masks and repeats keys for what it takes to be a tracer's tensor: memory that a real step
    does not take. And torch has a fake of the grouped product of experts for bfloat16 only; for other dtypes transformers'
    own stands in, which takes the same.
    """
    changed: list[tuple[Any, str, Any]] = []
    for module, name, stand_in in (
        ("transformers.utils.import_utils", "is_fake_tensor", lambda _: False),
        ("transformers.integrations.moe", "_can_use_grouped_mm", lambda _, weight, __: weight.dtype == torch.bfloat16),
    ):
        owner = sys.modules.get(module)
        if hasattr(owner, name):
            changed.append((owner, name, getattr(owner, name)))
            setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, original in changed:
            setattr(owner, name, original)
