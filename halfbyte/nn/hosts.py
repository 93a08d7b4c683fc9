"""Host libraries whose loaders build models: their bridge is told of `init_quantized` as soon as the host is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

# The core knows of hosts only whom to tell: importing the bridge registers it above.
_BRIDGES = {"transformers.modeling_utils": "peft_bridge", "peft.peft_model": "peft_bridge"}


def import_bridges() -> None:
    """Imports the bridge of every host that is imported already, and arranges it for hosts that will be."""
    for host, bridge in _BRIDGES.items():
        if bridge not in sys.modules and importlib.util.find_spec(bridge) is not None:
            import_after(host, bridge)


def import_after(host: str, module: str) -> None:
    """Imports `module` now if `host` is imported, else as soon as it will be."""
    if host in sys.modules:
        importlib.import_module(module)
        return
    finders = [finder for finder in sys.meta_path if isinstance(finder, _BridgeFinder)]
    if not any(finder.host == host and finder.bridge == module for finder in finders):
        sys.meta_path.insert(0, _BridgeFinder(host, module))


class _BridgeFinder:
    """A meta path finder that imports `bridge` right after `host` was imported: the import may happen in the context."""

    def __init__(self, host: str, bridge: str) -> None:
        self.host, self.bridge = host, bridge

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Called by the import system for every module that is not imported yet."""
        if name != self.host:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        original = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            original(module)
            importlib.import_module(self.bridge)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
