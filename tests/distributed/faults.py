"""What can go wrong while three ranks load: injected, timed and judged, for test_loading.py and benchmarks/bench_faults.py.

`run(names, folder)` starts the ranks, which run this file. Every outcome is checked: each survivor raised with the right
text within 10 s, or all recovered with the right weights; a collective of the survivors works afterwards; every byte of the
checkpoint and of finished cache entries is what it was; and the next load gives the right weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checkpoints import check, on_meta, write_dense
from ranks import run_ranks

import halfbyte
from halfbyte.checkpoint import cache as cache_module
from halfbyte.checkpoint import files, layout, sources
from halfbyte.distributed import loading

WORLD, LIMIT_S = 3, 10.0


class Moment:
    """When it happened; on one rank."""

    def __init__(self, killed: bool) -> None:
        self.at: float | None = None
        self.killed = killed

    def __call__(self) -> None:
        """Fails, in the way that the case says."""
        self.at = time.time()
        if self.killed:
            print("RECORD " + json.dumps({"at": self.at}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("disk read error (injected)")


Inject = Callable[[ExitStack, Moment, Path], None]


def nothing(stack: ExitStack, moment: Moment, folder: Path) -> None:
    """The fault is in the arguments or on disk."""


def on_call(owner: Any, name: str, number: int = 1, act: Callable[[Path], None] | None = None) -> Inject:
    """Before the `number`-th call of a method `act` runs, or else the rank fails."""

    def inject(stack: ExitStack, moment: Moment, folder: Path) -> None:
        original, calls = getattr(owner, name), [0]

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                if act is None:
                    moment()
                moment.at = time.time()
                act(folder)
            return original(*args, **kwargs)

        stack.enter_context(patch.object(owner, name, call))

    return inject


@dataclass(frozen=True)
class Fault:
    """One way to fail.

    Attributes:
        title: for people.
        inject: on rank `rank`, before the load.
        text: pattern of what every survivor's error says; None: all ranks recover.
        rank: on which it happens.
        killed: that rank is killed instead of raising.
        checkpoint: folder that is loaded.
        cached: load with cache_dir.
        prepare: on rank 0 before each load.
        arguments: of the load on a rank.
        build: the model on a rank.
        warning: pattern of what the source warns of.
    """

    title: str
    inject: Inject = nothing
    text: str | None = r"rank 0 \(the source\) failed: OSError: disk read error \(injected\)|^disk read error \(injected\)"
    rank: int = 0
    killed: bool = False
    checkpoint: str = "dense"
    cached: bool = False
    prepare: Callable[[Path], None] = lambda folder: None
    arguments: Callable[[int], dict[str, Any]] = lambda rank: {}
    build: Callable[[int], Any] = lambda rank: on_meta("nf4")
    warning: str | None = None


def shard(folder: Path, format: str = "nf4") -> Path:
    """The shard of a cache entry."""
    for file in (folder / "cache").glob("*/*.safetensors"):
        with files.Checkpoint(file) as found:
            if format in {str(stored.format) for stored in found}:
                return file
    raise AssertionError(f"no {format} in {folder / 'cache'}")


def flip(folder: Path) -> None:
    file = shard(folder)
    with open(file, "r+b") as stream:
        stream.seek(-100, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-100, os.SEEK_END)
        stream.write(bytes([byte ^ 4]))


def cut(file: Path, size: int = 1000) -> None:
    os.truncate(file, file.stat().st_size - size)


def overwrite(folder: Path) -> None:
    with open(folder / "dense" / "model-00002-of-00002.safetensors", "r+b") as stream:
        stream.seek(-500, os.SEEK_END)
        stream.write(b"\1" * 100)
    remember(folder, "changed.json")


def shorten(folder: Path) -> None:
    cut(folder / "dense" / "model-00002-of-00002.safetensors")
    remember(folder, "changed.json")


def without_entry(folder: Path) -> None:
    shutil.rmtree(shard(folder).parent)


def other_writer(stack: ExitStack, moment: Moment, folder: Path) -> None:
    """Another job's process makes the same cache entry, and neither finishes before both have begun."""
    flags = folder / "flags"
    shutil.rmtree(flags, ignore_errors=True)
    flags.mkdir()
    other = subprocess.Popen([sys.executable, __file__, "writer", str(folder)], env=os.environ)
    stack.callback(lambda: other.wait(60) and sys.exit("the other writer failed"))
    waits(flags / "ready")
    original = cache_module.write_folder

    def together(*args: Any, **kwargs: Any) -> Any:
        (flags / "ours").touch()
        waits(flags / "theirs")
        return original(*args, **kwargs)

    stack.enter_context(patch.object(cache_module, "write_folder", together))


def write_beside(folder: Path) -> None:
    """The other process of `other_writer`: no rank."""
    flags, original = folder / "flags", cache_module.write_folder

    def together(*args: Any, **kwargs: Any) -> Any:
        (flags / "theirs").touch()
        waits(flags / "ours")
        return original(*args, **kwargs)

    model = on_meta()
    (flags / "ready").touch()
    with patch.object(cache_module, "write_folder", together):
        halfbyte.load_quantized(model, folder / "dense", cache_dir=folder / "cache", progress=False)
    check(model)


def waits(flag: Path) -> None:
    for _ in range(6000):
        if flag.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(f"{flag} never came")


FILL = (sources.CheckpointSource, "fill")
GONE = r"a rank ended or stopped answering while loading from rank 0 \(the source\)"
FAULTS = {
    "source raises before": Fault("the source's disk fails before the first bucket", on_call(files.Checkpoint, "__init__")),
    "source raises during": Fault("the source's disk fails inside a bucket", on_call(*FILL, 9)),
    "source raises after": Fault(
        "the source's disk fails after the last bucket", on_call(files.Checkpoint, "check_unchanged")
    ),
    "source dies before": Fault(
        "the source is killed before the first bucket", on_call(files.Checkpoint, "__init__"), GONE, killed=True
    ),
    "source dies during": Fault("the source is killed inside a bucket", on_call(*FILL, 9), GONE, killed=True),
    "source dies after": Fault(
        "the source is killed after the last bucket", on_call(loading.LoaderGroup, "finish"), GONE, killed=True
    ),
    "source dies in the cache": Fault(
        "the source is killed while it writes the cache",
        on_call(*FILL, 9),
        GONE,
        killed=True,
        cached=True,
        prepare=without_entry,
    ),
    "receiver raises": Fault(
        "a receiver can't keep what it got",
        on_call(layout.Slot, "write", 5),
        r"rank 1 failed: OSError: disk read error \(injected\)|^disk read error \(injected\)",
        rank=1,
    ),
    "receiver dies": Fault("a receiver is killed", on_call(layout.Slot, "write", 5), GONE, rank=1, killed=True),
    "format differs": Fault(
        "ranks ask for different formats",
        text=r"ranks differ in format: rank 0 \(the source\) has fp4, rank 1 has nf4",
        arguments=lambda rank: {"format": "nf4" if rank else "fp4"},
        build=lambda rank: on_meta(),
    ),
    "model differs": Fault(
        "ranks have different models",
        text="ranks differ in model: ",
        build=lambda rank: on_meta("nf4" if rank else "fp4"),
    ),
    "truncated": Fault("truncated checkpoint", text="truncated or damaged: .* ends at byte", checkpoint="truncated"),
    "rewritten": Fault(
        "the checkpoint is rewritten while it is read",
        on_call(*FILL, 9, overwrite),
        "was changed while it was being read",
    ),
    "shortened": Fault(
        "the checkpoint is truncated while it is read", on_call(*FILL, 9, shorten), "truncated while .* was read"
    ),
    "flipped bit": Fault(
        "cache: a flipped bit", text=None, cached=True, prepare=flip, warning="is damaged: its checksum is"
    ),
    "cache cut": Fault(
        "cache: a truncated file",
        text=None,
        cached=True,
        prepare=lambda folder: cut(shard(folder)),
        warning=r"is damaged .*truncated or damaged",
    ),
    "two writers": Fault("cache: two jobs write it at once", other_writer, text=None, cached=True, prepare=without_entry),
}
"""The cases of the fault table."""

CHANGING = ("rewritten", "shortened")
"""Those after which the checkpoint is another one."""

ARGUMENTS = {
    "nowhere": Fault("no such folder", text="no checkpoint at", checkpoint="nowhere"),
    "lazy": Fault("lazy", text="lazy=True works in one process", arguments=lambda rank: {"lazy": True}),
    "shape": Fault(
        "another shape",
        text=r"embedding.weight: has shape \(51, 96\) in the checkpoint",
        build=lambda rank: wider(),
    ),
}
"""Plain mistakes, which must be as harmless."""


def wider() -> torch.nn.Module:
    model = on_meta("nf4")
    model.embedding = torch.nn.Embedding(52, 96, device="meta")
    model.lm_head = torch.nn.Linear(96, 52, bias=False, device="meta")
    model.lm_head.weight = model.embedding.weight
    return model


# -- the disk


def snapshot(folder: Path) -> dict[str, str]:
    """Hashes of the checkpoints' and of the cache's files; what is hidden is being written."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for part in ("dense", "truncated", "cache")
        for file in sorted((folder / part).rglob("*"))
        if file.is_file() and not any(name.startswith(".") for name in file.relative_to(folder).parts)
    }


def remember(folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps(snapshot(folder)))


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
    moment, seen = Moment(fault.killed), list[str]()
    with ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
    assert took < LIMIT_S, (name, took)
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
    if sys.argv[1] == "writer":
        write_beside(Path(sys.argv[2]))
    else:
        rank_main(sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3]))
