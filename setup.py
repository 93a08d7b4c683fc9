"""Builds halfbyte's two native libraries with g++ and nvcc; what the package is and needs stands in pyproject.toml.

    csrc/library.cpp + csrc/cpu/*.cpp  ->  halfbyte/lib/libhalfbyte_cpu.so
    csrc/cuda/*.cu   + csrc/cuda/*.cpp ->  halfbyte/lib/libhalfbyte_cuda.so    (when a CUDA toolkit is found)

torch's own CUDAExtension is not used: it imports torch and refuses CUDA code under a CPU-only torch. Here torch is
a folder of headers and libtorch_cpu.so; the libraries use its stable ABI, so that one build serves every
torch >= MIN_TORCH and every Python. What was built is written beside the libraries as _build_info.json.

Environment: MAX_JOBS, CXX, CXXFLAGS (appended), CUDA_HOME, TORCH_CUDA_ARCH_LIST, HALFBYTE_TORCH_DIR,
HALFBYTE_BUILD_CUDA=auto|0|1, HALFBYTE_SANITIZE=address|undefined.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # older ones lack bdist_wheel and PEP 639 licence fields
    sys.exit(
        f"halfbyte needs setuptools >= 77 to build and found {setuptools.__version__}: "
        "run `pip install -U setuptools`, or leave out --no-build-isolation and pip brings its own"
    )

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PEP 517 builds start without the project's folder
import build_tools as tools
from build_tools import ROOT, CompileStep

ABI_TARGET = "0x{:02x}{:02x}000000000000".format(*tools.MIN_TORCH)  # the oldest torch that the libraries may meet

# No implicit fused multiply-add: each ISA would fuse differently, and the formats promise equal bytes on all of them.
# Where a fused one is wanted, the kernels write it.
COMMON_FLAGS = ["-std=c++20", "-O3", "-Icsrc"]
HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
CXX_FLAGS = [*HOST_FLAGS, "-fvisibility-inlines-hidden"]
NVCC_FLAGS = ["-fmad=false", "-Xcompiler=" + ",".join(HOST_FLAGS), "-Werror=all-warnings", "-Xfatbin=-compress-all"]
# Of csrc/cuda: instructions of sm_90a, which other architectures' code must not carry.
WGMMA_FILES = {"linear_wgmma", "linear_backward_wgmma"}
LINK_FLAGS = ["-Wl,-z,defs", "-Wl,--exclude-libs,ALL", "-Wl,-z,relro,-z,now", "-Wl,--as-needed"]
NO_EXPORTS = "{ local: *; };\n"  # ops register themselves when the library is loaded; nobody looks up a symbol

# csrc/cpu/isa_<name>.cpp is compiled when its name is listed here for this machine. No other file gets an -m flag, so
# that nothing runs an instruction isa.cpp did not ask the CPU for; isa.cpp is told what exists by HALFBYTE_ISAS.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX2_VNNI = [*AVX2, "-mavxvnni"]
AVX512_BASE = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
AVX512_VNNI = [*AVX512_BASE, "-mavx512vnni"]
AVX512 = [*AVX512_VNNI, "-mavx512vbmi", "-mavx512bf16"]
AMX = [*AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]  # g++ 12 has no amx-fp16
ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "scalar": [],
        "avx2": AVX2,
        "avx2_vnni": AVX2_VNNI,
        "avx512_base": AVX512_BASE,
        "avx512_vnni": AVX512_VNNI,
        "avx512": AVX512,
        "amx": AMX,
    }
}


def isa_flags(machine: str, names: list[str]) -> dict[str, list[str]]:
    """The compiler flags of each ISA among `names` (from isa_<name>.cpp files) that `machine` can have."""
    every = {"scalar"}.union(*ISA_FLAGS.values())
    if unknown := sorted(set(names) - every):
        raise SetupError(f"csrc/cpu/isa_{unknown[0]}.cpp has no flags in ISA_FLAGS of setup.py ({sorted(every)})")
    mine = ISA_FLAGS.get(machine, {"scalar": []})
    return {name: flags for name, flags in mine.items() if name in names}


def available_isas() -> dict[str, list[str]]:
    names = sorted(path.stem.removeprefix("isa_") for path in (ROOT / "csrc/cpu").glob("isa_*.cpp"))
    return isa_flags(platform.machine(), names)


def sources(library: str) -> list[str]:
    """Source files of the library "cpu" or "cuda", relative to ROOT."""
    patterns = {"cpu": ["csrc/library.cpp", "csrc/cpu/*.cpp"], "cuda": ["csrc/cuda/*.cu", "csrc/cuda/*.cpp"]}[library]
    return [path.relative_to(ROOT).as_posix() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def sanitizer_flags() -> list[str]:
    """Flags for compiling and linking. Warnings stay warnings: g++ warns about its own instrumentation."""
    name = tools.choice("HALFBYTE_SANITIZE", ("", "address", "undefined"))
    if not name:
        return []
    return [f"-fsanitize={name}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O2", "-Wno-error"]


def objects_folder() -> str:
    """Where objects are kept, apart per sanitizer. Not build_temp: editable installs throw that one away."""
    return "/".join(filter(None, ["build/objects", os.environ.get("HALFBYTE_SANITIZE", "")]))


class BuildLibraries(build_ext):
    """build_ext for libraries that are not Python modules."""

    extensions: list[Extension]

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # without the suffix that names a Python's ABI

    def run(self) -> None:
        if sys.platform != "linux":
            raise SetupError(f"halfbyte builds on Linux only, this is {sys.platform}")
        self.torch = tools.find_torch()
        self.cuda, self.cuda_skipped = tools.find_cuda()
        if self.cuda is None:
            print(f"halfbyte: building without CUDA: {self.cuda_skipped}", file=sys.stderr)
            self.extensions = [extension for extension in self.extensions if not extension.name.endswith("_cuda")]
        super().run()

    def build_extensions(self) -> None:
        objects = ROOT / objects_folder()
        objects.mkdir(parents=True, exist_ok=True)
        with open(objects / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one checkout share the objects
            began = time.monotonic()
            steps = {extension.name: self.compile_steps(extension.sources) for extension in self.extensions}
            every = [step for group in steps.values() for step in group]
            due = [step for step in every if self.force or not step.is_current()]
            due.sort(key=lambda step: not step.source.endswith(".cu"))  # nvcc takes longest: first
            with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))) as pool:
                list(pool.map(CompileStep.run, due))
            for name, group in steps.items():
                self.link(name, [step.object for step in group])
        seconds = time.monotonic() - began
        print(f"halfbyte: compiled {len(due)} of {len(every)} files, linked in {seconds:.1f} s", file=sys.stderr)
        info = json.dumps(self.build_info(), indent=2) + "\n"
        self.library_path("_build_info.json").write_text(info)

    def library_path(self, file: str) -> Path:
        return Path(self.build_lib, "halfbyte", "lib", file).resolve()

    def compile_steps(self, files: list[str]) -> list[CompileStep]:
        compiler, isas = tools.cxx(), available_isas()
        versions = f"torch {tools.torch_version(self.torch)}; {tools.read_output([*compiler, '--version']).stdout}"
        if self.cuda:
            versions += f"; CUDA {self.cuda.version}"
        torch = [f"-DTORCH_TARGET_VERSION={ABI_TARGET}", "-isystem", str(self.torch / "include")]
        torch += [f"-ffile-prefix-map={self.torch}=torch"]  # else __FILE__ in its headers names this machine's folders
        have_isas = [f"-DHALFBYTE_ISAS={' '.join(f'X({name})' for name in isas)}"]
        extra = [*sanitizer_flags(), *shlex.split(os.environ.get("CXXFLAGS", ""))]
        host = [*compiler, *COMMON_FLAGS, *CXX_FLAGS]
        steps = []
        for file in files:
            stem, suffix = os.path.splitext(os.path.basename(file))
            if self.cuda and suffix == ".cu":
                ccbin = [f"-ccbin={compiler[-1]}"] if "CXX" in os.environ else []
                gencode = (tools.wgmma_gencode_flags if stem in WGMMA_FILES else tools.gencode_flags)(tools.cuda_archs())
                command = [self.cuda.nvcc, *COMMON_FLAGS, *NVCC_FLAGS, *ccbin, *gencode]
            elif self.cuda and file.startswith("csrc/cuda/"):
                includes = [flag for folder in self.cuda.includes for flag in ("-isystem", folder)]
                command = [*host, *torch, *includes, *extra]
            elif not stem.startswith("isa_"):
                command = [*host, *torch, *(have_isas if stem == "isa" else []), *extra]
            elif (isa := stem.removeprefix("isa_")) in isas:
                command = [*host, *isas[isa], *extra]  # no torch: kernels are raw pointers and sizes
            else:
                continue
            target = f"{objects_folder()}/{file.removeprefix('csrc/')}.o"
            steps.append(CompileStep(file, target, tuple(command), versions))
        return steps

    def link(self, name: str, objects: list[str]) -> None:
        output = self.library_path(name.rpartition(".")[2] + ".so")
        output.parent.mkdir(parents=True, exist_ok=True)
        exports = f"{objects_folder()}/exports.map"
        (ROOT / exports).write_text(NO_EXPORTS)
        flags = [*LINK_FLAGS, f"-Wl,--version-script={exports}", f"-L{self.torch}/lib", "-ltorch_cpu"]
        if self.cuda and name.endswith("_cuda"):
            flags += [f"-L{folder}" for folder in self.cuda.libraries]
            flags += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        tools.run_tool([*tools.cxx(), "-shared", "-o", str(output), *objects, *sanitizer_flags(), *flags])

    def build_info(self) -> dict[str, object]:
        """Feeds `halfbyte info` and the messages of a library that does not load."""
        return {
            "version": self.distribution.get_version(),
            "commit": tools.git_commit(),
            "abi_target": ABI_TARGET,
            "torch": tools.torch_version(self.torch),
            "compiler": tools.read_output([*tools.cxx(), "--version"]).stdout.partition("\n")[0],
            "machine": platform.machine(),
            "isas": list(available_isas()),
            "sanitizer": os.environ.get("HALFBYTE_SANITIZE") or None,
            "cuda": {"version": self.cuda.version, "archs": tools.cuda_archs()} if self.cuda else None,
            "cuda_skipped": self.cuda_skipped or None,
        }

    def copy_extensions_to_source(self) -> None:
        """Called for --inplace and editable installs."""
        folder = ROOT / "halfbyte" / "lib"
        folder.mkdir(parents=True, exist_ok=True)
        built = [*self.library_path(".").glob("*.so"), self.library_path("_build_info.json")]
        wanted = {self.get_ext_filename(extension.name.rpartition(".")[2]) for extension in self.extensions}
        for file in built:
            if file.suffix == ".json" or file.name in wanted:
                new = folder / f"{file.name}.new"
                shutil.copy2(file, new)
                os.replace(new, folder / file.name)  # a process that loads it meanwhile gets one or the other, whole
        for file in folder.glob("*.so"):
            if file.name not in wanted:
                file.unlink()  # left by an earlier build: a CUDA library must not be loaded beside a newer CPU one


class PlatformWheel(bdist_wheel):
    """One wheel per platform for every Python: the libraries do not touch Python's ABI."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def run(self) -> None:
        # setuptools never empties this folder: a file deleted since the last wheel would be packed again.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(f"halfbyte.lib.libhalfbyte_{name}", sources(name)) for name in ("cpu", "cuda")],
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
    )
