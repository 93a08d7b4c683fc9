"""The oracle: every op on packed rows, slow and obvious, for torch CPU tensors.

Written from ``docs/formats.md`` and from nothing else; kernels are compared with it, byte for byte where they write
codes and scales. Each fp32 step of the rules is one elementwise torch op on fp32, which is one IEEE operation with
subnormals kept (as long as nobody called ``torch.set_flush_denormal(True)`` in this thread); sums run in fp64.

Sizes: K elements of a row (``in_features``), N rows (``out_features``), M rows of an input, R = product of the
leading dimensions, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.formats import FP4_CODES, FP4_THRESHOLDS, FP4_VALUES, NF4_THRESHOLDS, NF4_VALUES, Format

__all__ = [
    "dequantize",
    "dequantize_list",
    "embedding",
    "linear",
    "linear_backward_input",
    "quantize",
    "quantize_list",
    "quantize_with_scales",
    "unpack",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = {"int8": 127.0, "fp8": 448.0}  # the code value that stands for absmax


def quantize(input: Tensor, format: Format | str) -> Tensor:
    """Packs each row of a float tensor.

    Args:
        input: ``(..., K)`` fp32, bf16 or fp16, two dimensions or more, ``K >= 1``.
        format: what to pack into.

    Returns:
        ``(..., row_bytes)`` uint8.

    Raises:
        TypeError: ``input`` is not fp32, bf16 or fp16.
        ValueError: fewer than two dimensions, or K = 0.

    Example:
        >>> packed = quantize(torch.tensor([[2.0, -1.0, 0.5]]), "nf4")
        >>> bytes(packed[0].tolist()).hex(" ", -4)
        'f2a70000 00000040 00000000 00000000'
        >>> dequantize(packed, "nf4", in_features=3, dtype=torch.float32)
        tensor([[ 2.0000, -1.0501,  0.4922]])
    """
    return _quantize("quantize", input, None, Format.parse(format))


def quantize_list(inputs: Sequence[Tensor], format: Format | str) -> list[Tensor]:
    """Packs the rows of several tensors, one after the other.

    Args:
        inputs: tensors ``(..., K)`` fp32, bf16 or fp16, two dimensions or more, ``K >= 1``.
        format: what to pack into.

    Returns:
        Tensors ``(..., row_bytes)`` uint8.

    Raises:
        TypeError: an entry is not fp32, bf16 or fp16.
        ValueError: an entry has fewer than two dimensions, or K = 0.
    """
    return [quantize(input, format) for input in inputs]


def quantize_with_scales(input: Tensor, scales: Tensor, format: Format | str) -> Tensor:
    """Packs each row with given scales in place of the computed absmax.

    Elements beyond a scale saturate. A scale of 0 gives an all-zero block. A negative or non-finite scale, or a
    non-finite element, gives the NaN block of the rules (a NaN row for ``-dq`` and the row formats). ``-dq`` stores
    the scales through its usual rule and encodes with the given ones.

    Args:
        input: ``(..., K)`` fp32, bf16 or fp16, two dimensions or more, ``K >= 1``.
        scales: ``(..., B)`` fp32, the leading dimensions of ``input``, B = ``format.num_blocks(K)`` (1 in row formats).
        format: what to pack into.

    Returns:
        ``(..., row_bytes)`` uint8.

    Raises:
        TypeError: ``input`` is not fp32, bf16 or fp16, or ``scales`` is not fp32.
        ValueError: fewer than two dimensions, K = 0, or scales of another shape.

    Example:
        >>> packed = quantize_with_scales(torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0]]), "int8")
        >>> dequantize(packed, "int8", in_features=2, dtype=torch.float32)
        tensor([[ 1., -1.]])
    """
    return _quantize("quantize_with_scales", input, scales, Format.parse(format))


def dequantize(packed: Tensor, format: Format | str, in_features: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Unpacks rows: one fp32 product per element, rounded once to ``dtype`` (nearest even).

    Args:
        packed: ``(..., row_bytes)`` uint8.
        format: what the rows are packed in.
        in_features: K, the elements of a row.
        dtype: fp32, bf16 or fp16.

    Returns:
        ``(..., K)`` of ``dtype``.

    Raises:
        TypeError: ``packed`` is not uint8, or ``dtype`` is none of the three.
        ValueError: the rows have not the ``row_bytes`` of this format and K.
    """
    format = Format.parse(format)
    _check_float("dequantize", "dtype", dtype)
    codes, scales = unpack(packed, format, in_features)
    if format.codebook == "nf4":
        values = torch.tensor(NF4_VALUES)[codes.int()]
    elif format.codebook == "fp4":
        values = torch.tensor(FP4_VALUES)[codes.int()]
    elif format.codebook == "int8":
        values, scales = codes.view(torch.int8).float(), scales / _LARGEST["int8"]
    else:
        values, scales = codes.view(torch.float8_e4m3fn).float(), scales / _LARGEST["fp8"]
    block_size = format.block_size or in_features
    return (values * scales.repeat_interleave(block_size, dim=-1)[..., :in_features]).to(dtype)


def dequantize_list(
    packed: Sequence[Tensor], format: Format | str, in_features: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Unpacks the rows of several tensors, one after the other.

    Args:
        packed: tensors ``(..., row_bytes)`` uint8.
        format: what the rows are packed in.
        in_features: K of each.
        dtype: fp32, bf16 or fp16.

    Returns:
        Tensors ``(..., K)`` of ``dtype``.

    Raises:
        TypeError: an entry is not uint8, or ``dtype`` is none of the three.
        ValueError: lists of different lengths, or rows that have not the ``row_bytes`` of this format and K.
    """
    return [dequantize(rows, format, k, dtype) for rows, k in zip(packed, in_features, strict=True)]


def unpack(packed: Tensor, format: Format | str, in_features: int) -> tuple[Tensor, Tensor]:
    """Takes rows apart without applying anything.

    Args:
        packed: ``(..., row_bytes)`` uint8.
        format: what the rows are packed in.
        in_features: K, the elements of a row.

    Returns:
        Codes ``(..., K)`` uint8, one per element, and scales ``(..., B)`` fp32: the blocks' absmax (``-dq``: as
        decoded from step and low), not yet divided by 127 or 448.

    Raises:
        TypeError: ``packed`` is not uint8.
        ValueError: the rows have not the ``row_bytes`` of this format and K.

    Example:
        >>> unpack(quantize(torch.tensor([[2.0, -1.0, 0.5]]), "nf4"), "nf4", in_features=3)
        (tensor([[15,  2, 10]], dtype=torch.uint8), tensor([[2.]]))
    """
    format = Format.parse(format)
    if packed.dtype != torch.uint8:
        raise TypeError(f"reference.unpack: packed must be uint8; got {packed.dtype}")
    if packed.shape[-1] != format.row_bytes(in_features):
        raise ValueError(
            f"reference.unpack: packed must have {format.row_bytes(in_features)} bytes per row for {format} with "
            f"in_features={in_features}; got {packed.shape[-1]}"
        )
    codes = packed[..., : format.code_bytes(in_features)]
    if format.bits == 4:  # element 2i is in the high nibble
        codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)[..., :in_features]
    begin, blocks = format.scales_offset(in_features), format.num_blocks(in_features)
    if format.scales == "fp32":
        return codes.contiguous(), _floats(packed, begin, blocks)
    steps = packed[..., begin : begin + blocks].float()
    step_and_low = _floats(packed, format.row_scales_offset(in_features), 2)
    return codes.contiguous(), _fma(steps, step_and_low[..., :1], step_and_low[..., 1:])


def linear(
    input: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    format: Format | str,
    in_features: int,
    *,
    weight_dtype: torch.dtype | None = None,
) -> Tensor:
    """``input @ W.T + bias`` in fp64, where W is the dequantized weight.

    Args:
        input: ``(..., K)`` fp32, bf16 or fp16.
        packed: ``(N, row_bytes)`` uint8.
        bias: ``(N,)`` or None.
        format: what the rows are packed in.
        in_features: K.
        weight_dtype: what W is dequantized to before it is multiplied; None: the input's dtype. fp32 leaves out the
            rounding of W to a narrow dtype, as a kernel does that multiplies in fp32.

    Returns:
        ``(..., N)`` fp64, not rounded to the input's dtype: round it, or compare with a bound.

    Raises:
        TypeError: a dtype that is none of fp32, bf16, fp16, or ``packed`` not uint8.
        ValueError: sizes that don't fit each other.

    Note:
        Off the exact sum by at most ``(K + 1) * 2**-53 * (|input| @ |W|.T + |bias|)``.
    """
    if input.shape[-1] != in_features:
        raise ValueError(f"reference.linear: input must have in_features={in_features} columns; got {input.shape[-1]}")
    output = input.double() @ _weight("linear", input, packed, format, in_features, weight_dtype).T
    return output if bias is None else output + bias.double()


def linear_backward_input(
    grad_output: Tensor,
    packed: Tensor,
    format: Format | str,
    in_features: int,
    *,
    weight_dtype: torch.dtype | None = None,
) -> Tensor:
    """``grad_output @ W`` in fp64: the gradient of ``linear`` with respect to its input.

    Args:
        grad_output: ``(..., N)`` fp32, bf16 or fp16.
        packed: ``(N, row_bytes)`` uint8.
        format: what the rows are packed in.
        in_features: K.
        weight_dtype: what W is dequantized to before it is multiplied; None: the gradient's dtype.

    Returns:
        ``(..., K)`` fp64, not rounded.

    Raises:
        TypeError: a dtype that is none of fp32, bf16, fp16, or ``packed`` not uint8.
        ValueError: sizes that don't fit each other.
    """
    if grad_output.shape[-1] != packed.shape[0]:
        raise ValueError(
            f"reference.linear_backward_input: grad_output must have {packed.shape[0]} columns, one per row of packed; "
            f"got {grad_output.shape[-1]}"
        )
    weight = _weight("linear_backward_input", grad_output, packed, format, in_features, weight_dtype)
    return grad_output.double() @ weight


def embedding(
    indices: Tensor, packed: Tensor, format: Format | str, embedding_dim: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Gathers rows, then dequantizes them.

    Args:
        indices: any shape, int32 or int64, each in ``[0, N)``.
        packed: ``(N, row_bytes)`` uint8.
        format: what the rows are packed in.
        embedding_dim: K.
        dtype: fp32, bf16 or fp16.

    Returns:
        ``(*indices.shape, K)`` of ``dtype``.

    Raises:
        TypeError: indices that are neither int32 nor int64, ``packed`` not uint8, another ``dtype``.
        IndexError: an index outside ``[0, N)``; negative ones don't count from the end.
        ValueError: the rows have not the ``row_bytes`` of this format and K.
    """
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"reference.embedding: indices must be int32 or int64; got {indices.dtype}")
    outside = indices[(indices < 0) | (indices >= packed.shape[0])]
    if outside.numel():
        raise IndexError(f"reference.embedding: indices must be in [0, {packed.shape[0]}); got {outside[0].item()}")
    rows = dequantize(packed[indices.reshape(-1).long()], format, embedding_dim, dtype)
    return rows.reshape(*indices.shape, embedding_dim)


def _quantize(op: str, input: Tensor, scales: Tensor | None, format: Format) -> Tensor:
    _check_float(op, "input", input.dtype)
    if input.dim() < 2:
        raise ValueError(f"reference.{op}: input must have at least 2 dimensions (..., in_features); got {input.dim()}")
    K = input.shape[-1]
    num_blocks, block_size = format.num_blocks(K), format.block_size or K
    x = input.detach().float().reshape(-1, K)
    # A short last block is filled up with zeros: they change no absmax, and a missing nibble holds the code of 0.0.
    x = torch.nn.functional.pad(x, (0, num_blocks * block_size - K))
    x = x.reshape(-1, num_blocks, block_size)  # (R, B, block)

    invalid = ~x.isfinite().all(dim=-1)  # (R, B)
    if scales is None:
        absmax = x.abs().amax(dim=-1)
    else:
        if scales.dtype != torch.float32:
            raise TypeError(f"reference.{op}: scales must be fp32; got {scales.dtype}")
        if scales.shape != (*input.shape[:-1], num_blocks):
            raise ValueError(
                f"reference.{op}: scales must have shape {(*input.shape[:-1], num_blocks)}; got {tuple(scales.shape)}"
            )
        absmax = scales.detach().reshape(-1, num_blocks)
        invalid = invalid | ~absmax.isfinite() | (absmax < 0)
    if format.scales == "dq":  # one bad block spoils step and low, so the whole row must say so
        invalid = invalid.any(dim=-1, keepdim=True).expand_as(invalid)
    absmax = absmax.masked_fill(invalid | (absmax == 0), 0.0)  # also turns a given -0.0 into +0.0
    x = x.masked_fill((absmax == 0).unsqueeze(-1), 0.0)

    codes = _encode(x, absmax.unsqueeze(-1), format.codebook).reshape(-1, num_blocks * block_size)
    packed = torch.zeros(x.shape[0], format.row_bytes(K), dtype=torch.uint8)
    size = format.code_bytes(K)
    if format.bits == 4:
        packed[:, :size] = codes[:, 0 : 2 * size : 2] << 4 | codes[:, 1 : 2 * size : 2]
    else:
        packed[:, :size] = codes

    begin = format.scales_offset(K)
    if format.scales == "fp32":
        packed[:, begin : begin + 4 * num_blocks] = _bytes(absmax.masked_fill(invalid, torch.nan))
    else:
        steps, step_and_low = _nest(absmax)
        packed[:, begin : begin + num_blocks] = steps  # 0 where invalid: absmax is 0 in the whole row
        begin = format.row_scales_offset(K)
        packed[:, begin : begin + 8] = _bytes(step_and_low.masked_fill(invalid[:, :1], torch.nan))
    return packed.reshape(*input.shape[:-1], format.row_bytes(K))


def _encode(x: Tensor, absmax: Tensor, codebook: str) -> Tensor:
    """Codes, uint8, of x (R, B, block) scaled by absmax (R, B, 1); x is finite, and 0 where absmax is."""
    largest = _LARGEST.get(codebook)
    v = _normalize(x, absmax, largest)
    if codebook == "nf4":
        return _count_below(v, NF4_THRESHOLDS)
    if codebook == "fp4":
        magnitude = torch.tensor(FP4_CODES, dtype=torch.uint8)[_count_below(v.abs(), FP4_THRESHOLDS).int()]
        return magnitude + 8 * ((x < 0) & (magnitude != 0)).to(torch.uint8)
    assert largest is not None
    v = v.clamp(-largest, largest)
    if codebook == "int8":
        return v.round().to(torch.int8).view(torch.uint8)  # torch.round takes ties to even
    return v.to(torch.float8_e4m3fn).view(torch.uint8)


def _normalize(x: Tensor, absmax: Tensor, largest: float | None) -> Tensor:
    """``x * ((1 / absmax) * largest)``; ``(x / absmax) * largest`` where that factor overflows; 0 where absmax is 0."""
    absmax = absmax.masked_fill(absmax == 0, 1.0)
    factor, quotient = 1 / absmax, x / absmax
    if largest is not None:
        factor, quotient = factor * largest, quotient * largest
    return torch.where(factor.isfinite(), x * factor, quotient)


def _count_below(v: Tensor, thresholds: tuple[float, ...]) -> Tensor:
    count = torch.zeros(v.shape, dtype=torch.uint8)
    for threshold in thresholds:
        count += v > threshold
    return count


def _nest(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """The ``-dq`` rule: absmax (R, B) -> uint8 (R, B), and step and low as fp32 (R, 2)."""
    low, high = absmax.amin(dim=-1, keepdim=True), absmax.amax(dim=-1, keepdim=True)
    step = (high - low) / 255
    steps = ((absmax - low) / step).round().clamp(max=255)  # NaN where step is 0
    return torch.where(step == 0, 0.0, steps).to(torch.uint8), torch.cat((step, low), dim=-1)


def _fma(u: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """``fma(u, step, low)``: the exact ``u * step + low``, rounded once to fp32; u is 0..255, all are >= 0 or NaN.

    u * step has 8 + 24 bits, exact in fp64. The sum may not be: TwoSum (Knuth) gives its rounding error, and a sum that
    is inexact with an even last bit moves by one bit towards that error ("round to odd"). 53 >= 24 + 2 bits of a value
    rounded to odd are enough for the second rounding, to fp32, to be that of the exact sum (Boldo, Melquiond 2008).
    """
    product, addend = u.double() * step.double(), low.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    towards = torch.where(error > 0, 1, -1)  # total > 0, so a larger bit pattern is a larger number
    inexact = (error != 0) & total.isfinite() & (bits % 2 == 0)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def _floats(packed: Tensor, begin: int, count: int) -> Tensor:
    """fp32 (..., count) from little-endian bytes at an offset (torch runs on little-endian machines only)."""
    return packed[..., begin : begin + 4 * count].contiguous().view(torch.float32)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _weight(
    op: str, input: Tensor, packed: Tensor, format: Format | str, in_features: int, weight_dtype: torch.dtype | None
) -> Tensor:
    _check_float(op, "input", input.dtype)
    if packed.dim() != 2:
        raise ValueError(f"reference.{op}: packed must have 2 dimensions (N, row_bytes); got {packed.dim()}")
    return dequantize(packed, format, in_features, weight_dtype or input.dtype).double()


def _check_float(op: str, argument: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"reference.{op}: {argument} must be fp32, bf16 or fp16; got {dtype}")
