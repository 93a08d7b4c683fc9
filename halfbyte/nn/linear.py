"""QuantLinear: an `nn.Linear` whose weight is packed rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import Format
from halfbyte.nn.batches import packed_weights
from halfbyte.nn.linear_classes import linear_shape, linear_weight
from halfbyte.nn.packed import PackedRows, as_dtype, dense_buffer
from halfbyte.nn.tensor_parallel import linear_sharded
from halfbyte.ops.fp8_linear import fp8_linear_by_id
from halfbyte.ops.int8_linear import int8_linear_by_id
from halfbyte.ops.linear import linear_by_id
from halfbyte.ops.lora_linear import lora_linear_by_id
from halfbyte.ops.quantize import FLOAT_DTYPES, describe
from halfbyte.optim.sharding import is_dtensor

# What multiplies when the input is quantized, by `activations`.
_ON_ACTIVATIONS = {"int8": int8_linear_by_id, "fp8": fp8_linear_by_id}

LoraBranch = tuple[Tensor, Tensor, float] | tuple[Tensor, Tensor, float, float]
"""What `QuantLinear.forward` takes as `lora`."""


class QuantLinear(PackedRows, nn.Linear):  # type: ignore[misc]  # weight: uint8 Parameter in both
    r"""Computes :math:`y = x W^T + b` with W quantized: frozen, packed, decoded while it is multiplied.

    It is an `nn.Linear`, so whatever looks for linear layers (PEFT, FSDP policies, `named_modules` filters) finds it.

    Args:
        in_features: K, size of each input row.
        out_features: N, size of each output row.
        bias: whether to add a bias, which stays dense and keeps its own dtype.
        format: a `Format` or its name.
        compute_dtype: dtype (or its name) that inputs and the bias are cast to for the product. None: the autocast dtype
            where autocast is active, else the input's dtype. The output does not follow it, see `forward`.
        activations: "int8" or "fp8", the format itself: quantizes each row of the input to it and multiplies the codes
            (`halfbyte.ops.int8_linear`, `halfbyte.ops.fp8_linear`); None multiplies the input as it is.
        device: where to put the parameters; on "meta" nothing is computed.
        dtype: dtype of the bias and of the dense weight this stands for; None: torch's default dtype.

    Attributes:
        weight: packed rows, shape (N, row_bytes) uint8, `requires_grad=False`.
        bias: shape (N,) of `dtype`, or None.
        format: the `Format` of the rows.
        activations: as given.

    Raises:
        ValueError: unknown format, compute dtype or `activations`.
        NotImplementedError: `activations` with another format than it works on.
        TypeError: `compute_dtype` is not a dtype, or forward was given integers or an unsupported dtype.

    Example:
        >>> import torch, halfbyte
        >>> layer = halfbyte.nn.QuantLinear(576, 1536, format="nf4")
        >>> layer(torch.zeros(2, 576)).shape, layer.weight.shape
        (torch.Size([2, 1536]), torch.Size([1536, 336]))

    Source:
        QLoRA, Dettmers et al. 2023, arXiv:2305.14314.
    """

    activations: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str | Format = "nf4",
        compute_dtype: torch.dtype | str | None = None,
        activations: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.activations = checked_activations(activations, Format.parse(format))
        self._init_packed(format, compute_dtype, dtype, device)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.out_features, self.in_features

    def reset_parameters(self) -> None:
        """Draws the weights `nn.Linear` would draw and quantizes them; on meta there is nothing to do."""
        if self.weight.is_meta:
            return
        dense = nn.Linear.__new__(nn.Linear)  # __init__ would draw before it is asked to
        nn.Module.__init__(dense)
        dense.in_features, dense.out_features = self.in_features, self.out_features
        dense.weight = nn.Parameter(dense_buffer(self.weight_shape, self.dense_dtype, self.weight.device))
        dense.bias = self.bias
        nn.Linear.reset_parameters(dense)
        self.quantize_(dense.weight)

    def forward(self, input: Tensor, lora: LoraBranch | None = None) -> Tensor:
        r"""Applies the layer, and a low-rank branch beside it where one is given: :math:`x W^T + b + s\,(x A^T) B^T`.

        The branch is an argument, not a method of its own, so that what wraps a call (FSDP1's gathering of the rows,
        checkpointing) surrounds the two as one autograd node.

        Args:
            input: x, shape (..., in_features), float32, bfloat16 or float16.
            lora: (A, B, s) or (A, B, s, p): A of shape (rank, in_features), float32, bfloat16 or float16; B of shape
                (out_features, rank) in A's dtype; the factor s; the probability p of dropout on the branch's input.
                `halfbyte.ops.lora_linear` says what is multiplied in what. None: no branch.

        Returns:
            Shape (..., out_features) in the dtype that a dense layer would return: the autocast dtype where autocast is
            active, else the input's. With a `compute_dtype` an input that has it keeps it, and any other comes back in
            the dtype that the layer was built with, so that it fits the dense layers around.

        Raises:
            TypeError: `input` is not of a floating dtype, or float64 without a `compute_dtype`.
            ValueError: A or B does not fit, or p is not from 0 to 1.
            NotImplementedError: `lora` is given, and the layer quantizes its activations or is tensor parallel.
        """
        parameters: dict[str, Any] = self._parameters  # nn.Module finds a name there too, but takes 0.6 us for each
        # FSDP1 and parametrizations keep them elsewhere, each by itself.
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401 - get() would look twice
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        sharded = is_dtensor(weight)
        if lora is not None and (sharded or self.activations is not None):
            raise NotImplementedError(
                f"QuantLinear: lora works on a layer with activations=None whose rows are all here, got activations="
                f"{self.activations!r} and a {type(weight).__name__}; add the branch to the layer's own output"
            )
        if sharded:
            return linear_sharded(input, weight, bias, self._compute)
        return self._compute(input, self.packed if self._contained else weight, bias, lora)

    def _compute(
        self, input: Tensor, packed: Tensor, bias: Tensor | None, lora: LoraBranch | None = None
    ) -> Tensor:
        return packed_linear(
            input,
            packed,
            bias,
            self.format,
            self.in_features,
            self.compute_dtype,
            self.dense_dtype,
            lora,
            self.activations,
        )

    @property
    def W_q(self) -> Tensor:  # noqa: N802 - PEFT's name
        """The packed rows under the name by which PEFT recognizes a weight that `dequantize()` decodes."""
        return self.packed

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: str | Format = "nf4",
        *,
        compute_dtype: torch.dtype | str | None = None,
        activations: str | None = None,
    ) -> QuantLinear:
        """A quantized copy of a dense layer; the bias parameter is shared with it.

        Args:
            linear: the dense layer, weight (N, K) in float32, bfloat16 or float16; on meta nothing is computed.
            format: a `Format` or its name.
            compute_dtype: as for the class.
            activations: as for the class.

        Raises:
            TypeError: `linear` is not an `nn.Linear`, or is quantized already.
            ValueError: unknown format, compute dtype or `activations`.
        """
        if not isinstance(linear, nn.Linear) or isinstance(linear, QuantLinear):
            raise TypeError(f"QuantLinear.from_linear: linear must be a dense nn.Linear, got {type(linear).__name__}")
        copy = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta").train(linear.training)
        copy._parameters["weight"] = linear._parameters["weight"]
        copy._parameters["bias"] = linear.bias
        return quantize_linear_(copy, Format.parse(format), as_dtype("compute_dtype", compute_dtype), activations)

    def extra_repr(self) -> str:
        """Sizes, bias, format, compute dtype and activations."""
        compute = f", compute_dtype={self.compute_dtype}" if self.compute_dtype else ""
        compute += f", activations={self.activations}" if self.activations else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}{compute}"
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and self.activations is not None:
            # For whoever rebuilds the module: the rows are the same with and without, so loading does not look at it.
            metadata[prefix[:-1]]["activations"] = self.activations

    def __setattr__(self, name: str, value: Any) -> None:
        # `head.weight = embedding.weight` is how models tie: the module then simply is dense.
        if (
            name == "weight"
            and isinstance(value, nn.Parameter)
            and value.is_floating_point()
            and not self._contained  # FSDP1 assigns its float32 views
            and tuple(value.shape) == self.weight_shape
        ):
            dequantize_linear_(self, value)
            return
        super().__setattr__(name, value)


def packed_linear(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    format: Format,
    in_features: int,
    compute_dtype: torch.dtype | None,
    dense_dtype: torch.dtype,
    lora: LoraBranch | None = None,
    activations: str | None = None,
) -> Tensor:
    """The product with packed rows in the compute dtype, see `in_compute_dtype` and `QuantLinear.forward`."""
    input, bias, apart, returned = in_compute_dtype(input, bias, compute_dtype, dense_dtype)
    if apart:
        with torch.autocast(input.device.type, enabled=False):
            output = packed_linear(input, packed, bias, format, in_features, None, dense_dtype, lora, activations)
    elif lora is not None:
        lora_A, lora_B, scaling, *dropout = lora
        p = dropout[0] if dropout else 0.0
        sizes = format.id, format.block_size, in_features
        output = lora_linear_by_id(input, packed, bias, lora_A, lora_B, scaling, p, [], *sizes)
    elif activations is not None:
        output = _ON_ACTIVATIONS[activations](input, packed, bias, in_features)
    else:
        output = linear_by_id(input, packed, bias, format.id, format.block_size, in_features)
    return output if output.dtype == returned else output.to(returned)


def in_compute_dtype(
    input: Tensor, bias: Tensor | None, compute_dtype: torch.dtype | None, dense_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, bool, torch.dtype]:
    """Input and bias in the compute dtype; None: the autocast dtype where autocast is active, else the input's.

    Returns:
        Input, bias, whether autocast has to be left for the product (an explicit compute_dtype wins over it), and the dtype
        that the result must have, see `QuantLinear.forward`.
    """
    autocast = None
    if torch._C._is_any_autocast_enabled():  # a third of the cost of asking for the device's
        device_type = input.device.type
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    elif compute_dtype is None and input.dtype in FLOAT_DTYPES and (bias is None or bias.dtype == input.dtype):
        return input, bias, False, input.dtype
    dtype = compute_dtype or autocast or input.dtype
    if not input.is_floating_point() or dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"QuantLinear: input must be float32, bfloat16 or float16 (or compute_dtype be set), got {describe(input)}"
        )
    returned = autocast or (input.dtype if compute_dtype in (None, input.dtype) else dense_dtype)
    if input.dtype != dtype:
        input = input.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    return input, bias, autocast is not None and autocast != dtype, returned


def checked_activations(activations: str | None, format: Format) -> str | None:
    """`activations` as `QuantLinear` takes it, if it goes with `format`."""
    if activations is None:
        return None
    if activations not in _ON_ACTIVATIONS:
        raise ValueError(f"activations must be None, 'int8' or 'fp8', got {activations!r}")
    if str(format) != activations:
        raise NotImplementedError(f"activations={activations!r} needs format={activations!r}, got format={str(format)!r}")
    return activations


def quantize_linear_(
    linear: nn.Module, format: Format, compute_dtype: torch.dtype | None, activations: str | None = None
) -> QuantLinear:
    """Turns a dense layer into a QuantLinear where it stands: hooks, names and references to the module stay valid.

    The layer is an `nn.Linear`, or a `Conv1D` of transformers, of whose transposed weight the rows are made. The dense
    weight is released as soon as its rows exist. Its `_is_hf_initialized` mark (set by transformers' loader) is handed on.
    """
    quantize_linears_((linear,), format, compute_dtype, activations)
    assert isinstance(linear, QuantLinear)
    return linear


def quantize_linears_(
    layers: Iterable[nn.Module], format: Format, compute_dtype: torch.dtype | None, activations: str | None = None
) -> None:
    """`quantize_linear_` of several layers, of which neighbours are packed by one call (`batches.py` says how many)."""
    checked_activations(activations, format)

    def dense(linear: nn.Module) -> Tensor:
        weight: Any = linear.weight
        return linear_weight(linear, weight.detach())

    for linear, packed in packed_weights(layers, dense, format):
        weight: Any = linear.weight
        shape = linear_shape(linear)
        assert shape is not None
        if type(linear) is not nn.Linear:
            linear.__dict__.update(dense_class=type(linear), out_features=shape[0], in_features=shape[1])
        linear._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
        if getattr(weight, "_is_hf_initialized", False):
            linear.weight._is_hf_initialized = True  # type: ignore[union-attr]
        linear.__class__ = QuantLinear
        assert isinstance(linear, QuantLinear)
        linear.format, linear.compute_dtype, linear.dense_dtype = format, compute_dtype, weight.dtype
        linear.activations = activations


def dequantize_linear_(linear: QuantLinear, weight: nn.Parameter) -> nn.Linear:
    """The inverse of `quantize_linear_`: the module becomes the dense layer it was, with the given weight (N, K)."""
    for name in ("format", "compute_dtype", "dense_dtype", "activations"):
        linear.__dict__.pop(name, None)
    linear.__class__ = linear.__dict__.pop("dense_class", nn.Linear)
    dense: nn.Linear = linear
    if not isinstance(dense, nn.Linear):
        weight = nn.Parameter(linear_weight(dense, weight.detach()), requires_grad=weight.requires_grad)
    dense._parameters["weight"] = weight
    return dense
