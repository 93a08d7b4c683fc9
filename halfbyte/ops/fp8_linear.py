"""fp8_linear: fp8 rows times activations quantized to fp8."""

from __future__ import annotations

from torch import Tensor

from halfbyte.ops.quantized_input import check_input, register_linear

fp8_linear_by_id = register_linear("fp8_linear", "fp8")


def fp8_linear(input: Tensor, packed: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    r"""Computes :math:`y_{mn} = \frac{a_m}{448}\frac{b_n}{448}\sum_k q_{mk} c_{nk} + \beta_n` with e4m3 codes on both sides.

    Each row of `input` is quantized by the fp8 rule of the formats, q = e4m3(x (448 / a)) with a its largest magnitude;
    c and b are the codes and scales of the packed fp8 rows. On GPUs with fp8 tensor cores (compute capability 8.9) a
    bfloat16 input with K and N multiples of 16 is multiplied by `torch._scaled_mm` on the codes; everywhere else both sides
    are decoded.

    Differentiable in `input` and `bias`: the quantization of the input counts as the identity ("straight through"), so the
    gradient is that of `linear` on the dequantized rows.

    Args:
        input: shape (..., K), float32, bfloat16 or float16.
        packed: fp8 rows, shape (N, row_bytes) uint8, frozen.
        bias: shape (N,), input's dtype, or None.
        in_features: K.

    Returns:
        Shape (..., N), input's dtype. A row of `input` that holds a NaN or Inf gives NaN.

    Raises:
        TypeError: `input` is not a float tensor of the three dtypes.
        ValueError: sizes, dtypes or devices do not fit together; the text names the argument, the rule and the value.

    Note:
        Against `linear` on the same rows, each activation is off by at most max(abs(x) / 16, a / 2^18). Sums are float32 in
        an order of the device's own (fp8 tensor cores keep about 14 bits within 128 elements of K), so devices agree to
        rounding, not to the bit. Under autocast the input and the bias are cast to the autocast dtype.

    Source:
        e4m3: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    check_input("fp8_linear", input)
    return fp8_linear_by_id(input, packed, bias, in_features)
