"""Samples and hostile arguments of every op, for tests that enumerate the registry so that no op can be forgotten.

A new op without an entry in `SPECS` fails `tests/ops/test_registry.py`.
"""

from __future__ import annotations

import torch

from halfbyte.testing import adapters, codecs, optimizers, products
from halfbyte.testing.calls import ALL_FORMATS, AWKWARD_K, Call, Hostile, OpSpec, Samples, keywords_of, random_packed

__all__ = ["ALL_FORMATS", "AWKWARD_K", "SPECS", "Call", "OpSpec", "keywords_of", "random_packed", "registered_ops"]


def registered_ops() -> list[str]:
    """Names of all ops in the `halfbyte` namespace, without those of overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].split(".")[0] for name in names if name.startswith("halfbyte::")})


def _no_arguments(device: str) -> Samples:
    yield ()


def _nothing_hostile(device: str) -> Hostile:
    yield from ()


SPECS: dict[str, OpSpec] = {
    **codecs.SPECS,
    **products.SPECS,
    **adapters.SPECS,
    **optimizers.SPECS,
    "cpu_isa": OpSpec(_no_arguments, _nothing_hostile),
    "clear_workspace": OpSpec(_no_arguments, _nothing_hostile),
    "workspace_bytes": OpSpec(_no_arguments, _nothing_hostile),
}
"""Every op of the registry."""
