"""Patches of host libraries that stand only while an `init_quantized` context is active."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class WhileActive:
    """Replaces attributes of classes, counted: with the first context of any thread, put back with the last.

    Args:
        replace: makes the replacement of an attribute from its original (as it stands in the class's `__dict__`).
        attributes: (class, name) of each.
    """

    def __init__(self, replace: Callable[[Any], Any], attributes: list[tuple[type, str]]) -> None:
        self._replace, self._attributes = replace, attributes
        self._lock = threading.Lock()
        self._depth = 0
        self._originals: list[tuple[type, str, Any]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One context: the patches stand inside it."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._originals = [(owner, name, owner.__dict__[name]) for owner, name in self._attributes]
                for owner, name, original in self._originals:
                    setattr(owner, name, self._replace(original))
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    for owner, name, original in self._originals:
                        setattr(owner, name, original)
