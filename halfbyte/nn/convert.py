"""quantize_model: an existing dense model, layer by layer, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.attention import adapt_attention
from halfbyte.nn.embedding import quantize_embedding_
from halfbyte.nn.experts import expert_weights, quantize_experts_
from halfbyte.nn.linear import checked_activations, quantize_linears_
from halfbyte.nn.linear_classes import linear_shape
from halfbyte.nn.packed import Packed, as_dtype
from halfbyte.nn.report import Report, report
from halfbyte.nn.skip import SkipRules, mark_dense, tell_config


def quantize_model(
    model: nn.Module,
    format: str | Format = "nf4",
    *,
    skip: Iterable[str] | None = None,
    compute_dtype: torch.dtype | str | None = None,
    embedding_format: str | Format | None = None,
    activations: str | None = None,
    progress: bool = False,
) -> Report:
    """Quantizes the linear layers of a model where they stand; dense weights are released as their rows are made.

    Small neighbours are packed by one call (up to 64 MiB of dense weights on a GPU, 1 MiB on a CPU).

    Modules keep their identity (hooks, references, names); their class becomes `QuantLinear`. Layers that are quantized
    already stay as they are, so calling it twice changes nothing.

    Args:
        model: any module, also a single `nn.Linear`; on meta only shapes change.
        format: a `Format` or its name, for the linear layers.
        skip: names that stay dense, as dotted runs ("lm_head", "layers.1"); None: the output embedding. Tied modules,
            subclasses of `nn.Linear` (but Falcon's), `_keep_in_fp32_modules` and layers whose owner reads the weight
            directly always do.
        compute_dtype: see `QuantLinear`.
        embedding_format: a format for `nn.Embedding` tables that are not tied; None leaves them dense.
        activations: see `QuantLinear`.
        progress: show a progress bar (needs tqdm).

    Returns:
        The `Report` of the model: what is packed, what stayed dense and why.

    Raises:
        QuantizationError: nothing in the model could be quantized; the text lists the reasons.
        ValueError: unknown format, compute dtype or `activations`.
        NotImplementedError: `activations` with a format that it does not go with.
        TypeError: `skip` is a plain string.

    Example:
        >>> import torch, halfbyte
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        >>> halfbyte.quantize_model(model, skip=("2",)).quantized
        ('0',)
    """
    fmt = Format.parse(format)
    table_format = None if embedding_format is None else Format.parse(embedding_format)
    reasons = SkipRules(skip).of_model(model)
    dtype = as_dtype("compute_dtype", compute_dtype)
    checked_activations(activations, fmt)
    convert_layers_(model, fmt, reasons, dtype, table_format, activations=activations, progress=progress)
    return report(model)


def convert_layers_(
    model: nn.Module,
    format: Format,
    reasons: Mapping[nn.Module, str],
    compute_dtype: torch.dtype | None,
    table_format: Format | None = None,
    *,
    activations: str | None = None,
    progress: bool = False,
    caller: str = "quantize_model",
) -> None:
    """`quantize_model` with the modules that stay dense given, each with its reason."""
    layers = [
        (n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding) or linear_shape(m) or expert_weights(m)
    ]

    def linears() -> Iterator[nn.Module]:
        """The linear layers; what lies between them is converted here."""
        for _, module in _with_progress(layers, progress):
            if isinstance(module, Packed):
                continue
            if module in reasons:
                if not isinstance(module, nn.Embedding) or table_format is not None:
                    mark_dense(module, reasons[module])
            elif linear_shape(module):
                yield module
            elif expert_weights(module):
                quantize_experts_(module, format, compute_dtype)
            elif table_format is not None and module.max_norm is None:
                quantize_embedding_(module, table_format, None)  # it computes nothing: rows come as the table's dtype
            elif table_format is not None:
                mark_dense(module, "max_norm rewrites its rows during forward")

    quantize_linears_(linears(), format, compute_dtype, activations)
    if not any(isinstance(m, Packed) for m in model.modules()):
        raise nothing_quantized(model, caller)
    for module in model.modules():
        tell_config(module)
        adapt_attention(module)


def nothing_quantized(model: nn.Module, caller: str) -> QuantizationError:
    """The error for a model that was to be quantized and has no packed module at all."""
    rows = [row for row in report(model).rows if row.reason]
    listed = "; ".join(f"{row.name}: {row.reason}" for row in rows[:5]) or "it has no nn.Linear"
    more = f" (and {len(rows) - 5} more)" if len(rows) > 5 else ""
    return QuantizationError(f"{caller}: nothing was quantized: {listed}{more}", names=[row.name for row in rows])


def _with_progress(layers: list[tuple[str, Any]], progress: bool) -> Iterator[tuple[str, Any]]:
    if not progress:
        yield from layers
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("quantize_model: progress=True needs tqdm; pip install tqdm") from error
    yield from tqdm(layers, desc="quantizing", unit="layer")
