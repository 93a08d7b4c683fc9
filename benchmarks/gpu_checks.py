"""Correctness of every op on a GPU against the CPU ops: the list that gpu_check.py and tests/cuda/test_on_gpu.py run.

The CPU ops are byte-equal to halfbyte.reference (tests/). Each check takes a device and raises AssertionError.
With device cpu the plumbing runs without a GPU (`gpu_check.py --dry-run`), except for the checks in CUDA_ONLY.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import halfbyte
from halfbyte import reference_products, testing
from halfbyte.formats import Format

Check = Callable[[torch.device], None]
CHECKS: dict[str, Check] = {}
CUDA_ONLY: set[str] = set()
# Ops whose result is a sum in an order of its own: compared by a bound instead of bytes.
SUMS = {
    *("linear", "linear_backward_input", "fp8_linear"),
    *("lora_linear", "lora_linear_backward_input", "lora_linear_backward_adapter"),
}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def cuda_check(function: Check) -> Check:
    CUDA_ONLY.add(function.__name__)
    return check(function)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in tensors_of(v)] if isinstance(values, (list, tuple)) else []


def moved(values: Any, device: Any) -> Any:
    """A copy of nested arguments with their tensors on `device`."""
    if isinstance(values, Tensor):
        return values.detach().to(device, copy=True)
    if isinstance(values, testing.Call):
        keywords = {name: moved(value, device) for name, value in values.keywords.items()}
        return testing.Call.of(*(moved(value, device) for value in values), **keywords)
    return type(values)(moved(v, device) for v in values) if isinstance(values, (list, tuple)) else values


def assert_same(name: str, ours: Tensor, cpu: Tensor) -> None:
    ours = ours.detach().cpu()
    assert (ours.shape, ours.dtype) == (cpu.shape, cpu.dtype), name
    if not ours.dtype.is_floating_point:
        # Optimizer codes may differ by one where a fp32 result rounds differently; packed rows never.
        allowed = 1 if "step" in name else 0
        assert ours.numel() == 0 or (ours.int() - cpu.int()).abs().max() <= allowed, name
        return
    assert torch.equal(ours.isnan(), cpu.isnan()), name
    if name in SUMS:
        # Terms cancel: an element is as exact as the sums of its size, some 2^-8 (16 bits) of the largest ones.
        largest = float(cpu.nan_to_num().abs().max()) if cpu.numel() else 0.0
        rtol = 2e-2 if ours.element_size() == 2 else 1e-4
        torch.testing.assert_close(ours.nan_to_num(), cpu.nan_to_num(), rtol=rtol, atol=2e-2 + rtol * largest)
    elif "step" in name:
        torch.testing.assert_close(ours.nan_to_num(), cpu.nan_to_num(), rtol=1e-2, atol=1e-5)
    else:
        assert torch.equal(ours.nan_to_num(0.5), cpu.nan_to_num(0.5)), name


def ops() -> list[str]:
    return [name for name in testing.registered_ops() if name in testing.SPECS]


@check
def every_sample_of_every_op_equals_the_cpu(device: torch.device) -> None:
    differ: dict[str, str] = {}
    for name in ops():
        op = getattr(torch.ops.halfbyte, name).default
        for sample in testing.SPECS[name].samples(str(device)):
            ours, cpu = moved(sample, device), moved(sample, "cpu")
            outputs = (op(*call, **testing.keywords_of(call)) for call in (ours, cpu))
            results = zip(*map(tensors_of, outputs), strict=True)
            try:
                for a, b in [*results, *zip(tensors_of(ours), tensors_of(cpu), strict=True)]:
                    assert_same(name, a, b)
            except AssertionError as error:
                differ[name] = str(error)
    assert not differ, differ


@check
def opcheck_of_every_sample(device: torch.device) -> None:
    for name in ops():
        for sample in testing.SPECS[name].samples(str(device)):
            op = getattr(torch.ops.halfbyte, name).default
            torch.library.opcheck(op, tuple(sample), testing.keywords_of(sample))  # pytree does not look into a Call


@check
def hostile_arguments_raise(device: torch.device) -> None:
    for name in ops():
        for arguments, kind, text in testing.SPECS[name].hostile(str(device)):
            if name == "embedding" and kind is IndexError and device.type == "cuda":
                continue  # checked on the device, by an assertion that ends the context: test_on_gpu.py has it in a process
            try:
                getattr(torch.ops.halfbyte, name).default(*arguments, **testing.keywords_of(arguments))
            except kind as error:
                assert re.search(text, str(error)), (name, text, str(error))  # noqa: PT017
            else:
                raise AssertionError(f"{name}{arguments} did not raise")


@check
def formats_dtypes_and_row_lengths(device: torch.device) -> None:
    for format in testing.ALL_FORMATS:
        for k in (1, 7, 8, 63, 64, 65, 100, 576, 1027, 4304):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x = torch.randn(9, k).to(dtype)
                x[0], x[1, k // 2], x[2, 0], x[3] = 0, float("nan"), float("inf"), x[3] * 1e-6
                packed = halfbyte.quantize(x.to(device), format)
                assert_same("quantize", packed, halfbyte.quantize(x, format))
                for out in (torch.float32, torch.bfloat16, torch.float16):
                    assert_same(
                        "dequantize",
                        halfbyte.dequantize(packed, format, k, out),
                        halfbyte.dequantize(packed.cpu(), format, k, out),
                    )


@check
def lists_equal_the_ops_on_one_tensor(device: torch.device) -> None:
    """More tensors than a launch takes, of every kind of shape, some where no whole load or store fits."""
    shapes = [(9, 64), (1, 4304), (300, 576), (7, 65), (2, 8), (5, 1), (0, 64), (64, 2048), (2, 3, 100), (33, 1024)] * 7
    for format in testing.ALL_FORMATS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            packed, columns = halfbyte.ops.quantize_list(x, format), [shape[-1] for shape in shapes]
            for rows, one in zip(packed, x, strict=True):
                assert torch.equal(rows, halfbyte.quantize(one, format))
            buffer = torch.zeros(packed[2].numel() + 1, dtype=torch.uint8, device=device)
            packed[2] = buffer[1:].view(packed[2].shape).copy_(packed[2])
            dense = halfbyte.ops.dequantize_list(packed, format, columns, dtype)
            for values, rows, k in zip(dense, packed, columns, strict=True):
                assert torch.equal(values, halfbyte.dequantize(rows, format, k, dtype))


@check
def misaligned_addresses(device: torch.device) -> None:
    for name in ("nf4", "fp4-dq", "int8", "fp8"):
        format = Format.parse(name)
        packed = halfbyte.quantize(torch.randn(33, 576), format)
        buffer = torch.zeros(packed.numel() + 32, dtype=torch.uint8, device=device)
        for shift in (1, 2, 4, 8):
            rows = buffer[shift : shift + packed.numel()].view(packed.shape)
            rows.copy_(packed)
            assert_same("dequantize", halfbyte.dequantize(rows, format, 576), halfbyte.dequantize(packed, format, 576))
            x = torch.randn(4, 576).to(torch.bfloat16)
            assert_same(
                "linear",
                halfbyte.ops.linear(x.to(device), rows, None, format, 576),
                halfbyte.ops.linear(x, packed, None, format, 576),
            )


def linear_bound(x: Tensor, packed: Tensor, format: Format, y: Tensor) -> float:
    """Largest error over its bound: one rounding per weight, fp32 sums, one rounding of the result."""
    k = x.shape[-1]
    w = halfbyte.dequantize(packed, format, k, torch.float32).double()
    exact, magnitude = x.double() @ w.T, x.double().abs() @ w.abs().T
    eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-10}[x.dtype]  # fp32: tf32 may be on
    return float(((y.double() - exact).abs() / (magnitude * (eps + k * 2.0**-24) + exact.abs() * eps + 1e-6)).max())


def backward_bound(grad: Tensor, packed: Tensor, k: int, dx: Tensor, format: str | Format = "nf4") -> float:
    """As linear_bound; the small kernel rounds codebook, scale and product of a weight."""
    w = halfbyte.dequantize(packed, format, k, torch.float32).double()
    exact, magnitude = grad.double() @ w, grad.double().abs() @ w.abs()
    eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-10}[grad.dtype]  # fp32: tf32 may be on
    tiny = 2.0**-25 * grad.double().abs().sum(-1, keepdim=True)  # fp16 weights below 2^-14
    bound = magnitude * (3.02 * eps + grad.shape[-1] * 2.0**-24) + exact.abs() * eps + tiny + 1e-6
    return float(((dx.double() - exact).abs() / bound).max())


@check
def backward_of_every_route(device: torch.device) -> None:
    largest = 4096 if device.type == "cuda" else 576
    for name in ("nf4", "fp4", "nf4-dq", "nf4:32", "nf4:256", "int8"):
        format = Format.parse(name)
        for n, k in ((4, 16), (36, 576), (largest, 1024), (1024, largest), (100, 100)):
            packed = halfbyte.quantize(torch.randn(n, k) * 0.05, format).to(device)
            for m in (1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 193, 256, 257):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    grad = torch.randn(m, n, device=device).to(dtype)
                    dx = halfbyte.ops.linear_backward_input(grad, packed, format, k)
                    assert backward_bound(grad, packed, k, dx, format) <= 1, (name, n, k, m, dtype)
                    assert torch.equal(dx, halfbyte.ops.linear_backward_input(grad, packed, format, k)), "not repeatable"


@check
def fp8_linear_of_every_route(device: torch.device) -> None:
    """fp8 tensor cores keep about 14 bits of a sum within 128 elements of K: 2^-11 of the magnitudes covers it."""
    for m, n, k in ((1, 16, 16), (5, 64, 576), (17, 4096, 1024), (300, 48, 4096), (9, 33, 100)):
        packed = halfbyte.quantize(torch.randn(n, k), "fp8")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
            x[0, k // 2] *= 1e-3
            eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-11}[dtype]
            for added in (None, bias):
                y = halfbyte.ops.fp8_linear(
                    x.to(device), packed.to(device), None if added is None else added.to(device), k
                ).cpu()
                exact = reference_products.fp8_linear(x, packed, added, k)
                magnitude = reference_products.fp8_linear(x.abs(), packed & 0x7F, None if added is None else added.abs(), k)
                # Where it decodes, both sides are rounded to dtype once more.
                bound = magnitude * (2.0**-11 + 2 * eps) + exact.abs() * eps + 1e-6
                assert ((y.double() - exact).abs() <= bound).all(), (m, n, k, dtype)


@cuda_check
def the_8bit_products_take_rows_where_they_lie(device: torch.device) -> None:
    """aten::_int_mm and aten::_scaled_mm on views with the pitch of packed rows, against contiguous copies: bit for bit."""
    for m, n, k in ((32, 64, 64), (512, 4096, 4096), (100, 1536, 576), (64, 256, 14336)):
        left, right = (halfbyte.quantize(torch.randn(rows, k, device=device), "int8") for rows in (m, n))
        a, w = (rows.view(torch.int8)[:, :k] for rows in (left, right))
        assert a.stride(0) == left.shape[1] != k
        assert torch.equal(torch._int_mm(a, w.t()), torch._int_mm(a.contiguous(), w.contiguous().t())), ("int8", m, n, k)
        if torch.cuda.get_device_capability(device) >= (8, 9):
            left, right = (halfbyte.quantize(torch.randn(rows, k, device=device), "fp8") for rows in (m, n))
            a, w = (rows.view(torch.float8_e4m3fn)[:, :k] for rows in (left, right))
            scales = torch.rand(m, 1, device=device), torch.rand(1, n, device=device)
            pitched = torch._scaled_mm(a, w.t(), *scales, out_dtype=torch.bfloat16)
            dense = torch._scaled_mm(a.contiguous(), w.contiguous().t(), *scales, out_dtype=torch.bfloat16)
            assert torch.equal(pitched, dense), ("fp8", m, n, k)


@check
def linear_of_every_route(device: torch.device) -> None:
    largest = 4096 if device.type == "cuda" else 576
    for name in ("nf4", "fp4", "nf4-dq", "nf4:32", "nf4:256", "int8", "fp8"):
        format = Format.parse(name)
        for n, k in ((1, 64), (33, 576), (largest, 1024), (1024, largest), (100, 100)):
            packed = halfbyte.quantize(torch.randn(n, k), format).to(device)
            for m in (1, 5, 8, 9, 16, 17, 33, 64, 65, 128, 129, 257):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    x = torch.randn(m, k, device=device).to(dtype)
                    y = halfbyte.ops.linear(x, packed, None, format, k)
                    assert linear_bound(x, packed, format, y) <= 1, (name, n, k, m, dtype)
                    assert torch.equal(y, halfbyte.ops.linear(x, packed, None, format, k)), "not repeatable"


@contextmanager
def forced(route: str) -> Iterator[None]:
    """linear and its backward by the route of that name (csrc/cuda/linear_route.h) at any M; nothing on a CPU."""
    variables = "HALFBYTE_CUDA_LINEAR", "HALFBYTE_CUDA_LINEAR_BACKWARD"
    os.environ.update(dict.fromkeys(variables, route))
    try:
        yield
    finally:
        for variable in variables:
            del os.environ[variable]


def has_wgmma(device: torch.device) -> bool:
    """Whether the device is of compute capability 9.0 and this build has code for 9.0a."""
    if device.type != "cuda":
        return False
    packed = halfbyte.quantize(torch.randn(1, 64), "nf4").to(device)
    try:
        with forced("wgmma"):
            halfbyte.ops.linear(torch.ones(1, 64, device=device, dtype=torch.bfloat16), packed, None, "nf4", 64)
    except ValueError as error:
        assert "HALFBYTE_CUDA_LINEAR=wgmma" in str(error)  # noqa: PT017
        return False
    return True


def routes_of(device: torch.device) -> list[str]:
    """Routes for many rows of input. A CPU has one, whatever its name."""
    if device.type == "cpu":
        return ["dense"]
    if has_wgmma(device):
        return ["dense", "tiled", "wgmma"]
    print("    (wgmma not run: needs a device of compute capability 9.0 and a build for it)")
    return ["dense", "tiled"]


@check
def backward_of_each_forced_route(device: torch.device) -> None:
    """Every kernel at numbers of rows that its route does not send it, and as lora_linear's."""
    largest, tokens = (4096, (1, 16, 64, 65, 128, 129, 256, 257, 600)) if device.type == "cuda" else (136, (1, 65))
    for route, name, m in itertools.product(routes_of(device), ("nf4", "fp4-dq", "nf4:32", "nf4:256"), tokens):
        if route == "tiled" and m > 32:  # more than it can take
            continue
        for n, k in ((8, 16), (136, 304), (largest, 1024), (1000, largest)):
            packed = halfbyte.quantize(torch.randn(n, k) * 0.05, name).to(device)
            a, b = torch.zeros(4, k, device=device), torch.zeros(n, 4, device=device)
            for dtype in (torch.bfloat16, torch.float16):
                grad = torch.randn(m, n, device=device).to(dtype)
                x = torch.zeros(m, k, device=device, dtype=dtype, requires_grad=True)
                with forced(route):
                    dx = halfbyte.ops.linear_backward_input(grad, packed, name, k)
                y = halfbyte.ops.lora_linear(x, packed, None, a.to(dtype), b.to(dtype), 1.0, name, k)
                with forced(route):
                    (beside,) = torch.autograd.grad(y, x, grad)
                for result in (dx, beside):
                    assert backward_bound(grad, packed, k, result, name) <= 1, (route, name, n, k, m, dtype)


@check
def linear_of_each_forced_route(device: torch.device) -> None:
    """Every kernel at sizes that its route does not send it, and with an addend of each shape."""
    largest, tokens = 4096, (1, 16, 64, 65, 128, 129, 200, 256, 257, 384, 600)
    if device.type == "cpu":
        largest, tokens = 130, (1, 65)
    for route in routes_of(device):
        for name in ("nf4", "fp4-dq", "nf4:4096"):
            for n, k in ((1, 64), (130, 576), (largest, 1024), (1024, largest)):
                packed = halfbyte.quantize(torch.randn(n, k), name).to(device)
                for m in tokens:
                    for dtype in (torch.bfloat16, torch.float16):
                        x, bias = (torch.randn(*s, device=device).to(dtype) for s in ((m, k), (n,)))
                        with forced(route):
                            y = halfbyte.ops.linear(x, packed, None, name, k)
                            added = halfbyte.ops.linear(x, packed, bias, name, k)
                        assert linear_bound(x, packed, Format.parse(name), y) <= 1, (route, name, n, k, m, dtype)
                        torch.testing.assert_close(added, y + bias, rtol=2e-2, atol=2e-2)


@cuda_check
def a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    packed = halfbyte.quantize(torch.randn(4096, 4096), "nf4").to(device)
    x = torch.randn(256, 4096, device=device, dtype=torch.bfloat16)
    hopper = [(32, (17, 31)), (128, (33, 64, 65)), (256, (129, 192, 193))]
    for most, fewer in ((16, (1, 3, 8, 9)), *(hopper if has_wgmma(device) else [(128, (17, 32, 33, 64, 65, 97))])):
        whole = halfbyte.ops.linear(x[:most], packed, None, "nf4", 4096)
        for m in fewer:
            last = slice(most - m, most)  # not the tile's first rows alone
            assert torch.equal(halfbyte.ops.linear(x[:m], packed, None, "nf4", 4096), whole[:m]), (most, m)
            assert torch.equal(halfbyte.ops.linear(x[last], packed, None, "nf4", 4096), whole[last]), (most, m)
    hopper = (256, (17, 33, 65, 128, 129, 192, 193))
    for most, fewer in ((16, (1, 3, 8, 9)), hopper if has_wgmma(device) else (32, (17, 25))):
        whole = halfbyte.ops.linear_backward_input(x[:most], packed, "nf4", 4096)
        for m in fewer:
            dx = halfbyte.ops.linear_backward_input(x[:m], packed, "nf4", 4096)
            assert torch.equal(dx, whole[:m]), ("backward", most, m)


@cuda_check
def more_than_2_to_the_31_elements(device: torch.device) -> None:
    if torch.cuda.get_device_properties(device).total_memory < 24 << 30:
        print("    (not run: needs 24 GB)")
        return
    rows, k = (1 << 16) + 3, (1 << 15) + 8  # 2^31 + 6e5 elements
    x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
    packed = halfbyte.quantize(x, "nf4")
    dense = halfbyte.dequantize(packed, "nf4", k)
    beside = torch.randn(5, k, device=device, dtype=torch.bfloat16)
    several = halfbyte.ops.quantize_list([beside, x], "nf4")
    assert torch.equal(several[1], packed)
    assert torch.equal(several[0], halfbyte.quantize(beside, "nf4"))
    again = halfbyte.ops.dequantize_list(several, "nf4", [k, k])
    assert torch.equal(again[1], dense)
    assert torch.equal(again[0], halfbyte.dequantize(several[0], "nf4", k))
    del several, again
    for r in (0, rows // 2, rows - 2):
        assert_same("quantize", packed[r : r + 2], halfbyte.quantize(x[r : r + 2].cpu(), "nf4"))
        assert_same("dequantize", dense[r : r + 2], halfbyte.dequantize(packed[r : r + 2].cpu(), "nf4", k))


@cuda_check
def current_stream_is_used(device: torch.device) -> None:
    side = torch.cuda.Stream(device)
    x = torch.randn(4096, 4096, device=device)
    expected = halfbyte.quantize((x @ x).cpu(), "nf4")
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        product = x
        for _ in range(20):
            product = x @ x  # a kernel on another stream would not wait for these
        packed = halfbyte.quantize(product, "nf4")
    side.synchronize()
    assert_same("quantize", packed, expected)


def adamw(params: list[Tensor], grads: list[Tensor], step: Tensor, **kwargs: Any) -> Callable[[], None]:
    """A step of adamw8bit_step_ on fresh state."""

    def rows(p: Tensor) -> int:
        return 1 if p.dim() == 1 else p.shape[0]

    def scales(p: Tensor) -> Tensor:
        return torch.zeros(rows(p), -(-(p.numel() // rows(p)) // 256), device=p.device)

    state = [
        [torch.full_like(p, 127, dtype=torch.uint8) for p in params],
        [scales(p) for p in params],
        [torch.zeros_like(p, dtype=torch.uint8) for p in params],
        [scales(p) for p in params],
    ]
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, **kwargs}
    return lambda: torch.ops.halfbyte.adamw8bit_step_(params, grads, *state, [step], **hyper)


@check
def optimizer_equals_the_cpu(device: torch.device) -> None:
    shapes = [(64, 16), (16, 4096), (300, 576), (1000,)] * 100  # 400 tensors: two launches
    cpu = [torch.randn(s).to((torch.bfloat16, torch.float32, torch.float16)[i % 3]) for i, s in enumerate(shapes)]
    grads = [torch.randn_like(p) for p in cpu]
    ours, count, cpu_count = moved(cpu, device), torch.zeros((), device=device), torch.zeros(())
    a, b = adamw(ours, moved(grads, device), count), adamw(cpu, grads, cpu_count)
    for _ in range(3):
        count += 1
        cpu_count += 1
        a()
        b()
    for p, q in zip(ours, cpu, strict=True):
        assert_same("adamw8bit_step_", p, q)


@cuda_check
def graphs_capture_every_op(device: torch.device) -> None:
    k = 1024
    x = torch.randn(16, k, device=device, dtype=torch.bfloat16)
    weight, indices = torch.randn(512, k, device=device), torch.arange(7, device=device)
    params, count = [torch.randn(64, k, device=device, dtype=torch.bfloat16)], torch.ones((), device=device)
    lr, found_inf = torch.tensor(1e-3, device=device), torch.zeros((), device=device)
    step = adamw(params, [torch.randn_like(params[0])], count, lr_tensor=lr, found_inf=found_inf)
    eight = [halfbyte.quantize(weight, name) for name in ("int8", "fp8")]

    def work() -> list[Tensor]:
        packed = halfbyte.quantize(weight, "nf4-dq")
        y = halfbyte.ops.linear(x, packed, None, "nf4-dq", k)
        return [
            packed,
            y,
            halfbyte.ops.linear(x.repeat(4, 1), packed, None, "nf4-dq", k),
            halfbyte.ops.linear(x.repeat(12, 1), packed, None, "nf4-dq", k),
            halfbyte.ops.linear_backward_input(y, packed, "nf4-dq", k),
            halfbyte.ops.linear_backward_input(y.repeat(4, 1), packed, "nf4-dq", k),
            halfbyte.ops.embedding(indices, packed, "nf4-dq", k),
            halfbyte.dequantize(packed, "nf4-dq", k),
            *halfbyte.ops.dequantize_list(halfbyte.ops.quantize_list([weight, weight[:9]], "nf4"), "nf4", [k, k]),
            halfbyte.ops.int8_linear(x.repeat(4, 1), eight[0], None, k),
            halfbyte.ops.fp8_linear(x, eight[1], None, k),
        ]

    work()
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
        step()
    weight.normal_()
    x.normal_()
    expected, before = work(), params[0].clone()
    graph.replay()
    torch.cuda.synchronize(device)
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(params[0], before)
    found_inf.fill_(1)
    before = params[0].clone()
    graph.replay()
    assert torch.equal(params[0], before), "found_inf was read at capture"


@cuda_check
def the_tensors_device_is_used(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        print("    (not run: one GPU)")
        return
    with torch.cuda.device(0):
        x = torch.randn(64, 576, device="cuda:1")
        packed = halfbyte.quantize(x, "nf4")
        assert packed.device.index == 1
        assert_same("quantize", packed, halfbyte.quantize(x.cpu(), "nf4"))
        assert torch.cuda.current_device() == 0
