"""What samples of ops are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import FORMATS, Format

ALL_FORMATS = tuple(Format.parse(name) for name in (*FORMATS, "nf4:32", "fp4-dq:128"))
"""Every format once, and two block sizes that are not the default."""

AWKWARD_K = (1, 31, 63, 64, 65, 100, 576, 4304)
"""Row lengths that are odd, ragged, shorter than a block or longer than a cache line of scales."""

Samples = Iterator[tuple[Any, ...]]
"""Valid arguments, one tuple or `Call` for each call."""

Hostile = Iterator[tuple[tuple[Any, ...], type[Exception], str]]
"""Arguments, the exception they raise, a regular expression of its text."""


class Call(tuple[Any, ...]):
    """Positional arguments of one call, with keyword arguments beside them.

    Attributes:
        keywords: the keyword arguments.
    """

    keywords: dict[str, Any]

    @classmethod
    def of(cls, *args: Any, **keywords: Any) -> Call:
        """The call with these arguments."""
        call = cls(args)
        call.keywords = keywords
        return call


def keywords_of(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Keyword arguments of a sample; a plain tuple has none."""
    return arguments.keywords if isinstance(arguments, Call) else {}


@dataclass(frozen=True)
class OpSpec:
    """How to call one op.

    Attributes:
        samples: given a device, yields valid argument tuples (small), or `Call`s where keywords are needed.
        hostile: given a device, yields (arguments, exception type, regular expression of the message).
        differentiable: whether samples include inputs that require grad.
    """

    samples: Callable[[str], Samples]
    hostile: Callable[[str], Hostile]
    differentiable: bool = False


def random_packed(format: Format, rows: int, columns: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """Packed rows of normally distributed numbers; the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator)
    return torch.ops.halfbyte.quantize(dense, format.id, format.block_size).to(device)


def bad_formats(build: Callable[[int, int], tuple[Any, ...]]) -> Hostile:
    """Wrong formats and block sizes, for `build(format, block_size)`."""
    for id, block_size in ((-1, 64), (99, 64), (2**40, 64)):
        yield build(id, block_size), ValueError, "format must be an id"
    for block_size in (0, -64, 48, 16, 8192, 2**62):
        yield build(0, block_size), ValueError, "block_size must be a power of two"
    yield build(4, 64), ValueError, "block_size must be 0 for int8"


_HUGE = 2**62


def bad_rows(build: Callable[..., tuple[Any, ...]], device: str) -> Hostile:
    """Wrong rows and sizes, for `build(packed, format, block_size, in_features)`."""
    packed = random_packed(ALL_FORMATS[0], 2, 64, device)
    yield from bad_formats(lambda id, size: build(packed, id, size, 64))
    for columns in (0, -1, -_HUGE, _HUGE):
        yield build(packed, 0, 64, columns), ValueError, "in_features must be"
    yield build(packed, 0, 64, 4096), ValueError, "packed must have 2304 bytes per row"
    yield build(packed[:, :-1], 0, 64, 64), ValueError, "packed must have 48 bytes per row"
    yield build(packed.to(torch.int8), 0, 64, 64), ValueError, "packed must be uint8"
    yield build(packed.float(), 0, 64, 64), ValueError, "packed must be uint8"
    yield build(packed[0], 0, 64, 64), ValueError, "at least 2 dimensions"
