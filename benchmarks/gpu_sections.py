"""What gpu_check.py measures of single ops: every row of the targets, ours beside dequantizing + cuBLAS, torch and peers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import gpu_checks
import torch
import torch.nn.functional as F
from gpu_bench import BF16, Bench
from torch import Tensor

import halfbyte


def borrowed(b: Bench, who: str, build: Callable[[], Any]) -> Any:
    """What another library gives, on a GPU; None, and named among those left out, where it is missing or has changed."""
    if not b.cuda:
        return None
    try:
        return build()
    except Exception as error:  # whatever it is, it is theirs: our rows go on without them
        b.left_out.append(f"{who}: {type(error).__name__}: {error}".splitlines()[0])
        return None


def bitsandbytes(b: Bench) -> Any:
    """bitsandbytes.functional or None."""
    return borrowed(b, "bitsandbytes", lambda: importlib.import_module("bitsandbytes.functional"))


def bnb_rows(bnb: Any, weight: Tensor) -> Any:
    return bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")


def rotated_bnb(b: Bench, bnb: Any, n: int, k: int) -> Any:
    """bitsandbytes' packed weights by round, or None."""
    return bnb and borrowed(b, "bitsandbytes", lambda: b.rotate(lambda: bnb_rows(bnb, b.randn(n, k)), n * k // 2))


def rotated_torchao(b: Bench, n: int, k: int) -> Any:
    """torchao's NF4 weights by round."""
    to_nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor").to_nf4
    return b.rotate(lambda: to_nf4(b.randn(n, k), 64, 256), n * k // 2)


def codec(b: Bench) -> None:
    """dequantize and quantize."""
    bnb = bitsandbytes(b)
    for name in ("nf4", "nf4-dq", "int8", "fp8"):
        n, k = b.size(14336), b.size(4096)
        fmt = halfbyte.Format.parse(name)
        weights = b.rotate(lambda: halfbyte.quantize(b.randn(n, k), name), n * fmt.row_bytes(k))  # noqa: B023
        peers: dict[str, Callable[[int], object]] = {"halfbyte": lambda i: halfbyte.dequantize(weights(i), name, k)}  # noqa: B023
        theirs = name == "nf4" and rotated_bnb(b, bnb, n, k)
        if theirs:
            peers["bitsandbytes"] = lambda i: bnb.dequantize_4bit(*theirs(i))  # noqa: B023
        ao = name == "nf4" and borrowed(b, "torchao", lambda: rotated_torchao(b, n, k))  # noqa: B023
        if ao:
            peers["torchao"] = lambda i: ao(i).get_original_weight()  # noqa: B023
        b.compare(f"dequantize {name} {n}x{k}", peers, n * (fmt.row_bytes(k) + 2 * k))
    n, k = b.size(1 << 16), b.size(1 << 14)
    dense = b.randn(n, k)
    peers = {"halfbyte": lambda _: halfbyte.quantize(dense, "nf4")}
    if bnb:
        peers["bitsandbytes"] = lambda _: bnb_rows(bnb, dense)
    b.compare(f"quantize bf16 -> nf4 {n * k / 1e9:.2f}e9", peers, n * k * 2.5625, graphs=False)
    codec_lists(b, [b.size(each) for each in (576, 192, 1536)])  # SmolLM2-135M
    codec_lists(b, [b.size(each) for each in (4096, 1024, 14336)])  # Llama-3 8B


def codec_lists(b: Bench, widths: list[int]) -> None:
    """The weights of a decoder block of widths d, k and v's, and the MLP's: one launch for all of them, or one each."""
    d, kv, mlp = widths
    shapes = [(d, d), (kv, d), (kv, d), (d, d), (mlp, d), (mlp, d), (d, mlp)]
    columns, elements = [k for _, k in shapes], sum(n * k for n, k in shapes)
    dense = b.rotate(lambda: [b.randn(n, k) for n, k in shapes], 2 * elements)
    packed = b.rotate(lambda: halfbyte.ops.quantize_list([b.randn(n, k) for n, k in shapes], "nf4"), elements // 2)
    peers: dict[str, Callable[[int], object]] = {
        "halfbyte, a list": lambda i: halfbyte.ops.dequantize_list(packed(i), "nf4", columns),
        "one by one": lambda i: [halfbyte.dequantize(rows, "nf4", k) for rows, k in zip(packed(i), columns, strict=True)],
    }
    b.compare(f"dequantize 7 weights of a block, d={d}", peers, elements * 2.5625)
    peers = {
        "halfbyte, a list": lambda i: halfbyte.ops.quantize_list(dense(i), "nf4"),
        "one by one": lambda i: [halfbyte.quantize(weight, "nf4") for weight in dense(i)],
    }
    b.compare(f"quantize 7 weights of a block, d={d}", peers, elements * 2.5625)


def linears(b: Bench) -> None:
    """linear, from one token to a batch that cuBLAS fills."""
    bnb = bitsandbytes(b)
    problems = [
        (1, 8192, 8192),
        (16, 8192, 8192),
        (1, 4096, 4096),
        (1, 14336, 4096),
        (32, 14336, 4096),
        (64, 14336, 4096),
        (64, 1024, 4096),
        (64, 4096, 14336),
        (128, 14336, 4096),
        (128, 8192, 8192),
        (256, 14336, 4096),
        (512, 14336, 4096),
        (4096, 14336, 4096),
    ]
    for batch, rows, columns in problems:
        m, n, k = b.size(batch, 64), b.size(rows), b.size(columns)
        x, nbytes = b.randn(m, k), halfbyte.Format.parse("nf4").row_bytes(k) * n
        packed = b.rotate(lambda: halfbyte.quantize(b.randn(n, k), "nf4"), nbytes)  # noqa: B023
        dense = b.rotate(lambda: b.randn(n, k), n * k * 2)  # noqa: B023
        peers: dict[str, Callable[[int], object]] = {
            "halfbyte": lambda i: halfbyte.ops.linear(x, packed(i), None, "nf4", k),  # noqa: B023
            "dequant + cuBLAS": lambda i: F.linear(x, halfbyte.dequantize(packed(i), "nf4", k)),  # noqa: B023
            "bf16 cuBLAS": lambda i: F.linear(x, dense(i)),  # noqa: B023
        }
        theirs = rotated_bnb(b, bnb, n, k)
        if theirs:
            if m == 1:
                peers["bitsandbytes"] = lambda i: bnb.gemv_4bit(x.view(1, 1, -1), theirs(i)[0].t(), state=theirs(i)[1])  # noqa: B023
            else:
                peers["bitsandbytes"] = lambda i: F.linear(x, bnb.dequantize_4bit(*theirs(i)))  # noqa: B023
        error = gpu_checks.linear_bound(
            x, packed(0), halfbyte.Format.parse("nf4"), halfbyte.ops.linear(x, packed(0), None, "nf4", k)
        )
        assert error <= 1, f"linear M={m} is wrong by {error} bounds"
        b.compare(f"linear nf4 M={m} {n}x{k}", peers, nbytes + 2 * m * (n + k), 2.0 * m * n * k)


def by_route(route: str, product: Callable[[int], object]) -> Callable[[int], object]:
    """The product by the route of that name."""

    def run(i: int) -> object:
        with gpu_checks.forced(route):
            return product(i)

    return run


def linear_routes(b: Bench) -> None:
    """linear by each route, whatever M is: where their times cross, the limits of csrc/cuda/linear_route.h belong."""
    routes = gpu_checks.routes_of(b.device)
    for rows, columns in ((14336, 4096), (4096, 4096), (4096, 14336)):
        n, k = b.size(rows), b.size(columns)
        nbytes = halfbyte.Format.parse("nf4").row_bytes(k) * n
        packed = b.rotate(lambda: halfbyte.quantize(b.randn(n, k), "nf4"), nbytes)  # noqa: B023
        for batch in (32, 64, 128, 192, 256, 384, 512, 1024):
            m = b.size(batch, 64)
            x = b.randn(m, k)
            product = lambda i: halfbyte.ops.linear(x, packed(i), None, "nf4", k)  # noqa: B023, E731
            peers = {f"halfbyte, {route}": by_route(route, product) for route in routes}
            b.compare(f"linear by route, M={m} {n}x{k}", peers, nbytes + 2 * m * (n + k), 2.0 * m * n * k)


def backwards(b: Bench) -> None:
    """linear_backward_input of few tokens, and of many; from 32 to 512 also by each route that takes them."""
    routes = gpu_checks.routes_of(b.device)
    problems = [(m, 8192, 8192) for m in (1, 16)]
    problems += [(m, 14336, 4096) for m in (1, 16, 32, 64, 128, 192, 256, 384, 512, 4096)]
    problems += [(m, 4096, 14336) for m in (64, 128, 256)]
    for batch, rows, columns in problems:
        m, n, k = b.size(batch, 64), b.size(rows), b.size(columns)
        g, nbytes = b.randn(m, n), halfbyte.Format.parse("nf4").row_bytes(k) * n
        packed = b.rotate(lambda: halfbyte.quantize(b.randn(n, k), "nf4"), nbytes)  # noqa: B023
        product = lambda i: halfbyte.ops.linear_backward_input(g, packed(i), "nf4", k)  # noqa: B023, E731
        error = gpu_checks.backward_bound(g, packed(0), k, product(0))
        assert error <= 1, f"linear_backward_input M={m} is wrong by {error} bounds"
        peers: dict[str, Callable[[int], object]] = {
            "halfbyte": product,
            "dequant + cuBLAS": lambda i: g @ halfbyte.dequantize(packed(i), "nf4", k),  # noqa: B023
        }
        if 32 <= batch <= 512:
            takes = [route for route in routes if route != "tiled" or batch <= 32]
            peers |= {f"halfbyte, {route}": by_route(route, product) for route in takes}
        b.compare(f"backward nf4 M={m} {n}x{k}", peers, nbytes + 2 * m * (n + k), 2.0 * m * n * k)


def qlora_linear(b: Bench) -> None:
    """Forward and backward of a frozen linear with rank 16 adapters."""
    m, n, k = b.size(4096), b.size(4096), b.size(4096)
    x = b.randn(m, k).requires_grad_()
    packed, dense = halfbyte.quantize(b.randn(n, k), "nf4"), b.randn(n, k)
    a, c = b.randn(16, k).requires_grad_(), b.randn(n, 16).requires_grad_()
    g = b.randn(m, n)

    def step(y: Tensor) -> None:
        torch.autograd.grad(y, (x, a, c), g)

    b.compare(
        f"QLoRA linear fwd+bwd r=16 M={m}",
        {
            "halfbyte": lambda _: step(halfbyte.ops.lora_linear(x, packed, None, a, c, 1.0, "nf4", k)),
            "halfbyte, branch beside it": lambda _: step(
                halfbyte.ops.linear(x, packed, None, "nf4", k) + F.linear(F.linear(x, a), c)
            ),
            "bf16 LoRA": lambda _: step(F.linear(x, dense) + F.linear(F.linear(x, a), c)),
        },
        flops=4.0 * m * n * k,
    )


def int8_linears(b: Bench) -> None:
    """int8 rows times activations quantized per token, beside the same rows decoded."""
    for batch in (16, 512, 4096):
        m, n, k = b.size(batch, 64), b.size(4096), b.size(4096)
        x, dense = b.randn(m, k), b.randn(n, k)
        packed = halfbyte.quantize(dense, "int8")
        b.compare(
            f"int8_linear M={m} {n}x{k}",
            {
                "halfbyte": lambda _: halfbyte.ops.int8_linear(x, packed, None, k),  # noqa: B023
                "halfbyte, decoded": lambda _: halfbyte.ops.linear(x, packed, None, "int8", k),  # noqa: B023
                "bf16 cuBLAS": lambda _: F.linear(x, dense),  # noqa: B023
            },
            n * k + 2 * m * (n + k),
            m * n * k,  # int8 at twice the bf16 rate
        )


def fp8_linears(b: Bench) -> None:
    """fp8 rows times activations quantized per token, beside the product alone (operands prepared) and the rows decoded."""
    for batch in (1, 16, 512, 4096):
        m, n, k = b.size(batch, 64), b.size(4096), b.size(4096)
        x, dense = b.randn(m, k), b.randn(n, k)
        packed = halfbyte.quantize(dense, "fp8")
        peers: dict[str, Callable[[int], object]] = {
            "halfbyte": lambda _: halfbyte.ops.fp8_linear(x, packed, None, k),  # noqa: B023
            "halfbyte, decoded": lambda _: halfbyte.ops.linear(x, packed, None, "fp8", k),  # noqa: B023
            "bf16 cuBLAS": lambda _: F.linear(x, dense),  # noqa: B023
        }
        if b.cuda:
            codes = halfbyte.quantize(x, "fp8")[:, :k].contiguous().view(torch.float8_e4m3fn)
            weight = packed.view(torch.float8_e4m3fn)[:, :k].t()
            scales = torch.ones(m, 1, device=b.device), torch.ones(1, n, device=b.device)
            peers["_scaled_mm alone"] = lambda _: torch._scaled_mm(codes, weight, *scales, out_dtype=BF16)  # noqa: B023
        b.compare(f"fp8_linear M={m} {n}x{k}", peers, n * k + 2 * m * (n + k), m * n * k)  # fp8 at twice the bf16 rate


def optimizers(b: Bench) -> None:
    """AdamW with 8-bit moments on one large list and on many small adapters."""

    def setup(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[int], object]]:
        params = [b.randn(*s) for s in shapes]
        grads = [torch.randn_like(p) for p in params]
        ours = gpu_checks.adamw(params, grads, torch.ones((), device=b.device))
        peers: dict[str, Callable[[int], object]] = {"halfbyte": lambda _: ours()}
        dense = [p.clone().requires_grad_() for p in params]
        for p, g in zip(dense, grads, strict=True):
            p.grad = g
        fused = torch.optim.AdamW(dense, fused=True, capturable=b.cuda)
        peers["torch fused"] = lambda _: fused.step()
        for who, module in (("bitsandbytes", "bitsandbytes.optim"), ("torchao", "torchao.optim")):
            other = borrowed(b, who, lambda: importlib.import_module(module).AdamW8bit(dense))  # noqa: B023
            if other:
                peers[who] = lambda _, other=other: other.step()  # type: ignore[misc]
        return peers

    n = b.size(1 << 15)
    count = 2
    if b.cuda and torch.cuda.get_device_properties(b.device).total_memory > 100e9:
        count = 4  # 4.3e9 parameters: with all peers' states about 90 GB
    b.compare(f"AdamW8 {count * n * n / 1e9:.2f}e9 bf16", setup([(n, n)] * count), count * n * n * 10.06, graphs=False)
    r, k = 16, b.size(4096)
    lora = [(r, k), (k, r)] * (224 if b.cuda else 4)
    peers, nbytes = setup(lora), sum(x * y for x, y in lora) * 10.3
    b.compare(f"AdamW8 {len(lora)} LoRA tensors", peers, nbytes, graphs=False)
    captured = {who: peers[who] for who in ("halfbyte", "torch fused")}  # the others ask the device in a step
    b.compare(f"AdamW8 {len(lora)} LoRA tensors, captured", captured, nbytes)


def host_cost(b: Bench) -> dict[str, float]:
    """Microseconds of host time a call, tiny tensors, nothing waited for."""
    x, packed = b.randn(1, 64), halfbyte.quantize(b.randn(16, 64), "nf4")
    dense = b.randn(16, 64)
    costs = {}
    for name, run in {
        "linear": lambda: halfbyte.ops.linear(x, packed, None, "nf4", 64),
        "dequantize": lambda: halfbyte.dequantize(packed, "nf4", 64),
        "F.linear": lambda: F.linear(x, dense),
    }.items():
        for _ in range(50):
            run()
        b.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            run()
        costs[name] = (time.perf_counter() - start) / 500 * 1e6
        b.synchronize()
    print("host cost: " + ", ".join(f"{name} {us:.1f} us" for name, us in costs.items()))
    return costs
