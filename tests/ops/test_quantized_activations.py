"""What int8_linear and fp8_linear have in common: gradients, compilation, threads, the layer, models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte.nn import QuantLinear
from halfbyte.ops import fp8_linear, int8_linear, linear, linear_backward_input

OPS: dict[str, Callable[[Tensor, Tensor, Tensor | None, int], Tensor]] = {"int8": int8_linear, "fp8": fp8_linear}
both = pytest.mark.parametrize("format", OPS)


def rows(N: int, K: int, format: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return halfbyte.quantize(torch.randn(N, K, generator=generator) * torch.rand(N, 1, generator=generator), format)


def tokens(M: int, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(M, K, generator=generator) * torch.randn(M, 1, generator=generator).exp()).to(dtype)


@both
def test_gradient_is_that_of_the_dequantized_rows(format: str) -> None:
    packed = rows(16, 40, format)
    x, bias = tokens(5, 40).requires_grad_(), torch.randn(16, requires_grad=True)
    grad = torch.randn(5, 16)
    OPS[format](x, packed, bias, 40).backward(grad)
    assert torch.equal(x.grad, linear_backward_input(grad, packed, format, 40))
    torch.testing.assert_close(bias.grad, grad.sum(0))


@pytest.mark.parametrize(("format", "error"), [("int8", 0.02), ("fp8", 0.06)])
def test_layer(format: str, error: float) -> None:
    torch.manual_seed(0)
    dense, op = torch.nn.Linear(96, 40), OPS[format]
    layer = QuantLinear.from_linear(dense, format, activations=format)
    assert f"activations={format}" in repr(layer)
    x = torch.randn(4, 7, 96, requires_grad=True)
    assert torch.equal(layer(x), op(x, layer.weight, layer.bias, 96))
    assert not torch.equal(layer(x), linear(x, layer.weight, layer.bias, format, 96))
    assert float(((layer(x) - dense(x)).norm() / dense(x).norm()).detach()) < error
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), op(x.bfloat16(), layer.weight, layer.bias.bfloat16(), 96))
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.bias.grad is not None
    twin = QuantLinear(96, 40, format=format, activations=format)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    assert layer.state_dict()._metadata[""]["activations"] == format


@both
@pytest.mark.parametrize("build", ["quantize_model", "init_quantized"])
def test_models(build: str, format: str) -> None:
    if build == "quantize_model":
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
        halfbyte.quantize_model(model, format, activations=format)
    else:
        with halfbyte.init_quantized(format, activations=format):
            model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    assert [layer.activations for layer in model] == [format, format]
    x, (first, second), op = torch.randn(3, 64), model, OPS[format]
    assert torch.equal(model(x), op(op(x, first.weight, first.bias, 64), second.weight, second.bias, 32))


def test_activations_are_refused_where_they_do_not_exist() -> None:
    for format in OPS:
        with pytest.raises(NotImplementedError, match=f"activations='{format}' needs format='{format}', got format='nf4'"):
            QuantLinear(64, 64, format="nf4", activations=format)
    with pytest.raises(ValueError, match=r"activations must be None, 'int8' or 'fp8', got 'int4'"):
        QuantLinear(64, 64, format="int8", activations="int4")
    with pytest.raises(ValueError, match=r"in_features must be at most 131072"):
        int8_linear(torch.zeros(1, 2**17 + 1), torch.zeros(1, 2**17 + 16, dtype=torch.uint8), None, 2**17 + 1)


@both
def test_compiles_without_a_graph_break(format: str) -> None:
    torch._dynamo.reset()
    layer = QuantLinear(64, 32, format=format, activations=format)
    x = torch.randn(5, 64, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, layer(x))
    y.sum().backward()
    assert x.grad is not None


@both
def test_results_do_not_depend_on_threads(format: str) -> None:
    packed, x, before = rows(301, 260, format), tokens(90, 260, torch.bfloat16), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(torch.cat([OPS[format](x, packed, None, 260), OPS[format](x[:2], packed, None, 260)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
