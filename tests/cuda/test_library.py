"""The CUDA library on a machine without a GPU: it loads silently, registers its kernels, and its shapes are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halfbyte
from halfbyte import _library, ops

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = _library.LIBRARY_DIR / "libhalfbyte_cuda.so"
needs_library = pytest.mark.skipif(not LIBRARY.is_file(), reason="built without CUDA")


def schemas() -> list[str]:
    """Names of all ops of csrc/library.cpp that take tensors, overloads `eager` included."""
    text = (ROOT / "csrc" / "library.cpp").read_text()
    both = re.findall(r'def_both\(\s*m, "(\w+)",\s*"\(Tensor', text)
    assert both
    return sorted({*re.findall(r'm\.def\(\s*"(\w+)\(Tensor', text), *both, *(f"{name}.eager" for name in both)})


@needs_library
@pytest.mark.parametrize("name", schemas())
def test_every_op_has_a_cuda_kernel(name: str) -> None:
    key = "CompositeExplicitAutograd" if name in ("quantize_broadcast_", "quantize_scatter_") else "CUDA"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"halfbyte::{name}", key)


@needs_library
def test_loading_prints_nothing_and_needs_no_driver() -> None:
    code = "import torch, halfbyte; assert halfbyte._library.load_error is None, halfbyte._library.load_error"
    env = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@needs_library
def test_library_needs_only_torch_cpu_and_the_system() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
    foreign = {
        n
        for n in needed
        if not n.startswith(
            (
                "libtorch_cpu.",
                "libc10.",
                "libstdc++.",
                "libgcc_s.",
                "libc.",
                "libm.",
                "ld-linux",
                "libdl.",
                "librt.",
                "libpthread.",
            )
        )
    }
    assert foreign == set()


FORMATS = ["nf4", "fp4-dq", "int8", "fp8"]


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_on_a_fake_cuda_device(name: str) -> None:
    fmt = halfbyte.Format.parse(name)
    with FakeTensorMode():
        weight = torch.empty(48, 100, dtype=torch.bfloat16, device="cuda")
        packed = ops.quantize(weight, fmt)
        assert (packed.shape, packed.dtype, packed.device.type) == ((48, fmt.row_bytes(100)), torch.uint8, "cuda")
        dense = ops.dequantize(packed, fmt, 100, torch.float16)
        assert (dense.shape, dense.dtype, dense.device.type) == ((48, 100), torch.float16, "cuda")
        several = ops.quantize_list([weight, torch.empty(3, 100, dtype=torch.bfloat16, device="cuda")], fmt)
        assert [(t.shape, t.dtype, t.device.type) for t in several] == [
            ((n, fmt.row_bytes(100)), torch.uint8, "cuda") for n in (48, 3)
        ]
        several = ops.dequantize_list(several, fmt, [100, 100], torch.float16)
        assert [(t.shape, t.dtype, t.device.type) for t in several] == [((n, 100), torch.float16, "cuda") for n in (48, 3)]
        x = torch.empty(2, 3, 100, dtype=torch.bfloat16, device="cuda")
        y = ops.linear(x, packed, torch.empty(48, dtype=torch.bfloat16, device="cuda"), fmt, 100)
        assert (y.shape, y.dtype, y.device.type) == ((2, 3, 48), torch.bfloat16, "cuda")
        gradient = ops.linear_backward_input(y, packed, fmt, 100)
        assert (gradient.shape, gradient.dtype, gradient.device.type) == ((2, 3, 100), torch.bfloat16, "cuda")
        if name in ("int8", "fp8"):
            y = getattr(ops, f"{name}_linear")(x, packed, None, 100)
            assert (y.shape, y.dtype, y.device.type) == ((2, 3, 48), torch.bfloat16, "cuda")
        a, b = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((8, 100), (48, 4)))
        y = ops.lora_linear(x, packed, None, a, b, 2.0, fmt, 100, splits=[40, 8])
        assert (y.shape, y.dtype, y.device.type) == ((2, 3, 48), torch.bfloat16, "cuda")
        a = torch.empty(4, 100, dtype=torch.bfloat16, device="cuda")
        y = ops.lora_linear(x, packed, None, a, b, 2.0, fmt, 100, dropout=0.1)
        assert (y.shape, y.dtype, y.device.type) == ((2, 3, 48), torch.bfloat16, "cuda")
        rows = ops.embedding(torch.empty(5, 7, dtype=torch.int64, device="cuda"), packed, fmt, 100, torch.float32)
        assert (rows.shape, rows.dtype, rows.device.type) == ((5, 7, 100), torch.float32, "cuda")


@needs_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="the point is a machine without a GPU")
def test_a_cuda_kernel_called_without_a_gpu_says_so() -> None:
    """Calls the CUDA kernel by its dispatch key: what a user would see with a torch that has no CUDA."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    op = torch.ops.halfbyte.quantize.default
    with pytest.raises(RuntimeError, match=r"^halfbyte::quantize: this torch has no CUDA support"):
        op.redispatch(keys, torch.randn(4, 64), 0, 64)
    with pytest.raises(
        ValueError, match=r"halfbyte::quantize: block_size must be a power of two from 32 to 4096 for nf4, got 33"
    ):
        op.redispatch(keys, torch.randn(4, 64), 0, 33)


@needs_library
@pytest.mark.parametrize("splits", [[], [20, 0, 28]])
@pytest.mark.parametrize(("dtype", "adapter"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_gradients_of_an_adapter_are_products_of_aten(dtype: torch.dtype, adapter: torch.dtype, splits: list[int]) -> None:
    """Without dropout nothing but aten is in it, so that the CUDA front runs on CPU tensors."""
    op, keys = torch.ops.halfbyte.lora_linear_backward_adapter.default, torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    grad, x = (torch.randn(2, 5, size, dtype=dtype) for size in (48, 100))
    low, more = (torch.randn(2, 5, 3 * (len(splits) or 1)) for _ in range(2))
    for given, *needs in ((None, True, True), (more, True, False), (more, False, True)):
        arguments = (grad, x, low, torch.randn(48, 3, dtype=adapter), given, 0.5, splits, *needs)
        for got, want in zip(op.redispatch(keys, *arguments), op(*arguments), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="would launch on CPU addresses")
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("quantize", (torch.zeros(4), 0, 64), "at least 2 dimensions"),
        ("quantize_with_scales", (torch.zeros(4, 64), torch.zeros(4, 2), 0, 64), "replaced by 1"),
        (
            "dequantize",
            (torch.zeros(4, 64, dtype=torch.uint8), 0, 64, 64, torch.float32),
            "must have 48 bytes per row for nf4",
        ),
        ("quantize_list", ([torch.zeros(4, 64), torch.zeros(4)], 0, 64), r"input\[1\] must have at least 2 dimensions"),
        (
            "dequantize_list",
            ([torch.zeros(4, 48, dtype=torch.uint8), torch.zeros(4, 64, dtype=torch.uint8)], 0, 64, [64, 64], torch.float32),
            r"packed\[1\] must have 48 bytes per row for nf4",
        ),
        ("linear", (torch.zeros(2, 65), torch.zeros(4, 48, dtype=torch.uint8), None, 0, 64, 64), "must be in_features=64"),
        ("linear_backward_input", (torch.zeros(2, 5), torch.zeros(4, 48, dtype=torch.uint8), 0, 64, 64), "out_features=4"),
        ("int8_linear", (torch.zeros(2, 65), torch.zeros(4, 80, dtype=torch.uint8), None, 64), "must be in_features=64"),
        ("fp8_linear", (torch.zeros(2, 65), torch.zeros(4, 80, dtype=torch.uint8), None, 64), "must be in_features=64"),
        (
            "lora_linear",
            (
                torch.zeros(2, 64),
                torch.zeros(4, 48, dtype=torch.uint8),
                None,
                *(torch.zeros(3, 64), torch.zeros(4, 2), 1.0, [], 0, 64, 64),
            ),
            r"lora_A must have shape \(2, 64\)",
        ),
        (
            "lora_linear_backward_input",
            (torch.zeros(2, 4), torch.zeros(4, 48, dtype=torch.uint8), torch.zeros(2, 3), torch.zeros(2, 64), 0, 64, 64),
            "last dimension replaced by 2",
        ),
        (
            "lora_linear_backward_adapter",
            (torch.zeros(2, 4), torch.zeros(2, 64), torch.zeros(2, 2), torch.zeros(5, 2), None, 1.0, [], True, True),
            r"grad_output must have input's shape with the last dimension replaced by 5",
        ),
        (
            "lora_linear_backward_adapter",
            (
                *(torch.zeros(2, 5), torch.zeros(2, 64), torch.zeros(2, 2), torch.zeros(5, 2), None, 1.0, [], True, True),
                torch.zeros(2, 7, dtype=torch.uint8),
            ),
            "mask must have a bit for each of 64 columns",
        ),
        ("dropout_mask", (torch.zeros(2, 5), torch.zeros(1), 0.1), "seed must be one int64"),
        ("embedding", (torch.zeros(2), torch.zeros(4, 48, dtype=torch.uint8), 0, 64, 64, torch.float32), "int64 or int32"),
    ],
)
def test_fronts_check_before_they_touch_the_device(name: str, arguments: tuple[object, ...], text: str) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(ValueError, match=rf"halfbyte::{name}: .*{text}"):
        getattr(torch.ops.halfbyte, name).default.redispatch(keys, *arguments)
