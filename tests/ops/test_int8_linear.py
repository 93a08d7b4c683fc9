"""int8_linear: every bit equals the integer oracle, on every instruction set; gradients, compilation, the layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte import reference_products as reference
from halfbyte.nn import QuantLinear
from halfbyte.ops import int8_linear, linear_backward_input

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(N: int, K: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return halfbyte.quantize(torch.randn(N, K, generator=generator) * torch.rand(N, 1, generator=generator), "int8")


def tokens(M: int, K: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(M, K, generator=generator) * torch.randn(M, 1, generator=generator).exp()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 3, 15, 63, 65, 100, 576, 1100])
def test_every_bit_equals_the_integer_oracle(K: int, dtype: torch.dtype) -> None:
    N = 37
    packed, x = rows(N, K), tokens(130, K, dtype)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected, biased = (reference.int8_linear(x, packed, b, K) for b in (None, bias))
    for M in (0, 1, 2, 3, 4, 5, 16, 17, 64, 65, 130):
        assert torch.equal(int8_linear(x[:M], packed, None, K), expected[:M])
        assert torch.equal(int8_linear(x[:M], packed, bias, K), biased[:M])


def test_more_than_one_block_of_everything() -> None:
    M, N, K = 520, 205, 2200  # tokens > 512, rows > 2 panels of 96, units > 2 panels of 256
    packed, x = rows(N, K), tokens(M, K, torch.bfloat16)
    assert torch.equal(int8_linear(x, packed, None, K), reference.int8_linear(x, packed, None, K))


def test_the_largest_sums() -> None:
    """All codes at +-127, at the largest K: the sums use 31 bits, and intermediate ones wrap."""
    K = 2**17
    x = torch.ones(6, K)
    x[1::2] = -1.0
    packed = halfbyte.quantize(torch.ones(3, K) * torch.tensor([[1.0], [-1.0], [1.0]]), "int8")
    for M in (1, 2, 6):
        assert torch.equal(int8_linear(x[:M], packed, None, K), reference.int8_linear(x[:M], packed, None, K))
    sums = 127 * 127 * K
    assert int(int8_linear(x[:1], packed, None, K)[0, 0] / (1 / 127) ** 2) == pytest.approx(sums, rel=1e-6)


def test_what_is_not_a_number_stays_in_its_row_and_token() -> None:
    K, N = 70, 9
    weight = torch.randn(N, K)
    weight[4, 69] = float("inf")
    packed = halfbyte.quantize(weight, "int8")
    for M in (2, 20):
        x = tokens(M, K, torch.float32)
        x[1, 3] = float("nan")
        x[0] = 0.0
        y = int8_linear(x, packed, None, K)
        assert y[1].isnan().all()
        assert y[:, 4].isnan().all()
        finite = [n for n in range(N) if n != 4]
        assert torch.equal(y[0, finite], torch.zeros(N - 1))
        assert y[2:, finite].isfinite().all()


def test_gradient_is_that_of_the_dequantized_rows() -> None:
    packed = rows(16, 40)
    x, bias = tokens(5, 40, torch.float32).requires_grad_(), torch.randn(16, requires_grad=True)
    grad = torch.randn(5, 16)
    int8_linear(x, packed, bias, 40).backward(grad)
    assert torch.equal(x.grad, linear_backward_input(grad, packed, "int8", 40))
    torch.testing.assert_close(bias.grad, grad.sum(0))


def test_layer() -> None:
    torch.manual_seed(0)
    dense = torch.nn.Linear(96, 40)
    layer = QuantLinear.from_linear(dense, "int8", activations="int8")
    x = torch.randn(4, 7, 96, requires_grad=True)
    assert torch.equal(layer(x), int8_linear(x, layer.weight, layer.bias, 96))
    assert float((layer(x) - dense(x)).norm() / dense(x).norm()) < 0.02
    assert "activations=int8" in repr(layer)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), int8_linear(x.bfloat16(), layer.weight, layer.bias.bfloat16(), 96))
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.bias.grad is not None
    twin = QuantLinear(96, 40, format="int8", activations="int8")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    assert layer.state_dict()._metadata[""]["activations"] == "int8"


def test_activations_are_refused_where_they_do_not_exist() -> None:
    with pytest.raises(NotImplementedError, match=r"activations='int8' needs format='int8', got format='nf4'"):
        QuantLinear(64, 64, format="nf4", activations="int8")
    with pytest.raises(ValueError, match=r"activations must be None, 'int8' or 'fp8', got 'int4'"):
        QuantLinear(64, 64, format="int8", activations="int4")
    with pytest.raises(ValueError, match=r"in_features must be at most 131072"):
        int8_linear(torch.zeros(1, 2**17 + 1), torch.zeros(1, 2**17 + 16, dtype=torch.uint8), None, 2**17 + 1)


@pytest.mark.parametrize("build", ["quantize_model", "init_quantized"])
def test_models(build: str) -> None:
    if build == "quantize_model":
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
        halfbyte.quantize_model(model, "int8", activations="int8")
    else:
        with halfbyte.init_quantized("int8", activations="int8"):
            model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    assert [layer.activations for layer in model] == ["int8", "int8"]
    x = torch.randn(3, 64)
    y = int8_linear(int8_linear(x, model[0].weight, model[0].bias, 64), model[1].weight, model[1].bias, 32)
    assert torch.equal(model(x), y)


def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    layer = QuantLinear(64, 32, format="int8", activations="int8")
    x = torch.randn(5, 64, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, layer(x))
    y.sum().backward()
    assert x.grad is not None


def test_results_do_not_depend_on_threads() -> None:
    packed, x, before = rows(301, 260), tokens(90, 260, torch.bfloat16), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((int8_linear(x, packed, None, 260), int8_linear(x[:2], packed, None, 260)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_other_instruction_sets(isa: str) -> None:
    """The bits above on an ISA that the CPU has but would not choose."""
    if "HALFBYTE_CPU_ISA" in os.environ or ("scalar", "avx2").index(isa) >= torch.ops.halfbyte.cpu_isa():
        pytest.skip("one ISA was asked for, or it is the one in use, or this CPU does not have it")
    selected = "bit or block or sums or number"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--import-mode=importlib", "-k", selected, __file__]
    env = {**os.environ, "HALFBYTE_CPU_ISA": isa}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
