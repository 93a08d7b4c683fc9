"""The AMX kernels with emulated tiles against the AVX-512 kernels: int8 bit for bit, bf16 within linear's bound.

They need no AMX: csrc/cpu/amx_tiles.h holds its instructions; under HALFBYTE_EMULATE_AMX they are plain C++ written
from the instruction reference, and everything above them is what isa_amx.cpp compiles.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte.formats import Format

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from setup import ISA_FLAGS  # noqa: E402  (the flags that the library is built with)

ops = torch.ops.halfbyte
CPU = set(Path("/proc/cpuinfo").read_text().split())
pytestmark = pytest.mark.skipif(
    not {"avx512_vnni", "avx512vbmi"} <= CPU, reason="the kernels around the tiles need AVX-512 with VNNI and VBMI"
)


def compile_driver(folder: Path, flags: list[str], name: str) -> ctypes.CDLL:
    """tests/amx_driver.cpp with `flags`."""
    target = folder / f"{name}.so"
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    isa = list(ISA_FLAGS["x86_64"]["avx512"])
    if "avx512_bf16" not in CPU:
        isa[isa.index("-mavx512bf16")] = "-DHALFBYTE_EMULATE_BF16"
    command += [f"-I{ROOT / 'csrc'}", *isa, *flags]
    subprocess.run([*command, str(ROOT / "tests/amx_driver.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """(tiles emulated, no tiles)."""
    folder = tmp_path_factory.mktemp("amx")
    with ThreadPoolExecutor() as pool:
        emulated = pool.submit(compile_driver, folder, ["-DHALFBYTE_EMULATE_AMX"], "amx")
        plain = pool.submit(compile_driver, folder, [], "avx512")
        return emulated.result(), plain.result()


def pointer(t: Tensor) -> ctypes.c_void_p:
    assert t.is_contiguous()
    return ctypes.c_void_p(t.data_ptr())


def size(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def room(elements: int) -> Tensor:
    """Units for that many of them, and a guard after them."""
    return torch.zeros(elements + 4096, dtype=torch.float32)


def forward(
    driver: ctypes.CDLL, x: Tensor, packed: Tensor, fmt: Format, split: int, low: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    (M, K), N = x.shape, len(packed)
    out = torch.full((M, N), torch.nan, dtype=torch.bfloat16)
    units, rank = room((M + 64) * (K + 128)), low[0].shape[1] if low else 0
    low_units, low_tiles = room((N + 48) * (rank + 32)), room((M + 64) * (rank + 32))
    a, b = low or (out, out)
    driver.forward(
        pointer(packed), size(N), size(split), fmt.id, size(fmt.block_size), size(K), pointer(x), size(M), pointer(units),
        pointer(a), pointer(b), size(rank), pointer(low_units), pointer(low_tiles), pointer(out),
    )  # fmt: skip
    return out


def turned(
    driver: ctypes.CDLL, x: Tensor, packed: Tensor, fmt: Format, split: int, as_it_lies: bool,
    low: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (M, K), N = x.shape, len(packed)
    out = torch.full((M, N), torch.nan, dtype=torch.bfloat16)
    units, rank = room((M + 64) * (K + 128)), low[0].shape[1] if low else 0
    low_units, low_input = room((N + 48) * (rank + 32)), room((M + 64) * (rank + 32))
    a, b = low or (out, out)
    assert driver.turned(
        pointer(packed), size(N), size(split), fmt.id, size(fmt.block_size), size(K), pointer(x), size(M), pointer(units),
        ctypes.c_bool(as_it_lies), pointer(a), pointer(b), size(rank), pointer(low_units), pointer(low_input),
        None if bias is None else pointer(bias), pointer(out),
    )  # fmt: skip
    return out


def within(got: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> None:
    """The bound of tests/linear/oracle.py; a weight's rounding to bf16 and the output's are the largest parts."""
    bound = magnitude * (2.0**-8 + (terms + 8) * 2.0**-24) * (1 + 2.0**-8) + exact.abs() * 2.0**-8 + 2.0**-100
    assert got.isfinite().all()
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", ["nf4", "nf4:32", "fp4-dq", "int8", "fp8"])
@pytest.mark.parametrize(("M", "N", "K"), [(16, 48, 128), (33, 61, 576), (70, 110, 100), (130, 200, 1100)])
def test_forward(drivers: tuple[ctypes.CDLL, ctypes.CDLL], name: str, M: int, N: int, K: int) -> None:
    fmt = Format.parse(name)
    torch.manual_seed(M + N)
    packed = ops.quantize(torch.randn(N, K), fmt.id, fmt.block_size)
    weight = ops.dequantize(packed, fmt.id, fmt.block_size, K, torch.float32).double()
    x = torch.randn(M, K).bfloat16()
    exact, magnitude = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    got = forward(drivers[0], x, packed, fmt, N // 2)
    within(got, exact, magnitude, K)
    assert torch.equal(got, forward(drivers[0], x, packed, fmt, N // 3)), "results depend on how rows are split"
    # The weights are rounded alike and only the order of sums differs: much closer than the bound to the AVX-512 kernels.
    difference = (got.double() - forward(drivers[1], x, packed, fmt, N).double()).abs()
    assert (difference <= magnitude * (K + 8) * 2.0**-23 + exact.abs() * 2.0**-7).all()


@pytest.mark.parametrize("name", ["nf4", "nf4:32", "fp4-dq", "int8", "fp8"])
@pytest.mark.parametrize(("M", "N", "K"), [(16, 48, 128), (33, 61, 576), (64, 300, 640), (70, 110, 100), (144, 200, 1100)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_turned_weights(
    drivers: tuple[ctypes.CDLL, ctypes.CDLL], name: str, M: int, N: int, K: int, has_bias: bool
) -> None:
    fmt = Format.parse(name)
    torch.manual_seed(M + N)
    packed = ops.quantize(torch.randn(N, K), fmt.id, fmt.block_size)
    weight = ops.dequantize(packed, fmt.id, fmt.block_size, K, torch.float32).double()
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N).bfloat16() if has_bias else None
    exact, magnitude = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    got = turned(drivers[0], x, packed, fmt, N // 2, False, None, bias)
    within(got, exact, magnitude, K)
    assert torch.equal(got, turned(drivers[0], x, packed, fmt, N // 3, False, None, bias))
    if M % 16 == 0 and K % 32 == 0:
        assert torch.equal(got, turned(drivers[0], x, packed, fmt, N // 3, True, None, bias))


@pytest.mark.parametrize("rank", [1, 8, 16, 33, 64, 300, 1000])  # 300, 1000: more units than a panel has
def test_low_rank_part(drivers: tuple[ctypes.CDLL, ctypes.CDLL], rank: int) -> None:
    fmt, M, N, K = Format.parse("nf4"), 40, 100, 192
    torch.manual_seed(rank)
    packed = ops.quantize(torch.randn(N, K), fmt.id, fmt.block_size)
    weight = ops.dequantize(packed, fmt.id, fmt.block_size, K, torch.float32).double()
    x, a, b = torch.randn(M, K).bfloat16(), torch.randn(M, rank).bfloat16(), torch.randn(N, rank).bfloat16()
    exact = x.double() @ weight.t() + a.double() @ b.double().t()
    magnitude = x.double().abs() @ weight.abs().t() + a.double().abs() @ b.double().abs().t()
    within(forward(drivers[0], x, packed, fmt, 50, (a, b)), exact, magnitude, K + rank)
    within(turned(drivers[0], x, packed, fmt, 50, False, (a, b)), exact, magnitude, K + rank)


@pytest.mark.parametrize(
    ("M", "N", "K"), [(16, 32, 128), (33, 61, 576), (70, 300, 1100), (130, 1031, 260), (80, 608, 700), (5, 64, 128)]
)
def test_backward(drivers: tuple[ctypes.CDLL, ctypes.CDLL], M: int, N: int, K: int) -> None:
    fmt = Format.parse("nf4")
    torch.manual_seed(M + N)
    packed = ops.quantize(torch.randn(N, K), fmt.id, fmt.block_size)
    weight = ops.dequantize(packed, fmt.id, fmt.block_size, K, torch.float32).double()
    grad = torch.randn(M, N).bfloat16()
    for as_it_lies in (False, True)[: 2 if M % 16 == 0 and N % 32 == 0 else 1]:
        out, units = torch.full((M, K), torch.nan, dtype=torch.bfloat16), room((M + 16) * (N + 256))
        drivers[0].backward(
            pointer(packed), size(N), fmt.id, size(fmt.block_size), size(K), pointer(grad), size(M), size(M // 32 * 16),
            ctypes.c_bool(as_it_lies), pointer(units), pointer(out),
        )  # fmt: skip
        within(out, grad.double() @ weight, grad.double().abs() @ weight.abs(), N)


@pytest.mark.parametrize(("M", "N", "K"), [(16, 48, 64), (33, 61, 577), (70, 110, 100), (130, 200, 2300)])
def test_int8_is_exact(drivers: tuple[ctypes.CDLL, ctypes.CDLL], M: int, N: int, K: int) -> None:
    int8 = Format.parse("int8")
    torch.manual_seed(M + N)
    packed, x = (ops.quantize(torch.randn(rows, K), int8.id, 0) for rows in (N, M))
    results = []
    for driver in drivers:
        out, units, factors = torch.full((M, N), torch.nan), room((M + 64) * (K + 64)), torch.zeros(M + 64)
        weight = (pointer(packed), size(N), size(K))
        read = torch.cat((x.flatten(), torch.full((64,), 255, dtype=torch.uint8)))
        driver.integer(*weight, pointer(read), size(M), pointer(units), pointer(factors), pointer(out))
        results.append(out)
    assert torch.equal(*results)
    sums = x[:, :K].view(torch.int8).double() @ packed[:, :K].view(torch.int8).double().t()
    at = int8.scales_offset(K)
    scales = [rows[:, at : at + 4].contiguous().view(torch.float32).double() for rows in (x, packed)]
    torch.testing.assert_close(results[0].double(), sums * (scales[0] / 127) * (scales[1] / 127).t(), rtol=1e-6, atol=0)


def test_amx_is_refused_where_the_cpu_has_none() -> None:
    if "amx_tile" in CPU:
        pytest.skip("this CPU has AMX")
    code = "import torch, halfbyte\ntry: torch.ops.halfbyte.cpu_isa()\nexcept ValueError as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "HALFBYTE_CPU_ISA": "amx"},
    )  # fmt: skip
    assert "HALFBYTE_CPU_ISA=amx: this CPU does not have it" in done.stdout, done.stderr
