"""int8_linear: int8 rows times activations quantized to int8, in integers."""

from __future__ import annotations

from torch import Tensor

from halfbyte.ops.quantized_input import check_input, register_linear

int8_linear_by_id = register_linear("int8_linear", "int8")


def int8_linear(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    r"""Computes :math:`y_{mn} = \frac{a_m}{127}\frac{b_n}{127}\sum_k q_{mk} c_{nk} + \beta_n`, the sum exact in int32.

    Each row of `input` is quantized by the int8 rule of the formats, q = rint(x (127 / a)) with a its largest magnitude;
    c and b are the codes and scales of the packed int8 rows. The result is the same bits on every device and instruction
    set: float(sum) * ((a / 127) * (b / 127)) + bias in float32, rounded once to the input's dtype.

    Differentiable in `input` and `bias`: the quantization of the input counts as the identity ("straight through"), so the
    gradient is that of `linear` on the dequantized rows.

    Args:
        input: shape (..., K), float32, bfloat16 or float16.
        packed: int8 rows, shape (N, row_bytes) uint8, frozen.
        bias: shape (N,), input's dtype, or None.
        in_features: K, at most 2^17.

    Returns:
        Shape (..., N), input's dtype. A row of `input` that holds a NaN or Inf gives NaN.

    Raises:
        TypeError: `input` is not a float tensor of the three dtypes.
        ValueError: sizes, dtypes or devices do not fit together; the text names the argument, the rule and the value.

    Note:
        Against `linear` on the same rows, each activation is off by at most a / 254. Under autocast the input and the bias
        are cast to the autocast dtype.

    Source:
        Vector-wise quantization: Dettmers et al. 2022, arXiv:2208.07339.
    """
    check_input("int8_linear", input)
    return int8_linear_by_id(input, packed, bias, in_features)
