"""Fixtures of the CUDA tests: the kernels compiled for the CPU (emulator.h), and which files this machine can run."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte.formats import Format

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FLAGS = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-DHALFBYTE_EMULATE_CUDA",
    "-x",
    "c++",
]
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def cuda_home() -> Path | None:
    """The CUDA toolkit whose headers the emulated kernels and whose compiler the ptxas figures need."""
    nvcc = shutil.which("nvcc")
    for home in (os.environ.get("CUDA_HOME"), nvcc and str(Path(nvcc).resolve().parent.parent), "/usr/local/cuda"):
        if home and (Path(home) / "include" / "cuda_bf16.h").is_file():
            return Path(home)
    return None


collect_ignore = []
if not torch.cuda.is_available():
    print("tests/cuda: no GPU, test_on_gpu.py is not collected")
    collect_ignore.append("test_on_gpu.py")
if cuda_home() is None:
    print("tests/cuda: no CUDA toolkit, the emulated kernels are not collected")
    collect_ignore += [path.name for path in HERE.glob("test_emulated_*.py")] + ["test_ptxas.py"]


class Emulated:
    """The launchers of csrc/cuda/kernels.h, running on CPU tensors."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library))
        self.launches = 0

    def reversed_threads(self, on: bool) -> None:
        """Runs the threads of a block from the last to the first: a race on shared memory shows as a difference."""
        self.c.emulated_set_reversed(int(on))

    def late_products(self, on: bool) -> None:
        """A wgmma happens at the wait that asks for it instead of at once; threads and copies have their own order."""
        self.c.emulated_set_wgmma_late(int(on))

    def call(self, name: str, *args: object) -> None:
        """Calls an entry point: tensors go as pointers, ints as int64 unless wrapped."""

        def convert(value: object) -> object:
            if isinstance(value, Tensor):
                assert value.is_contiguous()
                return ctypes.c_void_p(value.data_ptr())
            return ctypes.c_int64(value) if isinstance(value, int) else value

        status = getattr(self.c, name)(*map(convert, args))
        if status != 0:
            raise RuntimeError(f"{name} returned CUDA error {status}")

    def quantize(self, x: Tensor, fmt: Format, scales: Tensor | None = None) -> Tensor:
        rows, k = x.shape
        packed = aligned(rows * fmt.row_bytes(k), 0).view(rows, fmt.row_bytes(k))
        self.call("emulated_quantize", x, DTYPES[x.dtype], scales, rows, fmt.id, fmt.block_size, k, packed)
        return packed

    def dequantize(self, packed: Tensor, fmt: Format, k: int, dtype: torch.dtype) -> Tensor:
        out = torch.full((packed.shape[0], k), 7.0, dtype=dtype)
        self.call("emulated_dequantize", packed, packed.shape[0], fmt.id, fmt.block_size, k, DTYPES[dtype], out)
        return out

    def dequantize_list(self, packed: list[Tensor], fmt: Format, columns: list[int], dtype: torch.dtype) -> list[Tensor]:
        """The outputs; `launches` is then how many launches there were."""
        outputs = [torch.full((rows.shape[0], k), 7.0, dtype=dtype) for rows, k in zip(packed, columns, strict=True)]
        self._call_list("emulated_dequantize_list", packed, columns, fmt, dtype, outputs)
        return outputs

    def quantize_list(self, inputs: list[Tensor], fmt: Format) -> list[Tensor]:
        """The same for quantize."""
        columns = [x.shape[1] for x in inputs]
        shapes = [(len(x), fmt.row_bytes(x.shape[1])) for x in inputs]
        packed = [aligned(rows * size, 0).view(rows, size) for rows, size in shapes]
        dtype = inputs[0].dtype if inputs else torch.float32
        self._call_list("emulated_quantize_list", inputs, columns, fmt, dtype, packed)
        return packed

    def _call_list(
        self, name: str, inputs: list[Tensor], columns: list[int], fmt: Format, dtype: torch.dtype, outputs: list[Tensor]
    ) -> None:
        count = len(inputs)

        def pointers(tensors: list[Tensor]) -> object:
            return (ctypes.c_void_p * count)(*[t.data_ptr() for t in tensors])

        def integers(values: list[int]) -> object:
            return (ctypes.c_int64 * count)(*values)

        lists = pointers(inputs), integers([len(x) for x in inputs]), integers(columns)
        sizes = map(ctypes.c_int64, (fmt.id, fmt.block_size, DTYPES[dtype]))
        status = getattr(self.c, name)(ctypes.c_int64(count), *lists, *sizes, pointers(outputs))
        if status > 0:
            raise RuntimeError(f"{name} returned CUDA error {status}")
        self.launches = -status

    def error_feedback(
        self,
        weight: Tensor,
        factor: Tensor | None,
        importance: Tensor,
        candidates: Tensor,
        fmt: Format,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, k = weight.shape
        targets, chosen = torch.full((rows, k), 7.0), torch.full((rows, fmt.num_blocks(k)), 7.0)
        sizes = (candidates.numel(), rows, fmt.id, fmt.block_size, k)
        self.call("emulated_error_feedback", weight, factor, importance, scales, candidates, *sizes, targets, chosen)
        return targets, chosen

    def embedding(self, indices: Tensor, packed: Tensor, fmt: Format, k: int, dtype: torch.dtype) -> Tensor:
        out = torch.full((indices.numel(), k), 7.0, dtype=dtype)
        wide = int(indices.dtype == torch.int64)
        self.call(
            "emulated_embedding",
            indices,
            wide,
            indices.numel(),
            packed,
            packed.shape[0],
            fmt.id,
            fmt.block_size,
            k,
            DTYPES[dtype],
            out,
        )
        return out


def aligned(size: int, offset: int) -> Tensor:
    """uint8 bytes, poisoned, whose address is `offset` past a multiple of 64."""
    buffer = torch.full((size + 128,), 0xA5, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64 + offset
    return buffer[start : start + size]


ROUTES = ("small", "tiled", "dense", "wgmma")


def route_of(emulated: Emulated, *, backward: bool, **change: int) -> str:
    """The route of a problem; dense: the first obstacle to the others. The default is a problem of the small route."""
    p = {"M": 16, "N": 4096, "K": 4096, "format": 0, "block_size": 64, "dtype": 1, "input_width": 16, "packed_width": 16}
    p |= {"wgmma": 0, "forced": -1} | change
    name, wide = ctypes.c_char_p(), {"M", "N", "K", "block_size"}
    sizes = [ctypes.c_int64(value) if key in wide else value for key, value in p.items()]
    route = ROUTES[emulated.c.linear_route_of(int(backward), *sizes, ctypes.byref(name))]
    assert (route == "dense") is (name.value is not None) or p["forced"] >= 0
    return route if name.value is None else name.value.decode()


def compiled(source: Path, output: Path) -> Path:
    """An object of the kernels for the CPU."""
    home = cuda_home()
    assert home is not None
    command = [os.environ.get("CXX", "g++"), *FLAGS, "-isystem", f"{home}/include", "-c", str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def linked(objects: list[Path], library: Path) -> Path:
    subprocess.run([os.environ.get("CXX", "g++"), "-shared", "-o", str(library), *map(str, objects)], check=True)
    return library


@pytest.fixture(scope="session")
def emulated() -> Emulated:
    """csrc/cuda/*.cu compiled with the host compiler: once per state of the sources, also with several test workers."""
    sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), *sorted(HERE.glob("*.cpp"))]
    headers = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc" / "cuda").glob("*.h"), *HERE.glob("*.h"), Path(__file__)]
    key = hashlib.sha256(os.environ.get("CXX", "g++").encode())
    for path in sorted([*sources, *headers]):
        key.update(path.read_bytes())
    folder = ROOT / "build" / "emulated_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{key.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            for stale in folder.glob("*.so"):
                stale.unlink()
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda source: compiled(source, folder / f"{source.name}.o"), sources))
            linked(objects, library)
    return Emulated(library)
