"""What setup.py needs to know about the machine: where torch and CUDA are, and which files must be compiled again.

Nothing here imports torch. A wrong setting or a missing tool raises SetupError with what to do about it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parent
MIN_TORCH = (2, 11)
DEFAULT_CUDA_ARCHS = "8.0;9.0+PTX"


def read_output(
    command: list[str], cwd: Path | str = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command that is only asked a question; the caller judges its exit status."""
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, env=env)


def choice(variable: str, allowed: tuple[str, ...]) -> str:
    """Value of an environment variable that has few values; the first one when it is unset."""
    value = os.environ.get(variable, allowed[0])
    if value not in allowed:
        raise SetupError(f"{variable} must be one of {', '.join(filter(None, allowed))}, got {value!r}")
    return value


def torch_seen_by(python: str) -> Path | None:
    """Folder of the torch that `python` would import when started by hand.

    pip's build isolation hides the environment pip was called from through PYTHONPATH and a sitecustomize; a child
    without those variables sees .pth files, system and user site-packages as the user does.
    """
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    # Not -I, which drops the user site; from "/", so that a folder named torch in the current one is not taken for it.
    child = read_output([python, "-c", code], cwd="/", env=env)
    found = child.stdout.strip()
    return Path(found) if child.returncode == 0 and found else None


def torch_candidates() -> list[Path]:
    """Where torch is, best first: the folder the user names (then only that), this interpreter's, the one around it."""
    if named := os.environ.get("HALFBYTE_TORCH_DIR"):
        return [Path(named)]
    spec = find_spec("torch")
    if spec and spec.submodule_search_locations:
        return [Path(next(iter(spec.submodule_search_locations)))]
    # `python -m build` and uv isolate with an environment of their own; an activated one is then known by its variable.
    prefixes = [os.environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)]
    pythons = [sys.executable] + [f"{prefix}/bin/python" for prefix in prefixes if Path(prefix, "bin/python").exists()]
    return [found for python in pythons if (found := torch_seen_by(python))]


def torch_version(folder: Path) -> str:
    """Version of the torch in `folder`, from its version.py; "" when there is none."""
    file = folder / "version.py"
    text = file.read_text() if file.is_file() else ""
    match = re.search(r"^__version__\s*(?::\s*\w+\s*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else ""


def version_tuple(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0a0+git12"; (0, 0) when it does not start with two numbers."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def find_torch() -> Path:
    """Folder of the first torch found; SetupError when there is none, it is too old or has no headers."""
    need = "halfbyte needs PyTorch >= {}.{} to build".format(*MIN_TORCH)
    advice = (
        "  Install torch first (a CPU build will do), then install halfbyte in the same environment,\n"
        "  or set HALFBYTE_TORCH_DIR to the folder of an installed torch (.../site-packages/torch)."
    )
    candidates = torch_candidates()
    if not candidates:
        raise SetupError(f"{need} and found none.\n{advice}")
    folder = candidates[0].resolve()
    version = torch_version(folder)
    if not version:
        raise SetupError(f"{need}, but {folder} is not an installed torch: it has no version.py.\n{advice}")
    if version_tuple(version) < MIN_TORCH:
        raise SetupError(f"{need} and found torch {version} in {folder}.\n{advice}")
    for part in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so"):
        if not (folder / part).is_file():
            raise SetupError(f"{need}, but torch {version} in {folder} comes without {part}.\n{advice}")
    return folder


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit, as its own nvcc describes it."""

    nvcc: str
    version: str
    includes: list[str]
    libraries: list[str]


def find_cuda() -> tuple[Toolkit | None, str]:
    """The toolkit to compile csrc/cuda with, or None and the reason. A visible GPU plays no part in it."""
    wanted = choice("HALFBYTE_BUILD_CUDA", ("auto", "0", "1"))
    if wanted == "0":
        return None, "HALFBYTE_BUILD_CUDA=0"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    reason = f"there is no CUDA compiler at {nvcc}"
    if Path(nvcc).is_file():
        release = re.search(r"release (\d+\.\d+)", read_output([nvcc, "--version"]).stdout)
        # nvcc may be a wrapper or a link far from its toolkit; a dry run prints the folders it really uses.
        dry_run = read_output([nvcc, "--dryrun", "-x", "cu", "/dev/null"]).stderr
        lines = dict(re.findall(r"^#\$ (INCLUDES|LIBRARIES)=(.*)$", dry_run, re.MULTILINE))
        folders = {key: [word[2:] for word in shlex.split(lines.get(key, ""))] for key in ("INCLUDES", "LIBRARIES")}
        if release and any(Path(folder, "cuda_runtime_api.h").is_file() for folder in folders["INCLUDES"]):
            return Toolkit(nvcc, release[1], folders["INCLUDES"], folders["LIBRARIES"]), ""
        reason = f"the CUDA compiler {nvcc} does not work or has no cuda_runtime_api.h"
    if wanted == "1":
        raise SetupError(f"HALFBYTE_BUILD_CUDA=1, but {reason}; set CUDA_HOME to the folder of the CUDA toolkit")
    return None, reason


def cuda_archs() -> list[str]:
    """TORCH_CUDA_ARCH_LIST as a list: ["8.0", "9.0+PTX"]."""
    listed = re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(" ;,"))
    archs = listed if listed != [""] else DEFAULT_CUDA_ARCHS.split(";")
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise SetupError(f"TORCH_CUDA_ARCH_LIST: each entry looks like 8.0, 9.0a or 9.0+PTX, got {arch!r}")
    return archs


def gencode_flags(archs: list[str]) -> list[str]:
    """nvcc's -gencode flags: machine code per architecture, and PTX where +PTX asks for it."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def wgmma_gencode_flags(archs: list[str]) -> list[str]:
    """gencode_flags() of a file that uses wgmma, with -DHALFBYTE_HAVE_SM90A where it has code for it.

    Machine code for 9.0 becomes that of 9.0a, which has these instructions and runs on 9.0 alone; the others stay, so that
    every device finds some code in the file.
    """
    plain, with_wgmma = (f"-gencode=arch=compute_{number},code=sm_{number}" for number in ("90", "90a"))
    flags = list(dict.fromkeys(with_wgmma if flag == plain else flag for flag in gencode_flags(archs)))
    return [*flags, "-DHALFBYTE_HAVE_SM90A"] if with_wgmma in flags else flags


def cxx() -> list[str]:
    """The C++ compiler's command, g++ unless $CXX names another (it may carry a launcher: "ccache g++")."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    if not command or not shutil.which(command[0]):
        raise SetupError(f"halfbyte needs a C++20 compiler, g++ >= 11, and found no {' '.join(command) or 'g++'!r}")
    return command


def parse_depfile(text: str) -> list[str]:
    """The files that a compiler's -MD output names as prerequisites of its first target."""
    rule = text.replace("\\\n", " ").split(": ", 1)[1].split("\n", 1)[0]
    return [re.sub(r"\\([ #])", r"\1", word).replace("$$", "$") for word in re.findall(r"(?:\\[ #]|\S)+", rule)]


@functools.cache
def modified_ns(path: str) -> float:
    """Modification time; infinitely late when the file is gone, so that whatever used it is made again."""
    try:
        return os.stat(ROOT / path).st_mtime_ns
    except FileNotFoundError:
        return float("inf")


@dataclass(frozen=True)
class CompileStep:
    """One source file, compiled again when the command, a tool's version, the source or any header it read changes.

    Paths are relative to ROOT: objects stay valid when a checkout is copied, and no binary names a machine's folders.
    """

    source: str
    object: str
    command: tuple[str, ...]
    tools: str  # versions of the compiler and of torch, whose headers change behind the same path

    @property
    def key(self) -> str:
        return json.dumps([self.tools, *self.command], indent=0)

    def beside(self, suffix: str) -> Path:
        return ROOT / (self.object.removesuffix(".o") + suffix)

    def is_current(self) -> bool:
        stamp, depfile = self.beside(".stamp"), self.beside(".d")
        if not (self.beside(".o").exists() and depfile.exists() and stamp.exists() and stamp.read_text() == self.key):
            return False
        started = stamp.stat().st_mtime_ns
        return all(modified_ns(path) <= started for path in parse_depfile(depfile.read_text()))

    def run(self) -> None:
        stamp, started = self.beside(".stamp"), time.time_ns()
        stamp.unlink(missing_ok=True)  # the stamp is the promise that the object is whole
        stamp.parent.mkdir(parents=True, exist_ok=True)
        depfile = self.object.removesuffix(".o") + ".d"
        run_tool([*self.command, "-MD", "-MF", depfile, "-c", self.source, "-o", self.object])
        stamp.write_text(self.key)
        os.utime(stamp, ns=(started, started))  # an edit made while the compiler ran is newer than this


def run_tool(command: list[str]) -> None:
    """Runs a compiler or linker in ROOT; its output is printed in one piece, also when several run at once."""
    done = subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode:
        raise CompileError(f"{command[0]} failed with exit status {done.returncode}: {shlex.join(command)}")


def git_commit() -> str | None:
    """Commit of the checkout, "-dirty" appended if it differs; None for an sdist, also inside another repository."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return None
    described = read_output(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
    return described.stdout.strip() or None
