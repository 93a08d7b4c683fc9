"""What can go wrong while three ranks load: injected, timed and judged, for test_loading.py and benchmarks/bench_faults.py.

`run(names, folder)` starts the ranks, which run this file. Every outcome is checked: each survivor raised with the right
text within 10 s, or all recovered with the right weights; a collective of the survivors works afterwards; every byte of the
checkpoint and of finished cache entries is what it was; and the next load gives the right weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checkpoints import check, on_meta, write_dense
from fault_cases import ARGUMENTS, CHANGING, FAULTS, Fault, Moment, cut, other_writer, snapshot
from ranks import run_ranks

import halfbyte
from halfbyte.distributed import connections, loading

WORLD = 3
LIMIT_S = 6.0  # 10 are promised; 8, a timeout, would mean that a closed connection went unnoticed


def prepare(folder: Path) -> None:
    """A checkpoint, the same truncated, and a cache with two entries, one of them of no load here."""
    write_dense(folder / "dense")
    shutil.copytree(folder / "dense", folder / "truncated")
    cut(folder / "truncated" / "model-00002-of-00002.safetensors")
    shutil.copytree(folder / "dense", folder / "pristine")
    for format in ("nf4", "fp4"):
        halfbyte.load_quantized(on_meta(), folder / "dense", format, cache_dir=folder / "cache", progress=False)


# -- the ranks


def attempt(name: str, fault: Fault, folder: Path, survivors: Any) -> dict[str, Any]:
    """One load on this rank: what became of it."""
    rank = dist.get_rank()
    if rank == 0:
        for file in (folder / "pristine").iterdir():  # times of change too: the cache goes by them
            shutil.copy2(file, folder / "dense" / file.name)
        fault.prepare(folder)
    dist.barrier()
    moment, seen = Moment(fault.ends), list[str]()
    with ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stack.enter_context(patch.object(connections, "SILENCE_S", fault.silence or connections.SILENCE_S))
        if rank == fault.rank:
            fault.inject(stack, moment, folder)
        model, error, kept, threads = fault.build(rank), None, None, gloo_threads()
        if fault.inject is other_writer:  # which took its time to start
            dist.barrier()
        begun = time.time()
        try:
            cache = {"cache_dir": folder / "cache"} if fault.cached else {}
            path = folder / fault.checkpoint
            halfbyte.load_quantized(model, path, progress=False, **cache, **fault.arguments(rank))
        except Exception as raised:
            error, kept = str(raised), raised
        ended = time.time()
        # Whoever keeps the exception must not keep the loader's threads: torch aborts if they outlive the interpreter.
        assert gloo_threads() == threads, (gloo_threads(), threads, kept)
        if error is None:
            check(model)
        seen = [str(warning.message) for warning in caught if "load_quantized" in str(warning.message)]
    total = torch.ones(1)
    dist.all_reduce(total, group=survivors)
    usable = total.item() == WORLD - fault.killed
    return {"case": name, "begun": begun, "ended": ended, "at": moment.at, "error": error, "seen": seen, "usable": usable}


def gloo_threads() -> int:
    tasks = Path("/proc/self/task")
    return sum((task / "comm").read_text().strip() == "pt_gloo_runloop" for task in tasks.iterdir())


def rank_main(names: Sequence[str], folder: Path, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loading.BUCKET_BYTES = 4096  # many buckets, and rows of an entry in several
    faults = {**FAULTS, **ARGUMENTS}
    gone = {faults[name].rank for name in names if faults[name].killed}
    survivors = dist.new_group([rank for rank in range(WORLD) if rank not in gone])
    dist.all_reduce(torch.ones(1), group=survivors) if dist.get_rank() not in gone else None  # connects them
    for name in names:
        for _ in range(repeats):
            print("RECORD " + json.dumps(attempt(name, faults[name], folder, survivors)), flush=True)
    os._exit(0)  # a group with a dead member can't be destroyed


# -- the judge


@dataclass
class Outcome:
    """What one case did, in each of its repetitions.

    Attributes:
        seconds: from the fault (or the start of the load) until the last survivor had raised or recovered.
        message: what a rank without the fault saw.
        usable: whether a collective of the survivors worked afterwards.
        unharmed: whether all bytes on disk were what they had to be.
    """

    seconds: list[float] = field(default_factory=list)
    message: str = ""
    usable: bool = True
    unharmed: bool = True


def run(names: Sequence[str], folder: Path, repeats: int = 1) -> dict[str, Outcome]:
    """Runs cases on three ranks (in one start unless a rank is killed) and checks what came of them.

    Raises:
        AssertionError: a survivor did not raise, or not in time, or with another text; weights are wrong; a byte on disk is.
    """
    faults = {**FAULTS, **ARGUMENTS}
    killed = [name for name in names if faults[name].killed]
    starts = [[name] for name in killed for _ in range(repeats)]
    alive = [name for name in names if name not in killed]
    starts += [[n for n in alive if n not in CHANGING], *([n] for n in alive if n in CHANGING)]
    outcomes = {name: Outcome() for name in names}
    for index, start in enumerate(filter(None, starts)):
        place = folder / f"start-{index}"
        place.mkdir()
        prepare(place)
        before = snapshot(place)
        dead = faults[start[0]].rank if start[0] in killed else None
        arguments = (",".join(start), str(place), str(1 if dead is not None else repeats))
        outputs = run_ranks(Path(__file__), *arguments, world=WORLD, killed=dead, timeout=240)
        records = [[json.loads(line) for line in re.findall(r"^RECORD (.*)$", text, re.M)] for text in outputs]
        unharmed = _disk_is_right(place, before, faults[start[0]])
        died_at = None if dead is None else records.pop(dead)[0]["at"]
        for together in zip(*records, strict=True):
            name = together[0]["case"]
            _judge(name, faults[name], together, died_at, outcomes[name], dead)
            outcomes[name].unharmed &= unharmed
            assert unharmed, (name, before, snapshot(place))
    return outcomes


def _judge(
    name: str, fault: Fault, together: Sequence[dict[str, Any]], died_at: float | None, outcome: Outcome, dead: int | None
) -> None:
    at = died_at or next((r["at"] for r in together if r["at"]), None) or min(r["begun"] for r in together)
    took = max(r["ended"] for r in together) - at
    assert took < LIMIT_S + (fault.silence or 0), (name, took)
    outcome.seconds.append(took)
    for record in together:
        if fault.text is None:
            assert record["error"] is None, (name, record)
        else:
            assert record["error"] is not None and re.search(fault.text, record["error"]), (name, record)
        assert record["usable"], (name, record)
    warned = [text for text in together[0]["seen"] if fault.warning and re.search(fault.warning, text)]
    assert len(warned) == (1 if fault.warning else 0) == len(together[0]["seen"]), (name, together[0]["seen"])
    assert not any(record["seen"] for record in together[1:]) or dead == 0, (name, together)
    other = together[-1]["error"]  # the last rank never has the fault
    outcome.message = other or (warned[0] if warned else "")


def _disk_is_right(folder: Path, before: dict[str, str], fault: Fault) -> bool:
    """Whether files are as they were, or as the fault itself left them, and the next load is right and leaves no rubbish."""
    changed = folder / "changed.json"
    if changed.exists():
        before = json.loads(changed.read_text())
        after = snapshot(folder)
    else:
        after = snapshot(folder)
        if fault.killed and fault.cached:  # its entry had been removed for it to make, and was not made
            before = {name: digest for name, digest in before.items() if (folder / name).exists()}
            assert sum(name.startswith("cache/") for name in before) == sum(name.startswith("cache/") for name in after)
        model = on_meta()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            halfbyte.load_quantized(model, folder / "dense", "nf4", cache_dir=folder / "cache", progress=False)
        check(model)
        assert len(list((folder / "cache").iterdir())) == 2, list((folder / "cache").iterdir())
    return after == before


if __name__ == "__main__":
    rank_main(sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3]))
