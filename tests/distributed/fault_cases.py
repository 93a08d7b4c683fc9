"""What can go wrong while three ranks load: the cases of faults.py and how each is injected."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from checkpoints import check, on_meta

import halfbyte
from halfbyte.checkpoint import cache as cache_module
from halfbyte.checkpoint import files, layout, load, sources
from halfbyte.distributed import connections


class Moment:
    """When it happened; on one rank."""

    def __init__(self, ends: signal.Signals | None) -> None:
        self.at: float | None = None
        self.ends = ends

    def __call__(self) -> None:
        """Fails, in the way that the case says."""
        self.at = time.time()
        if self.ends is not None:
            print("RECORD " + json.dumps({"at": self.at}), flush=True)
            os.kill(os.getpid(), self.ends)
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
        ends: the signal that ends that rank; None: it raises.
        checkpoint: folder that is loaded.
        cached: load with cache_dir.
        prepare: on rank 0 before each load.
        arguments: of the load on a rank.
        build: the model on a rank.
        warning: pattern of what the source warns of.
        silence: seconds that a rank may say nothing while it works by itself; None: the usual.
    """

    title: str
    inject: Inject = nothing
    text: str | None = r"rank 0 \(the source\) failed: OSError: disk read error \(injected\)|^disk read error \(injected\)"
    rank: int = 0
    ends: signal.Signals | None = None
    checkpoint: str = "dense"
    cached: bool = False
    prepare: Callable[[Path], None] = lambda folder: None
    arguments: Callable[[int], dict[str, Any]] = lambda rank: {}
    build: Callable[[int], Any] = lambda rank: on_meta("nf4")
    warning: str | None = None
    silence: float | None = None

    @property
    def killed(self) -> bool:
        """Whether that rank does not survive."""
        return self.ends is not None


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
    other = subprocess.Popen([sys.executable, __file__, str(folder)], env=os.environ)
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
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
GONE = r"a rank ended or stopped answering while loading from rank 0 \(the source\)"
FAULTS = {
    "source raises before": Fault("the source's disk fails before the first bucket", on_call(files.Checkpoint, "__init__")),
    "source raises during": Fault("the source's disk fails inside a bucket", on_call(*FILL, 9)),
    "source raises after": Fault(
        "the source's disk fails after the last bucket", on_call(files.Checkpoint, "check_unchanged")
    ),
    "source dies before": Fault(
        "the source is killed before the first bucket", on_call(files.Checkpoint, "__init__"), GONE, ends=KILLED
    ),
    "source dies during": Fault("the source is killed inside a bucket", on_call(*FILL, 9), GONE, ends=KILLED),
    "source dies after": Fault(
        "the source is killed after the last bucket", on_call(connections.LoaderGroup, "finish"), GONE, ends=KILLED
    ),
    "source dies in the cache": Fault(
        "the source is killed while it writes the cache",
        on_call(*FILL, 9),
        GONE,
        ends=KILLED,
        cached=True,
        prepare=without_entry,
    ),
    "receiver raises": Fault(
        "a receiver can't keep what it got",
        on_call(layout.Slot, "write", 5),
        r"rank 1 failed: OSError: disk read error \(injected\)|^disk read error \(injected\)",
        rank=1,
    ),
    "receiver dies": Fault("a receiver is killed", on_call(layout.Slot, "write", 5), GONE, rank=1, ends=KILLED),
    "receiver hangs": Fault(
        "a receiver is stopped before it has planned (2.5 s of silence allowed instead of 60)",
        on_call(load._Request, "settings"),
        GONE,
        rank=1,
        ends=STOPPED,
        silence=2.5,
    ),
    "receiver is slow": Fault(
        "a receiver plans for 5 s, longer than the 4.5 s of silence allowed, and says that it is alive",
        on_call(load._Request, "settings", act=lambda folder: time.sleep(5.0)),
        text=None,
        rank=1,
        silence=4.5,
    ),
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


if __name__ == "__main__":
    write_beside(Path(sys.argv[1]))
