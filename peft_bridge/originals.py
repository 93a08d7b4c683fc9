"""The weights that packed rows were made of, read again from the checkpoint that they were loaded from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from halfbyte.errors import QuantizationError
from halfbyte.nn.linear import QuantLinear
from halfbyte.nn.linear_classes import is_stored_transposed
from halfbyte.ops.quantize import FLOAT_DTYPES


class Originals:
    """The files of one checkpoint; names are those of the model, renamed by transformers' own rules.

    Args:
        files: as transformers resolved them; a model that came from a state dict has none.
        names: of the model's parameters.
        prefix: the model's `base_model_prefix`, which comes and goes with the head.
        conversions: what the load renamed and merged.
    """

    def __init__(self, files: list[str], names: list[str], prefix: str, conversions: list[Any]) -> None:
        self.files = [Path(file) for file in files]
        self._names, self._prefix, self._conversions = dict.fromkeys(names, True), prefix, conversions
        self._index: dict[str, tuple[Path, str]] | None = None

    def __deepcopy__(self, memo: Any) -> Originals:
        """Copies of a model were loaded from the same files."""
        return self

    def read(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> Tensor:
        """The weight called `name`.

        Args:
            name: full name of the parameter in the model.
            shape: (N, K) that it must have.
            transposed: the checkpoint holds it (K, N), as for `Conv1D`.

        Returns:
            Shape (N, K), float32, on the CPU.

        Raises:
            QuantizationError: the files are gone, don't hold it, or hold it packed.
        """
        missing = [file for file in self.files if not file.is_file()]
        if missing or not self.files:
            what = f"{missing[0]} is gone" if missing else "the model was not loaded from files"
            raise unavailable(name, what)
        if self._index is None:
            self._index = self._keys()
        if name not in self._index:
            raise unavailable(name, f"{self.files[0].parent} holds no single tensor for it")
        file, key = self._index[name]
        value = _tensor(file, key)
        if value.dtype not in FLOAT_DTYPES:
            raise unavailable(name, f"{file} holds it as {value.dtype}: the checkpoint is quantized itself")
        value = value.float().t().contiguous() if transposed else value.float()
        if tuple(value.shape) != shape:
            raise unavailable(name, f"{file} holds it with shape {tuple(value.shape)}, the model has {shape}")
        return value

    def _keys(self) -> dict[str, tuple[Path, str]]:
        renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in self._conversions if isinstance(each, WeightConverter)]
        found = {}
        for file in self.files:
            for key in _keys_of(file):
                name, converter = rename_source_key(key, renamings, converters, self._prefix, self._names)
                if converter is None:  # one that is merged or split has no single original
                    found[name] = (file, key)
        return found


def record_originals(model: PreTrainedModel, files: list[str] | None) -> None:
    """Called by the quantizer after loading: every packed layer remembers where its weight came from."""
    names = list(model.state_dict())
    conversions = list(getattr(model, "_weight_conversions", None) or ())
    origin = Originals(list(files or ()), names, model.base_model_prefix, conversions)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            module.__dict__["origin"] = (origin, f"{name}.weight")


def original_weight(layer: QuantLinear) -> Tensor:
    """The dense weight that a packed layer was made of, (N, K) float32 on the layer's device.

    Raises:
        QuantizationError: it can't be read again; the message says why and names `load_model(lora=)`.
    """
    if "origin" not in layer.__dict__:
        raise unavailable("the layer's weight", "the model was not loaded by from_pretrained")
    origin, name = layer.__dict__["origin"]
    weight: Tensor = origin.read(name, layer.weight_shape, transposed=is_stored_transposed(layer))
    return weight.to(layer.weight.device)


def unavailable(name: str, what: str) -> QuantizationError:
    """The error for an original that can't be had."""
    return QuantizationError(
        f"PiSSA, OLoRA and LoftQ decompose the original weight, which packed rows don't hold, and it can't be read again: "
        f"{name}: {what}. Load and adapt in one step from the dense checkpoint: "
        f"peft_bridge.load_model(path, format, lora=LoraConfig(...)). If the base is a saved residual already, set "
        f'"init_lora_weights": true in the adapter_config.json of its adapter',
        [name],
    )


def _keys_of(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    return list(_pickled(file))


def _tensor(file: Path, key: str) -> Tensor:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            value: Tensor = opened.get_tensor(key)
            return value
    return _pickled(file)[key]


def _pickled(file: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return state


def decompose(weight: Tensor, layer: QuantLinear, config: Any, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    r"""The adapters that PiSSA, OLoRA or LoftQ start with; the base is to hold :math:`W - s B A`.

    PiSSA: the leading singular vectors, :math:`s B A = \mathrm{svd}_r(W)`. OLoRA: the first r columns of Q and rows of R in
    :math:`W = Q R`, as PEFT has it. LoftQ alternates :math:`Q = q(W - s B A)` and :math:`s B A = \mathrm{svd}_r(W - Q)` with
    the layer's own format as q. The same numbers for the same arguments: a reload decomposes again.

    Args:
        weight: the original, shape (N, K) float32.
        layer: for LoftQ, what quantizes; its rows change.
        config: the `peft.LoraConfig`.
        rank: r.
        scaling: s, which PEFT multiplies B A by.

    Returns:
        A, shape (r, K), and B, shape (N, r), both float32.

    Source:
        PiSSA, Meng et al. 2024, arXiv:2404.02948. OLoRA, Bueyuekakyuez 2024, arXiv:2406.01775. LoftQ, Li et al. 2023,
        arXiv:2310.08659.
    """
    initializer = config.init_lora_weights.lower()
    if initializer == "olora":
        Q, R = torch.linalg.qr(weight)
        return R[:rank], Q[:, :rank]
    if initializer.startswith("pissa_niter_"):
        with torch.random.fork_rng(devices=[]):  # it draws numbers
            torch.manual_seed(0)
            U, S, V = torch.svd_lowrank(weight, rank, niter=int(initializer.removeprefix("pissa_niter_")))
        return _balanced((U, S, V.t()), rank, scaling)
    if initializer == "pissa":
        return _balanced(torch.linalg.svd(weight, full_matrices=False), rank, scaling)
    A, B = weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(weight.shape[0], rank)
    for _ in range(config.loftq_config.get("loftq_iter", 1)):
        layer.quantize_(weight - scaling * (B @ A))
        left = torch.linalg.svd(weight - layer.dequantize(torch.float32), full_matrices=False)
        A, B = _balanced(left, rank, scaling)
    return A, B


def _balanced(svd: Sequence[Tensor], rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    U, S, Vh = svd
    root = (S[:rank] / scaling).sqrt()
    return root[:, None] * Vh[:rank], U[:, :rank] * root
