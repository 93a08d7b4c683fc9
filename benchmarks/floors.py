"""Floors of CPU benchmarks: bandwidths and rates of multiplication, by floors.cpp, as cases to time beside the others."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from timing import Case, Rotated, aligned, rotate

# What floors.cpp may use where an instruction set is forced; -march=native elsewhere.
FLOOR_FLAGS = {"avx2": ["-march=x86-64-v3"], "avx2_vnni": ["-march=x86-64-v3", "-mavxvnni"]}
FLOOR_FLAGS |= {"avx512_base": ["-march=x86-64-v4"], "avx512_vnni": ["-march=x86-64-v4", "-mavx512vnni"]}
# Some 10 ms of work or more: a virtual CPU that slept shares another one's core for the first few.
LEAST_PRODUCTS = 2**32


@functools.cache
def library() -> ctypes.CDLL:
    """floors.cpp, compiled."""
    target = Path(tempfile.mkdtemp(prefix="halfbyte-floors-")) / "floors.so"
    source = Path(__file__).with_name("floors.cpp")
    compiler = os.environ.get("CXX", "g++")
    target_flags = FLOOR_FLAGS.get(os.environ.get("HALFBYTE_CPU_ISA", ""), ["-march=native"])
    flags = ["-std=c++20", "-O3", *target_flags, "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def floor(kind: str, nbytes: int) -> Case:
    """The case of a floor.

    Args:
        kind: "copy", "read", "write", or "bf16 products", "fp32 products", "int8 products".
        nbytes: bytes, of "copy" read and written together; of products their number.

    Raises:
        ValueError: fewer bytes than every thread can share in.
    """
    floors, threads = library(), torch.get_num_threads()
    if kind.endswith(" products"):
        times = -(-LEAST_PRODUCTS // nbytes)
        multiply, count = getattr(floors, f"floor_{kind.replace(' ', '_')}"), ctypes.c_int64(nbytes * times)
        return Case(lambda _: multiply(count, ctypes.c_int(threads)), flops=2 * nbytes, times=times)
    length = nbytes // (2 if kind == "copy" else 1) // (256 * threads) * (256 * threads)
    if length == 0:
        raise ValueError(f"a {kind} floor needs at least {512 * threads} bytes, got {nbytes}")

    def fresh(_: int) -> torch.Tensor:
        return aligned(length, torch.uint8)

    # An op's output takes the same memory at every call (`reuse_memory`), and so does "write".
    sources: Rotated[torch.Tensor] = Rotated([]) if kind == "write" else rotate(lambda i: fresh(i).random_(), length)
    targets = sources if kind == "read" else Rotated([fresh(0)]) if kind == "write" else rotate(fresh, length)
    size, pool = ctypes.c_int64(length), ctypes.c_int(threads)

    def source(i: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(sources[i].data_ptr())

    def target(i: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(targets[i].data_ptr())

    if kind == "read":
        return Case(lambda i: floors.floor_read(source(i), size, pool), length)
    if kind == "write":
        return Case(lambda i: floors.floor_write(target(i), size, pool), length)

    def copy(i: int) -> None:
        floors.floor_copy(source(i), target(i), size, pool)

    copy(0)
    if not torch.equal(sources[0], targets[0]):
        raise AssertionError("the copy floor did not copy")
    return Case(copy, 2 * length)
