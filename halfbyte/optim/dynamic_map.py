"""The 8-bit dynamic map of optimizer state as torch code: for imports, exports and tests, on any device.

The kernels have their own closed form of it (csrc/dynamic_map.h); both follow docs/formats.md.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

STATE_BLOCK = 256
"""Elements of a row that share one scale."""


@functools.cache
def map_values(signed: bool) -> Tensor:
    """The map's 256 values in ascending order of code: float32, shape (256,); signed for first moments.

    Args:
        signed: first moments (True) or second moments (False, from 0).

    Returns:
        float32 tensor on the CPU; do not write to it.
    """
    values = []
    for code in range(256):
        m = abs(code - 127) if signed else code + 1
        e = int(math.log2(m)) if m else 0
        p = 10.0 ** (e - 6 if signed else e - 7)
        # m * slope is exact in fp64 (9 + 24 bits) and so is the sum: one rounding to fp32, as the kernels' fma.
        slope, offset = (torch.tensor(x, dtype=torch.float32).item() for x in (0.9 * p / 2**e, p * (0.45 / 2**e - 0.8)))
        value = 1.0 if code == 255 else 0.0 if m == (0 if signed else 1) else m * slope + offset
        values.append(-value if signed and code < 127 else value)
    return torch.tensor(values, dtype=torch.float64).float()


@functools.cache
def _midpoints(signed: bool) -> Tensor:
    """Exact midpoints between neighbouring values: float64, shape (255,); the unsigned map's first one is 0."""
    values = map_values(signed).double()
    middle = (values[1:] + values[:-1]) / 2
    if not signed:
        middle[0] = 0.0  # a positive second moment never becomes code 0
    return middle


def zero_code(signed: bool) -> int:
    """The code of 0.0: 127 in the signed map, 0 in the unsigned one."""
    return 127 if signed else 0


def row_blocks(shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int]:
    """`(N, K, ceil(K / 256))` of a parameter's shape: N rows of K elements; a 1-D parameter is one row."""
    rows, length = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
    return rows, length, -(-length // STATE_BLOCK)


def encode_state(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes a moment: nearest entry of the map per block of 256 elements of a row.

    Args:
        values: moment of the parameter's shape (N, ...), any float dtype, any device.
        signed: first moment (True) or second (False).

    Returns:
        Codes, uint8 of the same shape, and scales, float32 (N, ceil(K / 256)). NaN and Inf are
        stored as 0, as a step does.
    """
    rows, length, blocks = row_blocks(values.shape)
    x = torch.where(values.isfinite(), values.float(), 0.0)
    x = torch.nn.functional.pad(x.reshape(rows, length), (0, blocks * STATE_BLOCK - length))
    x = x.view(rows, blocks, STATE_BLOCK)
    scales = x.abs().amax(-1) if x.numel() else x.new_zeros(rows, blocks)
    valid = scales > 0
    normalized = (x.double() / torch.where(valid, scales, 1.0).double()[..., None]) * valid[..., None]
    if signed:
        # Ties go to the smaller magnitude, so negative values are coded by their mirror image around code 127.
        positive = _midpoints(True)[127:].to(x.device)
        m = torch.bucketize(normalized.abs(), positive)
        codes = 127 + torch.where(normalized < 0, -m.clamp(max=127), m)
    else:
        codes = torch.bucketize(normalized, _midpoints(False).to(x.device))
    codes = torch.where(valid[..., None], codes, zero_code(signed)).to(torch.uint8)
    codes = codes.view(rows, blocks * STATE_BLOCK)[:, :length].reshape(values.shape)
    return codes.contiguous(), scales.contiguous()


def decode_state(codes: Tensor, scales: Tensor, signed: bool, *, exact_inverse: bool = False) -> Tensor:
    """The moment that `codes` and `scales` stand for, float32.

    Args:
        codes: uint8 of the parameter's shape (N, ...).
        scales: float32 (N, ceil(K / 256)).
        signed: first moment (True) or second (False).
        exact_inverse: decode the signed code 0 as -1.0 instead of -0.99297. The map has no -1.0, so a block whose
            extreme is negative would otherwise come back with another scale from `encode_state`; with it codes and
            scales come back bit for bit (scales of at least 2**-100; below that the smallest codes are subnormal).

    Returns:
        float32 of the codes' shape.
    """
    rows, length, blocks = row_blocks(codes.shape)
    table = map_values(signed).to(codes.device)
    if signed and exact_inverse:
        table = torch.cat([table.new_tensor([-1.0]), table[1:]])
    values = torch.nn.functional.pad(table[codes.reshape(rows, length).int()], (0, blocks * STATE_BLOCK - length))
    values = values.view(rows, blocks, STATE_BLOCK) * scales.float()[..., None]
    return values.view(rows, blocks * STATE_BLOCK)[:, :length].reshape(codes.shape).contiguous()
