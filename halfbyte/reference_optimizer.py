"""The slow oracle of the 8-bit optimizers: the dynamic map, its codec and every update rule, written from the rules.

Everything is numpy in fp32 with one rounding per written operation; ``fma`` rounds once. Subnormal numbers count as
zero throughout: an operand or a result below 2**-126 in magnitude is a zero of its sign. Kernels must give these bits.

Source: the rules are those of ``torch.optim`` (order of weight decay, dampening, nesterov) and of Chen et al. 2023
(arXiv:2302.06675) for Lion; block-wise dynamic quantization is Dettmers et al. 2022 (arXiv:2110.02861).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = Any  # fp32, any shape; also an fp32 scalar
Codes = npt.NDArray[np.uint8]
Rule = Literal["adamw", "adam", "lion", "sgd"]

STATE_BLOCK = 256
ELIGIBLE_NUMEL = 4096
_SMALLEST_NORMAL = np.float32(2.0**-126)


def flush(x: Array) -> Array:
    """Subnormal numbers of ``x`` as zeros of their sign."""
    return np.asarray(np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x), np.float32)


def ieee_fma(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` with one rounding to fp32: fp64 with round-to-odd, then rounded (53 >= 2 * 24 + 2 bits)."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact: 48 bits
    addend = np.asarray(c, np.float64)
    total = product + addend
    with np.errstate(invalid="ignore"):
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)  # what the sum lost, exactly (Knuth's TwoSum)
    bits = np.atleast_1d(total).view(np.int64)
    nudge = np.where(np.sign(error) == np.sign(total), 1, -1)
    inexact = np.atleast_1d((error != 0) & np.isfinite(error) & np.isfinite(total)) & (bits % 2 == 0)
    odd = np.where(inexact, bits + np.atleast_1d(nudge), bits).view(np.float64)
    with np.errstate(over="ignore"):
        return odd.reshape(np.shape(total)).astype(np.float32)


def fma(a: Array, b: Array, c: Array) -> Array:
    """`ieee_fma` with subnormal results as zeros."""
    return flush(ieee_fma(a, b, c))


@functools.cache
def dynamic_map(signed: bool) -> Array:
    """The 256 values of the map, by code, ascending (see docs/formats.md)."""
    values = []
    for code in range(256):
        m = abs(code - 127) if signed else code + 1
        if code == 255:
            values.append(np.float32(1))
        elif (signed and m == 0) or (not signed and code == 0):
            values.append(np.float32(0))
        else:
            e = math.floor(math.log2(m))
            p = 10.0 ** (e - 6) if signed else 10.0 ** (e - 7)
            slope, offset = np.float32(0.9 * p / 2**e), np.float32(p * (0.45 / 2**e - 0.8))
            value = fma(np.float32(m), slope, offset)
            values.append(-value if signed and code < 127 else value)
    return np.array(values, np.float32)


def nearest_code(x: Array, signed: bool) -> Codes:
    """Codes of normalized values: nearest entry, ties to the smaller magnitude; unsigned: 0 only for values <= 0."""
    table = dynamic_map(signed).astype(np.float64)
    x = np.asarray(x, np.float64)
    upper = np.clip(np.searchsorted(table, x), 1, 255)
    below, above = table[upper - 1], table[upper]
    down, up = x - below, above - x
    code = np.where((down < up) | ((down == up) & (np.abs(below) < np.abs(above))), upper - 1, upper)
    if not signed:
        code = np.where(x > 0, np.maximum(code, 1), 0)
    return code.astype(np.uint8)


def encode_block(x: Array, signed: bool) -> tuple[Codes, np.float32]:
    """One block of finite moments to codes and scale."""
    x = flush(np.asarray(x, np.float32))
    absmax = np.max(np.abs(x), initial=np.float32(0))
    zero = np.uint8(127 if signed else 0)
    if absmax == 0:
        return np.full(x.shape, zero), np.float32(0)
    quarter = np.float32(0.25 if absmax > np.float32(2.0**126) else 1)  # keeps the reciprocal a normal number
    scaled = flush(x * quarter)
    normalized = flush(scaled * (np.float32(1) / (absmax * quarter)))
    codes = nearest_code(normalized, signed)
    if not signed:
        codes = np.where(scaled > 0, np.maximum(codes, 1), 0).astype(np.uint8)  # positive although the product underflowed
    return codes, absmax


def decode_block(codes: Codes, scale: np.float32, signed: bool) -> Array:
    """Values of one block."""
    return flush(dynamic_map(signed)[codes] * np.float32(scale))


def num_blocks(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """``(N, K, blocks per row)`` of a parameter's shape; a 1-D parameter is one row."""
    rows, length = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
    return rows, length, -(-length // STATE_BLOCK)


def philox(counter: int, step: int, seed: int) -> list[int]:
    """Philox 4x32-10 of (counter, step) under the key ``seed``: four 32-bit words (Salmon et al. 2011)."""
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32 & mask, step & mask, 0]
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def random_bits(index: int, step: int, seed: int) -> int:
    """The 16 random bits of one element: eight neighbouring global indices share one Philox block."""
    word = philox(index // 8, step, seed)[index % 8 // 2]
    return word >> (index % 2 * 16) & 0xFFFF


def round_stochastic(x: float, dtype: Literal["bfloat16", "float16"], random: int) -> float:
    """``x`` rounded to the larger of its two neighbours with the probability of its distance from the smaller one."""
    if not math.isfinite(x) or x == 0:
        return x
    digits, smallest, limit = (8, -126, 2.0**128) if dtype == "bfloat16" else (11, -14, 65536.0)
    if abs(x) >= limit:
        return math.copysign(math.inf, x)
    exponent = max(math.frexp(abs(x))[1] - 1, smallest)
    spacing = 2.0 ** (exponent - digits + 1)
    below = math.floor(abs(x) / spacing)
    fraction = abs(x) / spacing - below
    if dtype == "float16" and exponent > smallest:
        random = random >> 3 << 3  # normal fp16 values have 13 bits below the rounding position
        fraction = math.floor(fraction * 8192) / 8192
    else:
        fraction = math.floor(fraction * 65536) / 65536
    rounded = (below + (fraction + random / 65536 >= 1)) * spacing
    return math.copysign(math.inf if rounded >= limit else rounded, x)


@dataclass
class Hyper:
    """Hyper-parameters of a step; those that a rule does not have are ignored."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    grad_scale: float = 1.0


@dataclass
class State:
    """State of one parameter: codes of its shape and scales (N, blocks per row), per moment."""

    codes: list[Codes] = field(default_factory=list)
    scales: list[Array] = field(default_factory=list)

    @staticmethod
    def zeros(shape: tuple[int, ...], rule: Rule) -> State:
        """State before the first step of a parameter of this shape."""
        rows, _, blocks = num_blocks(shape)
        signs = (True, False) if rule in ("adamw", "adam") else (True,)
        return State(
            [np.full(shape, 127 if signed else 0, np.uint8) for signed in signs],
            [np.zeros((rows, blocks), np.float32) for _ in signs],
        )


def update(rule: Rule, param: Array, grad: Array, moments: list[Array], h: Hyper, step: int) -> tuple[Array, list[Array]]:
    """One step of one block on stored moments: returns the new parameter (before its rounding) and the new moments.

    ``moments`` are pairs folded already: ``(map values, scale)`` per moment, because ``scale * beta`` is one product.
    """

    def f(x: float | np.float32) -> Array:
        return flush(np.float32(x))

    (first, first_scale), *rest = moments
    param = flush(param)
    g = flush(grad * f((-1.0 if h.maximize else 1.0) / h.grad_scale))
    if rule in ("adam", "sgd") and f(h.weight_decay) != 0:
        g = fma(f(h.weight_decay), param, g)

    def mix(values: Array, scale: np.float32, keep: float, term: Array) -> Array:
        return fma(values, flush(f(scale) * f(keep)), term)

    if rule in ("adamw", "adam"):
        ((second, second_scale),) = rest
        m = mix(first, first_scale, h.beta1, flush(g * f(1 - h.beta1)))
        v = mix(second, second_scale, h.beta2, flush(flush(g * g) * f(1 - h.beta2)))
        factor = f(1 / math.sqrt(1 - h.beta2**step))
        ratio = flush(m / fma(np.sqrt(v), factor, f(h.eps)))
        kept = flush(param * f(1 - h.lr * h.weight_decay)) if rule == "adamw" else param
        return fma(f(-(h.lr / (1 - h.beta1**step))), ratio, kept), [m, v]
    if rule == "lion":
        mixed = mix(first, first_scale, h.beta1, flush(g * f(1 - h.beta1)))
        sign = np.where(np.isfinite(mixed), np.sign(mixed), np.float32(np.nan)).astype(np.float32)
        m = mix(first, first_scale, h.beta2, flush(g * f(1 - h.beta2)))
        return fma(f(-h.lr), sign, flush(param * f(1 - h.lr * h.weight_decay))), [m]
    m = mix(first, first_scale, h.momentum, flush(g * f(1 if step == 1 else 1 - h.dampening)))
    direction = fma(f(h.momentum), m, g) if h.nesterov else m
    return fma(f(-h.lr), direction, param), [m]


def step(rule: Rule, param: Array, grad: Array, state: State, h: Hyper, count: int) -> tuple[Array, State]:
    """One step of a whole parameter (fp32 arrays of any shape): the new fp32 parameter and the new state."""
    rows, length, blocks = num_blocks(param.shape)
    new = State([c.copy() for c in state.codes], [s.copy() for s in state.scales])
    out = param.astype(np.float32).reshape(rows, length).copy()
    g = grad.astype(np.float32).reshape(rows, length)
    with np.errstate(all="ignore"):
        for r in range(rows):
            for b in range(blocks):
                at = slice(b * STATE_BLOCK, min((b + 1) * STATE_BLOCK, length))
                moments = [
                    (dynamic_map(i == 0)[c.reshape(rows, length)[r, at]], s[r, b])
                    for i, (c, s) in enumerate(zip(state.codes, state.scales, strict=True))
                ]
                out[r, at], updated = update(rule, out[r, at], g[r, at], moments, h, count)
                finite = np.logical_and.reduce([np.isfinite(moment) for moment in updated])
                for i, moment in enumerate(updated):  # moments that are not all finite start over
                    codes, scale = encode_block(np.where(finite, moment, np.float32(0)), signed=i == 0)
                    new.codes[i].reshape(rows, length)[r, at] = codes
                    new.scales[i][r, b] = scale
    return out.reshape(param.shape), new
