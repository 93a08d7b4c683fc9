"""build_tools.py: the torch and CUDA that the build finds, and the files it compiles again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("HALFBYTE_TORCH_DIR", "HALFBYTE_BUILD_CUDA", "HALFBYTE_SANITIZE", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME")
SETTINGS += ("CUDA_PATH", "CXX", "VIRTUAL_ENV", "CONDA_PREFIX")


@pytest.fixture
def tools(monkeypatch) -> ModuleType:
    """build_tools with none of the settings that a developer or a CI machine may have."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(ROOT)
    import build_tools

    build_tools.modified_ns.cache_clear()
    return build_tools


def make_torch(folder: Path, version: str = "2.11.0+cpu") -> Path:
    """A folder with as much of an installed torch as the build looks at."""
    for file in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so", "__init__.py"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (folder / "version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\ncuda = None\n")
    return folder


# Finding torch


def test_named_torch_comes_first_and_alone(tools, tmp_path, monkeypatch):
    make_torch(tmp_path / "named")
    monkeypatch.setenv("HALFBYTE_TORCH_DIR", str(tmp_path / "named"))
    assert tools.find_torch() == tmp_path / "named"
    monkeypatch.setenv("HALFBYTE_TORCH_DIR", str(tmp_path / "typo"))  # although this interpreter has a good one
    with pytest.raises(SetupError, match=r"typo is not an installed torch"):
        tools.find_torch()


def test_torch_of_this_interpreter_comes_before_the_one_around_it(tools, tmp_path, monkeypatch):
    mine, around = make_torch(tmp_path / "mine"), make_torch(tmp_path / "around")
    monkeypatch.setattr(tools, "torch_seen_by", lambda python: around)
    monkeypatch.setattr(tools, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(mine)]))
    assert tools.find_torch() == mine
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    assert tools.find_torch() == around


def test_activated_environment_is_asked_when_the_building_one_has_no_torch(tools, tmp_path, monkeypatch):
    torch = make_torch(tmp_path / "torch")
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "env"))
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    monkeypatch.setattr(tools, "torch_seen_by", {str(python): torch}.get)
    assert tools.find_torch() == torch


def test_interpreter_is_seen_as_the_user_starts_it(tools, tmp_path, monkeypatch):
    torch = make_torch(tmp_path / "site" / "torch")
    make_torch(tmp_path / "isolation" / "torch")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    assert tools.torch_seen_by(str(python)) is None
    next((tmp_path / "env/lib").glob("python*/site-packages")).joinpath("x.pth").write_text(str(torch.parent))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "isolation"))  # as pip's build isolation does
    assert tools.torch_seen_by(str(python)) == torch


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: make_torch(folder, "2.10.1"), "needs PyTorch >= 2.11 to build and found torch 2.10.1 in "),
        (lambda folder: make_torch(folder, "1.13"), "found torch 1.13 in "),
        (lambda folder: shutil.rmtree(folder / "include"), r"comes without include/torch/csrc/stable/library\.h"),
        (lambda folder: shutil.rmtree(folder / "lib"), r"comes without lib/libtorch_cpu\.so"),
        (lambda folder: (folder / "version.py").unlink(), "is not an installed torch"),
    ],
)
def test_unusable_torch_is_refused_with_its_reason(tools, tmp_path, monkeypatch, break_it, message):
    monkeypatch.setenv("HALFBYTE_TORCH_DIR", str(make_torch(tmp_path / "torch", "2.13.0")))
    assert tools.find_torch() == tmp_path / "torch"
    break_it(tmp_path / "torch")
    with pytest.raises(SetupError, match=rf"(?s){message}.*Install torch first"):
        tools.find_torch()


def test_missing_torch_says_what_to_do(tools, monkeypatch):
    monkeypatch.setattr(tools, "torch_candidates", list)
    with pytest.raises(SetupError, match=r"(?s)PyTorch >= 2\.11 to build and found none.*HALFBYTE_TORCH_DIR"):
        tools.find_torch()


@pytest.mark.parametrize(
    ("line", "version", "pair"),
    [
        ("__version__ = '2.13.0+cpu'", "2.13.0+cpu", (2, 13)),
        ('__version__: str = "2.12.0a0+git1234"', "2.12.0a0+git1234", (2, 12)),
        ("__version__ = '10.2'", "10.2", (10, 2)),
        ("__version__ = 'main'", "main", (0, 0)),
        ("version = '2.13.0'", "", (0, 0)),
    ],
)
def test_torch_version_is_read_from_its_file(tools, tmp_path, line, version, pair):
    (tmp_path / "version.py").write_text(f"from typing import Optional\n{line}\n")
    assert tools.torch_version(tmp_path) == version
    assert tools.version_tuple(version) == pair


# CUDA


def make_toolkit(home: Path, header: str = "cuda_runtime_api.h") -> Path:
    """A CUDA_HOME whose nvcc answers as a real one does, naming folders far from itself."""
    for folder in ("bin", "far/include", "far/lib"):
        (home / folder).mkdir(parents=True)
    (home / "far/include" / header).touch()
    nvcc = home / "bin/nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.8, V12.8.93"; exit; fi\n'
        f"echo '#$ INCLUDES=\"-I{home}/far/include\"  ' >&2\n"
        f"echo '#$ LIBRARIES=  \"-L{home}/far/lib/stubs\" \"-L{home}/far/lib\"' >&2\n"
    )
    nvcc.chmod(0o755)
    return home


def test_toolkit_is_described_by_its_nvcc(tools, tmp_path, monkeypatch):
    home = make_toolkit(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(home))
    libraries = [f"{home}/far/lib/stubs", f"{home}/far/lib"]
    assert tools.find_cuda() == (tools.Toolkit(f"{home}/bin/nvcc", "12.8", [f"{home}/far/include"], libraries), "")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    assert tools.find_cuda()[0].nvcc == f"{home}/bin/nvcc"
    monkeypatch.setenv("HALFBYTE_BUILD_CUDA", "0")
    assert tools.find_cuda() == (None, "HALFBYTE_BUILD_CUDA=0")


@pytest.mark.parametrize("with_nvcc", [False, True])
def test_cuda_is_left_out_with_a_reason_unless_asked_for(tools, tmp_path, monkeypatch, with_nvcc):
    if with_nvcc:
        make_toolkit(tmp_path, header="other.h")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    reason = "does not work or has no cuda_runtime_api.h" if with_nvcc else f"no CUDA compiler at {tmp_path}/bin/nvcc"
    toolkit, skipped = tools.find_cuda()
    assert toolkit is None
    assert reason in skipped
    monkeypatch.setenv("HALFBYTE_BUILD_CUDA", "1")
    with pytest.raises(SetupError, match=re.escape(reason)):
        tools.find_cuda()


@pytest.mark.parametrize(
    ("listed", "archs", "last_flag"),
    [
        (None, ["8.0", "9.0+PTX"], "-gencode=arch=compute_90,code=compute_90"),
        ("", ["8.0", "9.0+PTX"], "-gencode=arch=compute_90,code=compute_90"),
        ("8.6", ["8.6"], "-gencode=arch=compute_86,code=sm_86"),
        ("7.5 8.0;9.0a, 12.0", ["7.5", "8.0", "9.0a", "12.0"], "-gencode=arch=compute_120,code=sm_120"),
        ("9.0a+PTX;", ["9.0a+PTX"], "-gencode=arch=compute_90a,code=compute_90a"),
    ],
)
def test_arch_list(tools, monkeypatch, listed, archs, last_flag):
    if listed is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert tools.cuda_archs() == archs
    flags = tools.gencode_flags(archs)
    assert flags[-1] == last_flag
    assert len(flags) == len(archs) + sum(arch.endswith("+PTX") for arch in archs)


@pytest.mark.parametrize(
    ("archs", "built", "flags"),
    [
        (["8.0", "9.0+PTX"], True, ["80,code=sm_80", "90a,code=sm_90a", "90,code=compute_90"]),
        (["9.0"], True, ["90a,code=sm_90a"]),
        (["9.0", "9.0a"], True, ["90a,code=sm_90a"]),
        (["8.0", "10.0+PTX"], False, ["80,code=sm_80", "100,code=sm_100", "100,code=compute_100"]),
    ],
)
def test_files_with_wgmma_have_code_for_90a_in_the_place_of_90(tools, archs, built, flags):
    expected = [f"-gencode=arch=compute_{flag}" for flag in flags]
    assert tools.wgmma_gencode_flags(archs) == expected + ["-DHALFBYTE_HAVE_SM90A"] * built


@pytest.mark.parametrize("listed", ["sm_80", "Hopper", "8", "9.0+ptx", "8.0 native"])
def test_arch_list_refuses_what_it_does_not_understand(tools, monkeypatch, listed):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(SetupError, match=re.escape(repr(listed.split()[-1]))):
        tools.cuda_archs()


def test_settings_with_few_values_refuse_others(tools, monkeypatch):
    monkeypatch.setenv("HALFBYTE_BUILD_CUDA", "yes")
    with pytest.raises(SetupError, match="HALFBYTE_BUILD_CUDA must be one of auto, 0, 1, got 'yes'"):
        tools.find_cuda()
    assert tools.choice("HALFBYTE_SANITIZE", ("", "address")) == ""


# What is compiled again


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("a.o: a.cpp b.h\n", ["a.cpp", "b.h"]),
        ("build/a.o: csrc/a.cpp \\\n  /usr/include/b.h \\\n c.h\n", ["csrc/a.cpp", "/usr/include/b.h", "c.h"]),
        ("a.o : a.cu \\\n    b.h\n", ["a.cu", "b.h"]),  # nvcc's spelling
        ("a.o: a.cpp with\\ space/b.h c\\#.h d$$.h\n", ["a.cpp", "with space/b.h", "c#.h", "d$.h"]),
        ("a.o: a.cpp b.h\nb.h:\n", ["a.cpp", "b.h"]),
    ],
)
def test_depfile(tools, text, files):
    assert tools.parse_depfile(text) == files


@pytest.fixture
def step(tools, tmp_path, monkeypatch):
    """A file and its header in an empty project, compiled once."""
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/a.h").write_text("inline int a() { return 1; }\n")
    (tmp_path / "csrc/a.cpp").write_text('#include "a.h"\nint b() { return a(); }\n')
    step = tools.CompileStep("csrc/a.cpp", "build/objects/a.cpp.o", ("g++", "-O0"), "g++ 12")
    assert not step.is_current()
    step.run()
    assert (tmp_path / "build/objects/a.cpp.o").stat().st_size > 0
    return step


def current(tools: ModuleType, step) -> bool:
    tools.modified_ns.cache_clear()
    return step.is_current()


def test_unchanged_file_is_not_compiled_again(tools, step):
    assert current(tools, step)


@pytest.mark.parametrize("file", ["csrc/a.cpp", "csrc/a.h"])
def test_changed_or_missing_input_is_compiled_again(tools, step, file):
    later = time.time_ns() + 10**9
    os.utime(tools.ROOT / file, ns=(later, later))
    assert not current(tools, step)
    (tools.ROOT / file).unlink()
    assert not current(tools, step)


@pytest.mark.parametrize("suffix", [".o", ".d", ".stamp"])
def test_missing_result_is_made_again(tools, step, suffix):
    step.beside(suffix).unlink()
    assert not current(tools, step)


def test_changed_flags_or_tools_compile_again(tools, step):
    for command, versions in ((("g++", "-O1"), step.tools), (step.command, "g++ 13")):
        assert not current(tools, tools.CompileStep(step.source, step.object, command, versions))


def test_edit_during_compilation_is_seen(tools, step, monkeypatch):
    def compile_slowly(command):
        (tools.ROOT / "csrc/a.h").write_text("inline int a() { return 2; }\n")

    time.sleep(0.02)  # past the tick of the clock that stamps files
    monkeypatch.setattr(tools, "run_tool", compile_slowly)
    monkeypatch.setattr(tools.time, "time_ns", lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) - 10**7)
    step.run()
    assert not current(tools, step)


def test_failed_compilation_shows_its_output_and_is_tried_again(tools, step, capfd):
    (tools.ROOT / "csrc/a.h").write_text("inline int a() { return oops; }\n")
    with pytest.raises(CompileError, match=r"g\+\+ failed with exit status 1: g\+\+ -O0 .*a\.cpp"):
        step.run()
    assert "oops" in capfd.readouterr().err
    (tools.ROOT / "csrc/a.h").write_text("inline int a() { return 1; }\n")
    os.utime(tools.ROOT / "csrc/a.h", ns=(0, 0))
    assert not current(tools, step)
