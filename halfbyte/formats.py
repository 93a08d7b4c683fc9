"""Formats: what the bytes of a packed row mean. Names, codebooks and layout arithmetic, nothing else (no torch).

A quantized weight of shape ``(N, K)`` is one uint8 matrix ``(N, row_bytes)``. Each row holds its codes, then its
scales, then zeros up to a multiple of 16 bytes; ``docs/formats.md`` is the specification, bit by bit. A format is a
codebook times a scale kind: a new one is a line in ``_CODEBOOKS`` or ``_SCALE_KINDS`` and a name that ends ``FORMATS``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "BLOCK_SIZES",
    "FORMATS",
    "FP4_CODES",
    "FP4_MAGNITUDES",
    "FP4_THRESHOLDS",
    "FP4_VALUES",
    "NF4_THRESHOLDS",
    "NF4_VALUES",
    "Format",
]

FORMATS = ("nf4", "fp4", "nf4-dq", "fp4-dq", "int8", "fp8")
"""Names of all formats; the index is the id that crosses the dispatcher, so entries are only ever appended."""

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Elements that may share one scale in the blockwise formats."""

ROW_ALIGNMENT = 16
"""A row is a multiple of this many bytes, so that every row of an aligned matrix can be read in 16-byte loads."""


def _float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _float32_below(value: float) -> float:
    """The largest fp32 that is not above a positive value."""
    nearest = _float32(value)
    if nearest <= value:
        return nearest
    (bits,) = struct.unpack("<I", struct.pack("<f", nearest))
    below: float = struct.unpack("<f", struct.pack("<I", bits - 1))[0]
    return below


def _midpoints(values: Iterable[float]) -> list[float]:
    # Neighbouring values of a codebook are so close in exponent that a Python float holds their midpoint exactly.
    return [(low + high) / 2 for low, high in itertools.pairwise(values)]


NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Value of NF4 code 0..15, ascending, each exactly an fp32 (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""

NF4_THRESHOLDS = tuple(_float32(midpoint) for midpoint in _midpoints(NF4_VALUES))
"""15 midpoints of neighbouring NF4 values, rounded to fp32; a code is the number of them strictly below ``v``."""

FP4_MAGNITUDES = tuple(_float32(twelfths / 12) for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3))
"""Magnitude of FP4 code 0..7 as fp32, in code order (not ascending: that order is ``FP4_CODES``)."""

FP4_VALUES = FP4_MAGNITUDES + tuple(-magnitude for magnitude in FP4_MAGNITUDES)
"""Value of FP4 code 0..15; bit 3 is the sign. Code 8 decodes to -0.0 and is never written."""

FP4_CODES = (0, 1, 6, 7, 4, 5, 2, 3)
"""FP4 magnitude codes in ascending order of magnitude."""

FP4_THRESHOLDS = tuple(_float32_below(midpoint) for midpoint in _midpoints(FP4_MAGNITUDES[code] for code in FP4_CODES))
"""7 midpoints of neighbouring FP4 magnitudes; the number of them strictly below ``|v|`` indexes ``FP4_CODES``.

Rounded down to fp32: an fp32 is then above the threshold exactly when the larger magnitude is the nearer one (five of
the midpoints rounded to nearest lie above the exact ones and would give an element between the two the farther value).
"""


class _Codebook(NamedTuple):
    bits: int
    block_sizes: tuple[int, ...]  # (0,): one scale for the whole row
    default_block_size: int
    scale_kinds: tuple[str, ...]
    zero_code: int  # the code of 0.0; a missing last nibble, an all-zero block and a NaN block hold it


_CODEBOOKS = {
    "nf4": _Codebook(4, BLOCK_SIZES, 64, ("fp32", "dq"), 7),
    "fp4": _Codebook(4, BLOCK_SIZES, 64, ("fp32", "dq"), 0),
    "int8": _Codebook(8, (0,), 0, ("fp32",), 0),
    "fp8": _Codebook(8, (0,), 0, ("fp32",), 0),
}


class _ScaleKind(NamedTuple):
    suffix: str  # of the format's name
    alignment: int  # bytes, of the first scale
    block_bytes: int  # per block
    row_bytes: int  # per row, 4-aligned, after the scales of the blocks


_SCALE_KINDS = {
    "fp32": _ScaleKind("", 4, 4, 0),
    "dq": _ScaleKind("-dq", 1, 1, 8),  # uint8 per block, then fp32 `step` and fp32 `low`
}

# name -> (codebook, scale kind)
_NAMES = {
    codebook + kind.suffix: (codebook, scales)
    for codebook, description in _CODEBOOKS.items()
    for scales, kind in _SCALE_KINDS.items()
    if scales in description.scale_kinds
}
_IDS = {_NAMES[name]: id for id, name in enumerate(FORMATS)}


def _align(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment


@dataclass(frozen=True)
class Format:
    """What the bytes of a packed row mean: a codebook, how many elements share a scale, and how scales are stored.

    Immutable, hashable and picklable. Use it, or its string (``"nf4"``, ``"nf4-dq:128"``), wherever a ``format`` is
    asked for. Sizes are in bytes, ``K`` is the number of elements of a row (``in_features``, 1 or more).

    Args:
        codebook: ``"nf4"``, ``"fp4"``, ``"int8"`` or ``"fp8"``.
        block_size: elements per scale, one of ``BLOCK_SIZES``; 0 for int8 and fp8, which have one scale per row.
        scales: ``"fp32"``, or ``"dq"`` (nf4 and fp4): one byte per block and two fp32 per row.

    Raises:
        ValueError: the codebook, the block size or the scale kind does not exist or does not go with the others.

    Example:
        >>> format = Format.parse("nf4")
        >>> format
        Format(codebook='nf4', block_size=64, scales='fp32')
        >>> format.row_bytes(4096), format.bits_per_weight(4096)
        (2304, 4.5)
        >>> str(Format("nf4", 128, "dq"))
        'nf4-dq:128'
    """

    codebook: str
    block_size: int
    scales: str = "fp32"
    id: int = field(init=False, repr=False, compare=False)  # a property would cost every call of a layer 0.1 us
    """The int that stands for ``name`` in operator schemas."""

    def __post_init__(self) -> None:
        codebook = _CODEBOOKS.get(self.codebook)
        if codebook is None:
            raise ValueError(f"Format: codebook must be one of {', '.join(_CODEBOOKS)}; got {self.codebook!r}")
        if self.scales not in codebook.scale_kinds:
            raise ValueError(
                f"Format: scales of {self.codebook} must be one of {', '.join(codebook.scale_kinds)}; "
                f"got {self.scales!r}"
            )
        if type(self.block_size) is not int:  # 64.0 == 64 would pass the next test and give another string
            raise TypeError(f"Format: block_size must be an int; got {self.block_size!r}")
        if self.block_size not in codebook.block_sizes:
            if codebook.block_sizes == (0,):
                rule = "is a row format (one scale per row) and takes no block size"
            else:
                rule = f"takes a block size of {', '.join(map(str, codebook.block_sizes))} elements"
            raise ValueError(f"Format: {self.name} {rule}; got {self.block_size}")
        object.__setattr__(self, "id", _IDS[self.codebook, self.scales])

    @classmethod
    def parse(cls, format: str | Format) -> Format:
        """Reads a format from its string; a ``Format`` comes back unchanged.

        Args:
            format: ``"<name>"`` with the default block size (64), or ``"<name>:<block_size>"``; names are ``FORMATS``.

        Returns:
            The format; ``Format.parse(str(format)) == format``.

        Raises:
            TypeError: ``format`` is neither a string nor a ``Format``.
            ValueError: no such name or block size; the message lists what exists.

        Example:
            >>> Format.parse("fp4:32")
            Format(codebook='fp4', block_size=32, scales='fp32')
            >>> Format.parse("nf5")  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: Format.parse: format must be one of nf4, fp4, nf4-dq, fp4-dq, int8, fp8, with ... got 'nf5'
            >>> Format.parse("int8:64")
            Traceback (most recent call last):
            ValueError: Format: int8 is a row format (one scale per row) and takes no block size; got 64
        """
        if isinstance(format, Format):
            return format
        if not isinstance(format, str):
            raise TypeError(f"Format.parse: format must be a Format or a string such as 'nf4'; got {format!r}")
        known = _KNOWN.get(format)
        if known is not None:  # every format there is: what follows says what is wrong
            return known
        name, _, size = format.partition(":")
        if name not in _NAMES:
            raise ValueError(
                f"Format.parse: format must be one of {', '.join(FORMATS)}, "
                f"with an optional block size as in 'nf4:32'; got {format!r}"
            )
        codebook, scales = _NAMES[name]
        # "0" would say the row formats' own size and "064" another spelling of 64: one format, one string
        if not (size.isascii() and size.isdigit() and size[0] != "0"):
            raise ValueError(f"Format.parse: the block size after ':' must be a plain number; got {format!r}")
        return cls(codebook, int(size), scales)

    @classmethod
    def from_id(cls, id: int, block_size: int) -> Format:
        """The format behind the two ints that cross the dispatcher (the inverse of ``.id`` and ``.block_size``).

        Args:
            id: index into ``FORMATS``.
            block_size: elements per scale, 0 for the row formats.

        Raises:
            ValueError: no such id, or the block size does not go with it.

        Example:
            >>> Format.from_id(2, 64)
            Format(codebook='nf4', block_size=64, scales='dq')
        """
        if not 0 <= id < len(FORMATS):
            known = ", ".join(f"{known} {name}" for known, name in enumerate(FORMATS))
            raise ValueError(f"Format.from_id: id must be one of {known}; got {id}")
        codebook, scales = _NAMES[FORMATS[id]]
        return cls(codebook, block_size, scales)

    @property
    def name(self) -> str:
        """The name without a block size: an entry of ``FORMATS``."""
        return self.codebook + _SCALE_KINDS[self.scales].suffix

    @property
    def bits(self) -> int:
        """Bits of one code, 4 or 8."""
        return _CODEBOOKS[self.codebook].bits

    @property
    def zero_code(self) -> int:
        """The code of 0.0: 7 for nf4, 0 for the others."""
        return _CODEBOOKS[self.codebook].zero_code

    def num_blocks(self, K: int) -> int:
        """Scales in a row of ``K`` elements; the last block may be short. 1 for the row formats."""
        if K < 1:
            raise ValueError(f"Format: in_features must be at least 1; got {K}")
        return -(-K // self.block_size) if self.block_size else 1

    def code_bytes(self, K: int) -> int:
        """Bytes of the codes of a row of ``K`` elements, from offset 0."""
        if K < 1:
            raise ValueError(f"Format: in_features must be at least 1; got {K}")
        return (K * self.bits + 7) // 8

    def scales_offset(self, K: int) -> int:
        """Offset of the first block's scale in a row of ``K`` elements."""
        return _align(self.code_bytes(K), _SCALE_KINDS[self.scales].alignment)

    def row_scales_offset(self, K: int) -> int:
        """Offset behind the blocks' scales, 4-aligned: there ``-dq`` keeps fp32 ``step``, then fp32 ``low``."""
        return _align(self.scales_offset(K) + self.num_blocks(K) * _SCALE_KINDS[self.scales].block_bytes, 4)

    def row_bytes(self, K: int) -> int:
        """Bytes of a packed row of ``K`` elements: codes, scales and zeros, a multiple of 16."""
        return _align(self.row_scales_offset(K) + _SCALE_KINDS[self.scales].row_bytes, ROW_ALIGNMENT)

    def bits_per_weight(self, K: int) -> float:
        """Bits that one of the ``K`` elements of a row costs, scales and padding included."""
        return self.row_bytes(K) * 8 / K

    def __str__(self) -> str:
        default = _CODEBOOKS[self.codebook].default_block_size
        return self.name if self.block_size == default else f"{self.name}:{self.block_size}"


# By string, with and without the default block size. Ops parse one in every call, with caches that kernels have filled.
_KNOWN = {
    text: Format(codebook, size, scales)
    for name, (codebook, scales) in _NAMES.items()
    for size in _CODEBOOKS[codebook].block_sizes
    for text in ((name,) if size == _CODEBOOKS[codebook].default_block_size else ()) + ((f"{name}:{size}",) if size else ())
}
