"""setup.py: which flags go where, and what the built libraries look like."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from setuptools.dist import Distribution
from setuptools.errors import SetupError

from halfbyte._library import CPU_ISAS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def project() -> ModuleType:
    """setup.py as a module; its own import of build_tools stays out of everyone else's sys.path."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("halfbyte_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_abi_target_is_the_oldest_supported_torch(project):
    assert project.tools.MIN_TORCH == (2, 11)
    assert project.ABI_TARGET == "0x020b000000000000"
    assert "torch>={}.{}".format(*project.tools.MIN_TORCH) in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def commands(project, monkeypatch) -> dict[str, list[str]]:
    """source -> compiler command of the whole project, on a machine with CUDA 12.8."""
    for name in ("HALFBYTE_SANITIZE", "TORCH_CUDA_ARCH_LIST", "CXX", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    build = project.BuildLibraries(Distribution())
    build.torch = Path("/site-packages/torch")
    build.cuda = project.tools.Toolkit("/cuda/bin/nvcc", "12.8", ["/cuda/include"], ["/cuda/lib"])
    files = project.sources("cpu") + project.sources("cuda")
    assert {"csrc/library.cpp", "csrc/cpu/isa.cpp"} <= set(files)
    return {step.source: list(step.command) for step in build.compile_steps(files)}


def test_only_isa_files_get_machine_flags(project, commands):
    for source, command in commands.items():
        isa = re.search(r"cpu/isa_(\w+)\.cpp", source)
        expected = project.available_isas()[isa[1]] if isa else []
        assert [flag for flag in command if flag.startswith("-m")] == expected, source


def test_warnings_are_errors_and_nothing_is_contracted(commands):
    for source, command in commands.items():
        line = ",".join(command)
        assert "-ffp-contract=off,-Wall,-Wextra,-Werror" in line, source
        if source.endswith(".cu"):
            assert "-fmad=false" in command
            assert "-Werror=all-warnings" in command


def test_only_wgmma_files_are_built_for_90a_and_know_it(project, commands):
    with_wgmma = {source for source, command in commands.items() if "-gencode=arch=compute_90a,code=sm_90a" in command}
    assert with_wgmma == {f"csrc/cuda/{stem}.cu" for stem in project.WGMMA_FILES}
    assert with_wgmma == {source for source, command in commands.items() if "-DHALFBYTE_HAVE_SM90A" in command}
    uses = {source for source in commands if source.endswith(".cu") and '#include "wgmma_' in (ROOT / source).read_text()}
    assert uses == with_wgmma
    assert not any("-gencode=arch=compute_90,code=sm_90" in commands[source] for source in with_wgmma)


def test_kernels_cannot_include_torch(commands):
    for source, command in commands.items():
        kernels = source.endswith(".cu") or "cpu/isa_" in source
        assert ("/site-packages/torch/include" in command) is not kernels, source


def test_isa_cpp_is_told_what_exists(project, commands):
    told = {source: [flag for flag in command if "HALFBYTE_ISAS" in flag] for source, command in commands.items()}
    assert told.pop("csrc/cpu/isa.cpp") == ["-DHALFBYTE_ISAS=" + " ".join(f"X({name})" for name in project.available_isas())]
    assert not any(told.values())


def test_sanitizer(project, monkeypatch):
    monkeypatch.setenv("HALFBYTE_SANITIZE", "address")
    assert "-fsanitize=address" in project.sanitizer_flags()
    assert project.objects_folder() == "build/objects/address"
    monkeypatch.setenv("HALFBYTE_SANITIZE", "thread")
    with pytest.raises(SetupError, match="HALFBYTE_SANITIZE must be one of address, undefined, got 'thread'"):
        project.sanitizer_flags()
    monkeypatch.delenv("HALFBYTE_SANITIZE")
    assert project.sanitizer_flags() == []


def test_isas_of_a_machine(project):
    files = ["amx", "avx2", "avx2_vnni", "avx512", "avx512_base", "avx512_vnni", "scalar"]
    assert tuple(project.isa_flags("x86_64", files)) == CPU_ISAS
    assert list(project.isa_flags("x86_64", ["scalar", "avx2"])) == ["scalar", "avx2"]
    assert project.isa_flags("aarch64", files) == {"scalar": []}
    with pytest.raises(SetupError, match=r"isa_sse9\.cpp has no flags"):
        project.isa_flags("x86_64", ["sse9"])


def test_old_setuptools_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"setuptools >= 77 to build and found 65\.5\.0.*-U setuptools"):
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")


def test_names_carry_no_python_abi(project):
    assert project.BuildLibraries(Distribution()).get_ext_filename("halfbyte.lib.libx") == "halfbyte/lib/libx.so"
    wheel = project.PlatformWheel(Distribution({"name": "halfbyte", "version": "1"}))
    wheel.finalize_options()
    python, abi, platform = wheel.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")


@pytest.fixture(scope="module")
def library_folder() -> Path:
    folder = Path(importlib.util.find_spec("halfbyte").origin).parent / "lib"
    assert (folder / "libhalfbyte_cpu.so").is_file(), "halfbyte is not built: run `make build`"
    return folder


def read(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def test_libraries_export_nothing(library_folder):
    for library in library_folder.glob("*.so"):
        assert read("nm", "-D", "--defined-only", library) == "", library.name


def test_libraries_need_only_torch_cpu_and_the_c_library(library_folder):
    allowed = r"libtorch_cpu\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(c|m|pthread|dl|rt)\.so\.\d|ld-linux.*"
    for library in library_folder.glob("*.so"):
        needed = re.findall(r"NEEDED.*\[(.*)\]", read("readelf", "-d", library))
        assert "libtorch_cpu.so" in needed
        assert not [name for name in needed if not re.fullmatch(allowed, name)], library.name


def test_libraries_name_no_folder_of_this_machine(library_folder, project):
    for library in library_folder.glob("*.so"):
        content = library.read_bytes()
        for folder in (ROOT, project.tools.find_torch()):
            assert str(folder).encode() not in content, library.name


def test_build_info_says_what_lies_beside_it(library_folder, project):
    info = json.loads((library_folder / "_build_info.json").read_text())
    assert info["version"] == re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert info["abi_target"] == project.ABI_TARGET
    assert "scalar" in info["isas"]
    assert info["sanitizer"] is None
    assert (info["cuda"] is None) is (info["cuda_skipped"] is not None)
    assert (info["cuda"] is not None) is (library_folder / "libhalfbyte_cuda.so").exists()


def test_isa_objects_share_no_code():
    """A weak function compiled for AVX-512 could be the copy that the linker keeps for the generic files too."""
    objects = list((ROOT / "build/objects/cpu").glob("isa_*.cpp.o"))
    if not objects:
        pytest.skip("the libraries were not built in this checkout")
    for file in objects:
        symbols = re.findall(r" ([A-Z]) (\S+)$", read("nm", "--extern-only", "--defined-only", file), re.MULTILINE)
        shared_code = [name for kind, name in symbols if kind == "W"]
        assert not shared_code, f"{file.name}: put these into an anonymous namespace"
        exported = [name for kind, name in symbols if kind in "TDRB"]  # V, shared constants, is the same for every ISA
        assert len(exported) == 1, (file.name, exported)
