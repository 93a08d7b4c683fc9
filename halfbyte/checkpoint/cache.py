"""The cache of quantized checkpoints: quantized folders, named by what they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.files import INDEX, VERSION, Checkpoint
from halfbyte.checkpoint.folder import sweep, temporary_of, write_folder
from halfbyte.checkpoint.sources import CheckpointSource, Entry
from halfbyte.errors import QuantizationError

__all__ = ["Cache"]


class Cache:
    """One entry of a cache folder.

    It is found by what it was made from: the source's path, its files' sizes, times of change and headers (or all of their
    content), halfbyte's version of the format, and what each tensor becomes. Each file repeats that key in its header, and
    every tensor is checked against its checksum while it is read.

    Args:
        cache_dir: the folder of all entries.
        source: what it is made from.
        entries: what it holds.
        verify: "fast" or "full".
        tick: called with the bytes of every piece that is hashed or written; may raise to give up.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        source: CheckpointSource,
        entries: Sequence[Entry],
        verify: str,
        tick: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.source, self.entries, self.tick = source, entries, tick
        made_from = {
            "version": VERSION,
            "path": str(source.checkpoint.path),
            "files": source.checkpoint.identity(verify, tick),
            "tensors": [[e.name, list(e.shape), str(e.dtype), str(e.format)] for e in entries],
        }
        self.key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        self.folder = Path(cache_dir) / self.key[:32]
        self._seen: int | None = None  # inode of the folder that was found damaged

    def open(self) -> CheckpointSource | None:
        """The entry if it is there and its headers are right; None (with a warning if it is damaged) otherwise."""
        if not (self.folder / INDEX).exists():
            return None
        self._seen = os.stat(self.folder).st_ino
        try:
            checkpoint = Checkpoint(self.folder)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            self.warn(error)
            return None
        held = checkpoint.tensors
        wrong = [e.name for e in self.entries if e.name not in held or held[e.name].checksum is None]
        if wrong or any(header is None or header.get("key") != self.key for header in checkpoint.headers):
            checkpoint.close()
            self.warn(QuantizationError(f"{wrong[0]} is not in it" if wrong else "it was made from something else"))
            return None
        for entry in self.entries:
            stored = held[entry.name]
            if stored.shape != entry.shape or stored.dtype != entry.dtype or stored.format != entry.format:
                checkpoint.close()
                self.warn(QuantizationError(f"{entry.name} is {stored.dtype} of shape {stored.shape}"))
                return None
        return CheckpointSource(checkpoint)

    def warn(self, error: Any) -> None:
        """Says once that the entry is damaged."""
        warnings.warn(
            f"load_quantized: the cache {self.folder} is damaged ({error}); it is made anew from "
            f"{self.source.checkpoint.path}",
            stacklevel=3,
        )

    def rebuild(self) -> None:
        """Makes the entry from its source, in a folder of its own that then takes its place.

        Raises:
            OSError: it can't be written.
            QuantizationError: the source is damaged, or changed meanwhile.
        """
        own = temporary_of(self.folder)
        try:
            if self.folder.parent.is_dir():
                sweep(self.folder.parent)
            write_folder(own, self.entries, self.source, key=self.key, tick=self.tick)
            self.source.checkpoint.check_unchanged()
            try:
                os.rename(own, self.folder)
            except OSError:
                if self.folder.stat().st_ino != self._seen:
                    return  # a concurrent writer was faster, with the same content
                old = own.with_suffix(".old")
                os.rename(self.folder, old)  # who reads it has its files open
                shutil.rmtree(old, ignore_errors=True)
                os.rename(own, self.folder)
        finally:
            shutil.rmtree(own, ignore_errors=True)
