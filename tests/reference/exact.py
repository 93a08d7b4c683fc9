"""The rules a second time, element by element in Python's `Fraction`, and the specification's own reader and examples.

Nothing here shares code with `halfbyte.reference` or arithmetic with torch.
"""

import math
import re
import struct
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import strategies as st

from halfbyte.formats import FP4_VALUES, NF4_VALUES, Format

SPECIFICATION = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_FLOAT = Fraction(2**24 - 1) * 2**104
NAN = struct.pack("<I", 0x7FC00000)
SMALLEST_FORMATS = ("nf4:32", "fp4:32", "nf4-dq:32", "fp4-dq:32", "int8", "fp8")  # short rows then have several blocks


def specification_reader():
    (code,) = re.findall(r"^```python\n(.*?)^```", SPECIFICATION, re.MULTILINE | re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    return namespace["read_row"]


def numbers(text: str) -> list[float]:
    values: list[float] = []
    for word in text.split():
        value, _, count = word.partition("*")
        values += [float(value)] * int(count or 1)
    return values


def examples() -> list[dict[str, str]]:
    found = re.findall(r"^```example\n(.*?)^```", SPECIFICATION, re.MULTILINE | re.DOTALL)
    return [dict(line.split(": ", 1) for line in text.splitlines()) for text in found]


def same_floats(left: list[float], right: list[float]) -> bool:
    """Equal bits, any NaN equal to any NaN."""
    return len(left) == len(right) and all(
        (math.isnan(a) and math.isnan(b)) or struct.pack("<d", a) == struct.pack("<d", b)
        for a, b in zip(left, right, strict=True)
    )


def row_bytes(packed: torch.Tensor) -> bytes:
    (row,) = packed.tolist()
    return bytes(row)


def rounded(value: Fraction, precision: int = 24, quantum: int = -149) -> Fraction:
    """Nearest number with so many significant bits and no bit below 2**quantum, ties to even; the range has no end."""
    if value == 0:
        return value
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1  # now 2**exponent <= |value| < 2**(exponent + 1)
    unit = Fraction(2) ** max(exponent - precision + 1, quantum)
    return round(value / unit) * unit  # round() of a Fraction takes ties to even


def float32_bytes(value: Fraction) -> bytes:
    assert rounded(value) == value
    assert value >= 0
    return struct.pack("<f", float(value))


def exact_normalize(x: float, absmax: Fraction, largest: int) -> Fraction:
    factor = rounded(rounded(1 / absmax) * largest)
    if rounded(1 / absmax) > LARGEST_FLOAT or factor > LARGEST_FLOAT:
        return rounded(rounded(Fraction(x) / absmax) * largest)
    return rounded(Fraction(x) * factor)


def midpoints(values: list[float]) -> list[Fraction]:
    return [(Fraction(low) + Fraction(high)) / 2 for low, high in pairwise(values)]


def exact_code(x: float, absmax: Fraction, codebook: str) -> int:
    if absmax == 0:
        return 7 if codebook == "nf4" else 0
    v = exact_normalize(x, absmax, {"int8": 127, "fp8": 448}.get(codebook, 1))
    if codebook == "nf4":
        return sum(rounded(midpoint) < v for midpoint in midpoints(list(NF4_VALUES)))
    if codebook == "fp4":  # nearest, in exact arithmetic; of two nearest ones the smaller
        magnitude = min(range(8), key=lambda code: (abs(Fraction(FP4_VALUES[code]) - abs(v)), FP4_VALUES[code]))
        return magnitude + 8 if x < 0 and magnitude else magnitude
    if codebook == "int8":
        return max(-127, min(127, round(v))) % 256
    sign = 128 if math.copysign(1, x) < 0 else 0
    magnitude = min(Fraction(448), rounded(abs(v), 4, -9))
    if magnitude < Fraction(1, 64):  # subnormals of e4m3
        return sign + int(magnitude * 512)
    exponent = math.floor(math.log2(magnitude))
    return sign + (exponent + 7) * 8 + int(magnitude / Fraction(2) ** exponent * 8) - 8


def exact_pack(row: list[float], format: Format, scales: list[float] | None = None) -> bytes:
    K, block_size, zero = len(row), format.block_size or len(row), 7 if format.codebook == "nf4" else 0
    blocks = [row[start : start + block_size] for start in range(0, K, block_size)]
    given = scales or [0.0] * len(blocks)
    valid = [
        all(map(math.isfinite, block)) and math.isfinite(scale) and scale >= 0
        for block, scale in zip(blocks, given, strict=True)
    ]
    if format.scales == "dq" and not all(valid):
        valid = [False] * len(blocks)
    absmax = [
        Fraction(0) if not good else Fraction(scale) if scales else max(abs(Fraction(x)) for x in block)
        for block, scale, good in zip(blocks, given, valid, strict=True)
    ]
    codes = [
        exact_code(x, s, format.codebook) if good else zero
        for b, s, good in zip(blocks, absmax, valid, strict=True)
        for x in b
    ]
    if format.bits == 4:
        codes += [zero] * (K % 2)
        packed = bytes(high * 16 + low for high, low in zip(codes[::2], codes[1::2], strict=True))
    else:
        packed = bytes(codes)
    if format.scales == "dq":
        low = min(absmax)
        step = rounded(rounded(max(absmax) - low) / 255)
        packed += bytes(min(255, round(rounded(rounded(s - low) / step))) if step else 0 for s in absmax)
        packed += bytes(-len(packed) % 4)
        packed += float32_bytes(step) + float32_bytes(low) if all(valid) else NAN + NAN
    else:
        packed += bytes(-len(packed) % 4)
        packed += b"".join(float32_bytes(s) if good else NAN for s, good in zip(absmax, valid, strict=True))
    return packed + bytes(-len(packed) % 16)


FLOATS = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-(2.0**-120), 2.0**-120, width=32),  # around where reciprocals overflow, and subnormals
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0**-149, 2.0**-128, -(2.0**127), 3.4028234663852886e38]),
)
HOSTILE = st.one_of(FLOATS, st.sampled_from([math.nan, math.inf, -math.inf]))
ROWS = st.one_of(
    st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=70),
    st.lists(FLOATS, min_size=1, max_size=70),
    st.lists(st.floats(-(2.0**-120), 2.0**-120, width=32), min_size=1, max_size=70),
    st.lists(HOSTILE, min_size=1, max_size=70),
)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
