"""Memory of real work on the CPU: the peak of a training step from the allocator's own events, or the process's, sampled.

torch.profiler records every allocation and release of c10's CPU allocator with its size and time; their running sum from a
marker on is what the step really held. Scratch of halfbyte's kernels, which they keep outside that allocator, is added.
Releases on other threads are found late, so that a run with collectives may read too high, never too low: the smallest of a
few runs is the best measurement. Not seen: memory that BLAS libraries take for themselves; `PeakMemory` sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "measured step"


def measured_peak(build: Callable[[], Callable[[], None]], steps: int = 2) -> int:
    """Peak bytes of `steps` calls of what `build` returns; all of both runs under the profiler.

    What `build` allocates and keeps (model, batch, optimizer) counts; what it allocates and releases does not.
    """
    torch.ops.halfbyte.clear_workspace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = build()
        with record_function(MARK):
            for _ in range(steps):
                step()
    return peak_since_mark(recorded)


def peak_since_mark(recorded: Any) -> int:
    """Peak bytes after the first `record_function(MARK)` of a profile, with all that was allocated before and kept."""
    began, changes = _events(recorded)
    total = peak = 0
    live: dict[int, int] = {}
    for time, address, size in changes:
        # Releases on other threads (gloo's) are not recorded; what is allocated at an address again has been released.
        total += size if size < 0 else size - live.get(address, 0)
        if size > 0:
            live[address] = size
        elif live.pop(address, None) is None:
            total -= size
        if time >= began:
            peak = max(peak, total)
    return peak + int(torch.ops.halfbyte.workspace_bytes())


def _events(recorded: Any) -> tuple[int, list[tuple[int, int, int]]]:
    began, changes = None, []
    pending = list(recorded.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        kind = event.tag.name
        if kind == "Allocation" and event.extra_fields.device.type == "cpu":
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == MARK:
            began = event.start_time_ns if began is None else min(began, event.start_time_ns)
    assert began is not None, "the profiler has not recorded the marker"
    return began, sorted(changes, key=lambda change: change[0])


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process: pages of mapped checkpoint files don't count."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """`with PeakMemory() as memory:` samples `anonymous_bytes` every 5 ms: `.bytes` most, `.kept` last, above the start."""

    def __enter__(self) -> PeakMemory:
        self._start = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, anonymous_bytes())

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        now = anonymous_bytes()
        self._most, self.kept = max(self._most, now), now - self._start

    @property
    def bytes(self) -> int:
        return self._most - self._start
