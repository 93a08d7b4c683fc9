"""A quick look at the ops on this machine, beside torch's dense ones and bitsandbytes where it is installed.

The full benchmarks, which verify results, interleave more peers and look for quiet moments, are in the repository's
`benchmarks` folder; this is what an installed package can do by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from halfbyte.formats import Format
from halfbyte.ops.dequantize import dequantize
from halfbyte.ops.linear import linear
from halfbyte.ops.quantize import quantize

__all__ = ["BenchRow", "run_benchmarks"]


@dataclass(frozen=True)
class BenchRow:
    """One comparison.

    Attributes:
        what: the work.
        milliseconds: median per peer; "halfbyte" is always there.
    """

    what: str
    milliseconds: dict[str, float]


def run_benchmarks(size: int = 2048, format: str | Format = "nf4", seconds: float = 1.0) -> list[BenchRow]:
    """Times quantize, dequantize and linear on one weight of (size, size), the peers taking turns.

    Args:
        size: rows and columns of the weight.
        format: the format to time; bitsandbytes joins for "nf4" and "fp4".
        seconds: time for each comparison.

    Returns:
        A `BenchRow` per comparison, bfloat16 where the CPU multiplies in it and float32 elsewhere.

    Raises:
        ValueError: unknown format, or size below 1.
    """
    fmt = Format.parse(format)
    if size < 1:
        raise ValueError(f"run_benchmarks: size must be at least 1, got {size}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast = device == "cuda" or torch.cpu._is_avx512_bf16_supported()
    dtype = torch.bfloat16 if fast else torch.float32
    weight = torch.randn(size, size, device=device, dtype=dtype)
    packed = quantize(weight, fmt)
    theirs = _bitsandbytes(weight, str(fmt))
    rows = [
        _compare(f"quantize to {fmt}", {"halfbyte": lambda: quantize(weight, fmt), **theirs("quantize")}, seconds),
    ]
    cases: dict[str, Callable[[], Any]] = {"halfbyte": lambda: dequantize(packed, fmt, size, dtype), **theirs("dequantize")}
    rows.append(_compare(f"dequantize {fmt}", cases, seconds))
    for tokens in (1, 64, 512):
        input = torch.randn(tokens, size, device=device, dtype=dtype)
        cases = {
            "halfbyte": partial(linear, input, packed, None, fmt, size),
            "torch dense": partial(torch.nn.functional.linear, input, weight),
            **theirs("linear", input),
        }
        rows.append(_compare(f"linear {fmt}, {tokens} tokens", cases, seconds))
    return rows


def _compare(what: str, cases: dict[str, Callable[[], Any]], seconds: float) -> BenchRow:
    cuda = torch.cuda.is_available()
    times: dict[str, list[float]] = {name: [] for name in cases}
    with torch.inference_mode():
        for run in cases.values():
            run()
        end = time.perf_counter() + seconds
        while len(times["halfbyte"]) < 3 or time.perf_counter() < end:
            for name, run in cases.items():
                began = time.perf_counter()
                run()
                if cuda:
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - began)
    return BenchRow(what, {name: 1e3 * statistics.median(values) for name, values in times.items()})


def _bitsandbytes(weight: torch.Tensor, format: str) -> Callable[..., dict[str, Callable[[], Any]]]:
    """The versions of an op that bitsandbytes has: none where it is missing or has no such format."""
    try:
        import bitsandbytes.functional as theirs
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]
    except ImportError:
        return lambda *_: {}
    if format not in ("nf4", "fp4"):
        return lambda *_: {}
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type=format)

    def cases(op: str, input: Any = None) -> dict[str, Callable[[], Any]]:
        run = {
            "quantize": lambda: theirs.quantize_4bit(weight, blocksize=64, quant_type=format),
            "dequantize": lambda: theirs.dequantize_4bit(packed, state),
            "linear": lambda: matmul_4bit(input, packed.t(), quant_state=state),
        }[op]
        return {"bitsandbytes": run}

    return cases
