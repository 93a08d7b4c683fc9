"""Layers that bench_linear, bench_int8_linear and bench_lora time: 4096 x 4096 and SmolLM2-135M's, or one of any size."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import timing
import torch
from timing import Rotated
from torch import Tensor

SIZE = 4096
NARROW = ((192, 576), (576, 576), (1536, 576), (576, 1536))  # k and v, q and o, gate and up, down
BLOCK = 64  # of 4-bit formats

T = TypeVar("T")


class Layer:
    """(rows, features) weights of one layer, and what is made of them, in buffers to use in turn (`timing.rotate`).

    `size` ends the titles of its comparisons.
    """

    def __init__(self, rows: int, features: int, size: str = "") -> None:
        self.rows, self.features, self.size = rows, features, size
        self.fp32 = timing.rotate(lambda _: torch.randn(rows, features) * 0.02, 4 * rows * features)
        self._kept: dict[Hashable, Rotated[Any]] = {torch.float32: self.fp32}

    def made(self, make: Callable[[Tensor], T], item_bytes: int) -> Rotated[T]:
        """`make(weight)` of enough weights, anew."""
        return timing.rotate(lambda i: make(self.fp32[i]), item_bytes)

    def kept(self, key: Hashable, make: Callable[[Tensor], T], item_bytes: int) -> Rotated[T]:
        """`make(weight)` of enough weights, once for each key: for what takes longer than all that is timed."""
        if key not in self._kept:
            self._kept[key] = self.made(make, item_bytes)
        return self._kept[key]

    def dense(self, dtype: torch.dtype) -> Rotated[Tensor]:
        return self.kept(dtype, lambda weight: weight.to(dtype), dtype.itemsize * self.rows * self.features)

    def bitsandbytes_nf4(self, dtype: torch.dtype) -> Rotated[tuple[Tensor, Any]]:
        """Codes and state of `quantize_4bit`, whose products are in `dtype`."""
        from bitsandbytes.functional import quantize_4bit

        def make(weight: Tensor) -> tuple[Tensor, Any]:
            return quantize_4bit(weight.to(dtype), blocksize=BLOCK, quant_type="nf4")

        return self.kept(("bitsandbytes nf4", dtype), make, self.rows * self.features // 2)


def options(tokens: Sequence[int]) -> dict[str, Any]:
    """What `harness.arguments` needs for `layers`."""
    return {
        "rows": {"type": int, "default": SIZE, "help": "out_features"},
        "features": {"type": int, "default": SIZE, "help": "in_features"},
        "tokens": {"default": ",".join(map(str, tokens)), "help": "values of M"},
    }


def layers(
    args: argparse.Namespace,
    tokens: Sequence[int],
    narrow: Sequence[tuple[int, int]] = NARROW,
    narrow_tokens: Sequence[int] = (),
) -> Iterator[tuple[Layer, Sequence[int]]]:
    """Layers to time, and with how many tokens: 4096 x 4096 and `narrow` ones; by --rows, --features or --tokens one.

    One at a time, since a layer may take several GiB with what is kept of it.
    """
    whole = (args.rows, args.features, args.tokens) == (SIZE, SIZE, ",".join(map(str, tokens)))
    yield Layer(args.rows, args.features), [int(M) for M in args.tokens.split(",")]
    for rows, features in narrow if whole else ():
        yield Layer(rows, features, f", {rows} x {features}"), narrow_tokens
