"""Whole builds with pip: wheel, isolated, editable and from an sdist. Each makes its own environment."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("HALFBYTE_TORCH_DIR", "HALFBYTE_BUILD_CUDA", "HALFBYTE_SANITIZE", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME")
SETTINGS += ("CUDA_PATH", "CXX", "CXXFLAGS", "MAX_JOBS", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH")

pytestmark = pytest.mark.slow

@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the build reads, objects included: they stay valid, so that these tests mostly link."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("csrc", "halfbyte", "lightning_plugin", "peft_bridge", "build/objects"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "lib"))
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy2(file, copy)
    return copy


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Path:
    """The python of an environment that sees this one's packages, as a user's in which torch is installed."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    site_packages = next((tmp_path / "env/lib").glob("python*/site-packages"))
    (site_packages / "torch.pth").write_text(str(Path(importlib.util.find_spec("torch").origin).parents[1]))
    python = tmp_path / "env/bin/python"
    pip(python, "install", "setuptools>=77")  # what venv brings depends on Python, and hides this environment's
    return python


def pip(python: Path | str, *arguments: str | Path) -> str:
    """Runs pip and returns all it printed; fails the test if pip fails."""
    command = [str(python), "-m", "pip", *map(str, arguments), "--no-deps", "--no-cache-dir", "-v"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def loaded_from(python: Path) -> str:
    """Folder of the halfbyte that `python` imports, native ops included."""
    code = "import halfbyte, torch; print(halfbyte.__file__); assert dir(torch.ops.halfbyte)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    return str(Path(done.stdout).parent)


def test_wheel_holds_what_was_built_for_it(checkout, environment, monkeypatch):
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_py"], cwd=checkout, check=True)
    [earlier] = checkout.glob("build/lib*/halfbyte")
    for stale in (earlier / "gone.py", checkout / "halfbyte/lib/libhalfbyte_cuda.so"):
        stale.parent.mkdir(exist_ok=True)
        stale.touch()
    monkeypatch.setenv("HALFBYTE_BUILD_CUDA", "0")
    pip(environment, "wheel", "--wheel-dir", checkout / "wheels", checkout)
    [wheel] = (checkout / "wheels").iterdir()
    assert re.fullmatch(r"halfbyte-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = json.loads(archive.read("halfbyte/lib/_build_info.json"))
    assert info["cuda_skipped"] == "HALFBYTE_BUILD_CUDA=0"
    assert [name for name in names if name.endswith(".so")] == ["halfbyte/lib/libhalfbyte_cpu.so"]
    assert "halfbyte/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if re.match(r"tests|csrc|build|halfbyte/gone", name)]
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"halfbyte", "lightning_plugin", "peft_bridge"}


def test_isolated_install_finds_the_torch_of_the_environment(checkout, environment):
    pip(environment, "install", checkout)
    assert Path(loaded_from(environment)).is_relative_to(environment.parents[1])


def test_editable_install_and_incremental_build(checkout, environment, monkeypatch):
    pip(environment, "install", "--no-build-isolation", "--editable", checkout)
    assert loaded_from(environment) == str(checkout / "halfbyte")

    def build() -> tuple[int, ...]:
        command = [environment, "setup.py", "--quiet", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
        return tuple(map(int, re.search(r"compiled (\d+) of (\d+) files", done.stderr).groups()))

    due, total = build()
    assert due == 0
    os.utime(checkout / "csrc/library.cpp")
    assert build() == (1, total)
    assert build() == (0, total)

    libraries = checkout / "halfbyte/lib"
    (libraries / "libhalfbyte_cuda.so").touch()
    monkeypatch.setenv("HALFBYTE_BUILD_CUDA", "0")
    build()
    assert [file.name for file in libraries.glob("*.so")] == ["libhalfbyte_cpu.so"]  # no leftovers


def test_sdist_builds(checkout, environment, monkeypatch):
    subprocess.run([environment, "setup.py", "--quiet", "sdist"], cwd=checkout, check=True, capture_output=True)
    [archive] = (checkout / "dist").iterdir()
    monkeypatch.setenv("HALFBYTE_BUILD_CUDA", "0")
    pip(environment, "install", archive)
    shutil.unpack_archive(archive, checkout / "unpacked")
    [unpacked] = (checkout / "unpacked").iterdir()
    for source in (checkout / "csrc").rglob("*.*"):
        assert (unpacked / source.relative_to(checkout)).is_file()
    assert loaded_from(environment)


def test_install_without_torch_says_what_to_do(checkout, environment):
    next(environment.parents[1].glob("lib/python*/site-packages/torch.pth")).unlink()
    message = r"(?s)halfbyte needs PyTorch >= 2\.11 to build and found none.*HALFBYTE_TORCH_DIR"
    with pytest.raises(AssertionError, match=message):
        pip(environment, "install", checkout)
