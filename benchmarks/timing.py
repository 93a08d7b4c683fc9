"""Cases timed by turns, in one process, and buffers that no cache holds.

A round gives each case one turn, the next round in the other order (A B B A): drift of the machine hits all of them alike.
A turn is a call that is not timed, for what the turn before left behind (a core that slept through a single thread,
another library's threads that still spin), then up to 5 timed ones in a row, as a training step calls it, or 50 ms of
them. A case gets the number of the call to pick its buffers with (`rotate`); two cases that use the same ones do so
half a rotation apart. A sample is *quiet* when nothing else was runnable before the turn and after the call, and no
host took CPU time from this virtual machine during the turn; a case's time is the median of its quiet samples, or the
lower quintile of all samples when fewer than 5 were quiet (a busy machine only ever adds time). With one thread the
clock is the thread's own CPU time, which other processes do not add to: the better measurement on a machine that is not
idle. Times are seconds, sizes bytes, rates per second.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

TURN_CALLS, TURN_SECONDS = 5, 0.05  # a turn's timed calls: at most so many, none after so long
ROUNDS = 20  # before caches are emptied anew
CALLS = 1 + ROUNDS * (1 + TURN_CALLS)  # of a case in so many rounds, and its first one

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One thing to time: `run(i)` does the work `times` times, on buffer set `i`.

    `bytes` it must move and `flops` it must do each time; 0: unknown.
    """

    run: Callable[[int], object]
    bytes: int = 0
    flops: int = 0
    times: int = 1


@dataclass(frozen=True)
class Timing:
    """Seconds: `median` as in the module's docstring, the 20th and 80th percentile and the best of all samples."""

    median: float
    low: float
    high: float
    best: float
    samples: int
    quiet: int


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0 (32 MiB where the system does not say)."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * units[s[-1]] for s in sizes), default=32 << 20)


class Rotated(Generic[T]):
    """Items that are used in turn: after the last index comes the first item again."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = list(items)

    def __getitem__(self, i: int) -> T:
        return self.items[i % len(self.items)]

    def apart(self, i: int) -> T:
        """The item half a rotation behind [i]: for a second case, which would find in caches what the first one has read."""
        return self[i + len(self.items) // 2]

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def rotate(make: Callable[[int], T], item_bytes: int) -> Rotated[T]:
    """`make(0), make(1), ...`: enough items that using them in turn finds none in the last-level cache (at least 2).

    But no more than two cases use before `interleave` empties caches: thousands of small ones would take long to make.
    """
    past_cache = 1 + -(-2 * last_level_cache() // max(1, item_bytes))
    return Rotated(make(i) for i in range(max(2, min(past_cache, 2 * CALLS))))


@functools.cache
def _other_data() -> torch.Tensor:
    return torch.ones(last_level_cache() // 2)  # twice the cache, in floats


def empty_caches() -> None:
    """Reads twice as much as the last-level cache holds."""
    _other_data().sum()


def reuse_memory() -> None:
    """From here on, freed memory is handed out again with its pages, for every library in the process (glibc).

    By default a tensor of 32 MiB comes from fresh pages, and each first touch of 4 KiB costs about as much as writing 30:
    that measures the system, not a kernel. Time what users see before this call, kernels after it.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL("libc.so.6")
    if not (libc.mallopt(m_mmap_threshold, 1 << 30) and libc.mallopt(m_trim_threshold, (1 << 31) - 1)):
        raise OSError("mallopt refused")


def aligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """(count,) zeros of `dtype`, touched, on a 64-byte boundary."""
    nbytes = count * dtype.itemsize
    raw = torch.zeros(nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    return raw[start : start + nbytes].view(dtype)


def _runnable() -> int:
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])


def _stolen() -> int:
    """10 ms of CPU time, summed over the CPUs, that a host has taken from this virtual machine."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])


def interleave(cases: Mapping[str, Case], rounds: int = ROUNDS, seconds: float = 20.0) -> dict[str, Timing]:
    """A turn for every case per round, every other round backwards: `rounds` times (at least 3), or for so many seconds."""
    alone = torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in cases}
    quiet: dict[str, list[float]] = {name: [] for name in cases}
    calls = {name: itertools.count() for name in cases}
    for name, case in cases.items():
        case.run(next(calls[name]))
    started = time.perf_counter()
    for i in range(rounds):
        if i >= 3 and time.perf_counter() - started > seconds:
            break
        if i % ROUNDS == 0:
            empty_caches()
        for name, case in list(cases.items())[:: -1 if i % 2 else 1]:
            for _ in range(4):  # give a passing process 16 ms to finish
                if before := alone or _runnable() <= 1:
                    break
                time.sleep(0.004)
            case.run(next(calls[name]))
            stolen, undisturbed = _stolen(), []
            turn = time.perf_counter()
            for call in itertools.islice(calls[name], TURN_CALLS):
                begin = clock()
                case.run(call)
                elapsed = (clock() - begin) / case.times
                samples[name].append(elapsed)
                if before and (alone or _runnable() <= 2):  # our own pool may still be spinning down
                    undisturbed.append(elapsed)
                if time.perf_counter() - turn > TURN_SECONDS:
                    break
            if _stolen() == stolen:
                quiet[name] += undisturbed
    return {name: _timing(samples[name], quiet[name]) for name in cases}


def _timing(samples: list[float], quiet: list[float]) -> Timing:
    ordered = sorted(samples)
    low, high = ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5]
    median = statistics.median(quiet) if len(quiet) >= 5 else low
    return Timing(median, low, high, ordered[0], len(samples), len(quiet))
