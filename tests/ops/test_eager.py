"""The overload `eager` of ops: the op's results, no autograd; dispatch modes are shown the op itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte
from halfbyte.testing import SPECS, keywords_of, registered_ops

TWICE = [name for name in registered_ops() if "eager" in getattr(torch.ops.halfbyte, name).overloads()]
SAMPLES = [(name, i) for name in TWICE for i, _ in enumerate(SPECS[name].samples("cpu"))]


def sample(name: str, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = next(itertools.islice(SPECS[name].samples("cpu"), index, None))
    return tuple(args), keywords_of(args)


def tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def test_the_ops_that_a_training_step_calls_have_it() -> None:
    products = {"linear", "lora_linear", "int8_linear", "fp8_linear"}
    assert set(TWICE) >= products | {"linear_backward_input", "lora_linear_backward_input", "lora_linear_backward_adapter"}


@pytest.mark.parametrize("name", TWICE)
def test_its_schema_is_the_ops(name: str) -> None:
    packet = getattr(torch.ops.halfbyte, name)
    assert str(packet.eager._schema) == str(packet.default._schema).replace(f"::{name}(", f"::{name}.eager(")


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_its_results_are_the_ops_and_record_nothing(name: str, index: int) -> None:
    args, keywords = sample(name, index)
    packet = getattr(torch.ops.halfbyte, name)
    leaves = [a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    for got, expected in zip(tensors(packet.eager(*leaves, **keywords)), tensors(packet(*args, **keywords)), strict=True):
        assert torch.equal(got, expected)
        assert not got.requires_grad


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def layer_and_input() -> tuple[halfbyte.nn.QuantLinear, Tensor]:
    torch.manual_seed(0)
    return halfbyte.nn.QuantLinear(64, 8, format="nf4"), torch.randn(3, 64)


def test_dispatch_modes_see_the_op_itself() -> None:
    layer, x = layer_and_input()
    layer.bias.requires_grad_(False)
    expected = layer(x)
    with Seen() as seen, torch.no_grad():
        y = layer(x)
    assert torch.equal(y, expected)
    assert seen.ops == ["halfbyte.linear.default"]
    with Seen() as seen:
        layer(x.requires_grad_()).sum().backward()
    ours = [op for op in seen.ops if op.startswith("halfbyte")]
    assert ours == ["halfbyte.linear.default", "halfbyte.linear_backward_input.default"]


def test_fake_tensors_and_traces() -> None:
    layer, x = layer_and_input()
    layer.bias.requires_grad_(False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (3, 8)
    assert "torch.ops.halfbyte.linear.default" in make_fx(layer)(x).code
    assert layer.to("meta")(x.to("meta")).shape == (3, 8)


def test_autocast_casts_it_too() -> None:
    layer, x = layer_and_input()
    expected = halfbyte.ops.linear(x.bfloat16(), layer.weight, None, "nf4", 64)
    with torch.autocast("cpu"):
        assert torch.equal(torch.ops.halfbyte.linear.eager(x, layer.weight, None, layer.format.id, 64, 64), expected)
        assert torch.equal(halfbyte.ops.linear(x, layer.weight, None, "nf4", 64), expected)


def test_profilers_call_it_by_the_ops_name() -> None:
    layer, x = layer_and_input()
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    assert "halfbyte::linear" in [event.key for event in profile.key_averages()]
