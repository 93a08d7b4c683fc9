"""The public surface: docstrings that say what users need, imports without side effects, one stem per op."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("halfbyte", "lightning_plugin", "peft_bridge")


def public_objects() -> list[tuple[str, object]]:
    found: dict[str, object] = {}
    parts = ("checkpoint", "distributed", "nn", "ops", "optim", "memory")
    for package in (*PACKAGES, *(f"halfbyte.{part}" for part in parts)):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and callable(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return sorted(found.items())


def public_methods() -> list[tuple[str, object]]:
    methods = []
    for path, value in public_objects():
        if inspect.isclass(value):
            for name, member in vars(value).items():
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                ours = inspect.isfunction(function) and function.__module__.partition(".")[0] in PACKAGES
                if ours and not name.startswith("_"):
                    methods.append((f"{path}.{name}", function))
    return methods


@pytest.mark.parametrize(("path", "value"), public_objects())
def test_every_public_name_documents_its_arguments_and_errors(path: str, value: object) -> None:
    text = inspect.getdoc(value) or ""
    assert len(text) > 40, f"{path} has no docstring"
    signature = inspect.signature(value)
    arguments = [
        p.name
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in ("self", "cls")
    ]
    is_data = inspect.isclass(value) and (hasattr(value, "__dataclass_fields__") or issubclass(value, BaseException))
    section = text if is_data else text.partition("Args:")[2] if arguments else text
    missing = [name for name in arguments if not re.search(rf"\b{name}\b", section)]
    assert not missing, f"{path} does not document {missing}"
    if any(name in arguments for name in ("tensor", "packed", "input", "grad_output", "indices")):
        assert "hape" in text, f"{path} takes tensors and gives no shapes"
        assert re.search(r"float32|uint8|int64|dtype", text), f"{path} takes tensors and gives no dtypes"
    module_source = inspect.getsource(value)
    if re.search(r"^\s+raise (?!NotImplementedError$)\w", module_source, re.MULTILINE) and not is_data:
        assert "Raises:" in text, f"{path} raises and does not say what"


@pytest.mark.parametrize(("path", "function"), public_methods())
def test_every_public_method_has_a_docstring(path: str, function: object) -> None:
    assert function.__doc__, path


IMPORT = """
import os, sys, threading, warnings
before = dict(os.environ); threads = threading.active_count(); sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.connect") else None)
import torch, {host}
sys.stdout.flush(); sys.stderr.flush(); print("MARK"); print("MARK", file=sys.stderr)
dtype, init = torch.get_default_dtype(), torch.nn.Linear.__init__
hooks = len(torch.nn.modules.module._global_module_registration_hooks)
warnings.simplefilter("error")
import {package}
assert dict(os.environ) == before, "environment changed"
assert torch.get_default_dtype() is dtype and torch.nn.Linear.__init__ is init
assert len(torch.nn.modules.module._global_module_registration_hooks) == hooks
assert not torch.cuda.is_initialized(), "CUDA context"
assert not sockets, sockets
assert threading.active_count() == threads, "threads started"
"""


@pytest.mark.parametrize(
    ("package", "host"),
    [("halfbyte", "torch"), ("lightning_plugin", "lightning.pytorch"), ("peft_bridge", "transformers, peft")],
)
def test_importing_has_no_side_effects(package: str, host: str) -> None:
    code = IMPORT.format(package=package, host=host)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.partition("MARK")[2].strip() == ""
    assert done.stderr.partition("MARK")[2].strip() == ""


def test_the_core_imports_torch_and_safetensors_only() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import halfbyte, halfbyte.optim, halfbyte.testing;"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    foreign = set(done.stdout.split()) - {"halfbyte", "safetensors", "torch"} - set(sys.stdlib_module_names)
    assert foreign <= {"numpy"}, foreign  # torch loads numpy lazily where it is installed


def test_plugins_do_not_import_each_other() -> None:
    pairs = (("lightning_plugin", "peft_bridge"), ("peft_bridge", "lightning_plugin"), ("halfbyte", "lightning"))
    for package, other in pairs:
        for file in (ROOT / package).rglob("*.py"):
            assert not re.search(rf"^\s*(import|from) {other}\b", file.read_text(), re.MULTILINE), file


def test_doctests() -> None:
    files = [str(p) for p in (ROOT / "halfbyte").rglob("*.py") if ">>>" in p.read_text()]
    assert len(files) >= 8
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", *files],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_op_has_one_stem() -> None:
    """`find . -name '*<op>*'` lists an op: CPU front, CUDA front, wrapper."""
    text = (ROOT / "csrc/library.cpp").read_text()
    once, both = re.findall(r'm\.def\(\s*"(\w+)\(', text), re.findall(r'def_both\(\s*m, "(\w+)"', text)
    assert once
    assert both
    fronts = [*(ROOT / "csrc/cpu").glob("*.cpp"), ROOT / "csrc/optimizer_fronts.h"]  # the header's serve CPU and CUDA
    registered = "".join(path.read_text() for path in fronts)
    in_python = "".join(p.read_text() for p in (ROOT / "halfbyte/ops").glob("*.py"))  # those that torch.distributed moves
    for name in once:
        assert f'm.impl("{name}"' in registered or f'register_kernel("{name}"' in in_python, f"{name} has no CPU kernel"
    for name in both:
        assert f'impl_both(m, "{name}"' in registered, f"{name} has no CPU kernel"


def test_no_empty_words_in_names() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    bad = [name for name in tracked if re.search(r"(^|/|_)(utils?|helpers?|common|misc)(_|\.|/|$)", name)]
    assert not bad
