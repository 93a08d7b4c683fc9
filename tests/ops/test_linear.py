"""linear: gradients, compile, autocast, checkpoint, what is saved, and the traps of the stable ABI."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import halfbyte
from halfbyte import ops
from halfbyte.formats import FORMATS, Format
from halfbyte.testing import random_packed


def dense_of(packed: torch.Tensor, format: Format, columns: int) -> torch.Tensor:
    return halfbyte.dequantize(packed, format, columns, torch.float32)


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> Format:
    return Format.parse(request.param)


def test_value_and_gradients_match_the_dense_layer(format: Format) -> None:
    packed = random_packed(format, 33, 100)
    weight = dense_of(packed, format, 100)
    x = torch.randn(7, 100, requires_grad=True)
    bias = torch.randn(33, requires_grad=True)
    x2, bias2 = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    out = torch.randn(7, 33)
    y = ops.linear(x, packed, bias, format, 100)
    expected = torch.nn.functional.linear(x2, weight, bias2)
    y.backward(out)
    expected.backward(out)
    # fp32 sums of 100 products of numbers below 5 * 5, in another order
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias.grad, bias2.grad, rtol=1e-6, atol=1e-6)


def test_raw_op_with_an_input_that_requires_grad_has_the_right_gradient(format: Format) -> None:
    """A kernel that records autograd inside would return another layer's weight (the buffer is reused)."""
    first, second = random_packed(format, 16, 64, seed=1), random_packed(format, 16, 64, seed=2)
    x = torch.randn(4, 64, requires_grad=True)
    y = torch.ops.halfbyte.linear(x, first, None, format.id, format.block_size, 64)
    torch.ops.halfbyte.linear(torch.randn(4, 64), second, None, format.id, format.block_size, 64)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad[0], dense_of(first, format, 64).sum(0), rtol=1e-5, atol=1e-4)


def test_double_backward() -> None:
    format = Format.parse("nf4")
    packed = random_packed(format, 8, 64)
    weight = dense_of(packed, format, 64)

    def gradient_penalty(linear):
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).requires_grad_()
        (grad,) = torch.autograd.grad(linear(x).pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.pow(2).sum(), x)
        return second

    ours = gradient_penalty(lambda x: ops.linear(x, packed, None, format, 64))
    dense = gradient_penalty(lambda x: x @ weight.t())
    torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-2)


def test_only_packed_rows_are_saved_and_no_dense_weight_survives() -> None:
    def dense_sized() -> list[torch.Tensor]:
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]  # not what a dead proxy stands for
        return [t for t in tensors if t.is_floating_point() and t.numel() >= 256 * 512]

    format = Format.parse("nf4")
    packed = random_packed(format, 256, 512)
    before = {id(t) for t in dense_sized()}  # of other tests
    saved: list[torch.Tensor] = []
    x = torch.randn(2, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = ops.linear(x, packed, torch.randn(256, requires_grad=True), format, 512)
    assert [t.data_ptr() for t in saved] == [packed.data_ptr()]
    y.sum().backward()
    gc.collect()
    alive = [t for t in dense_sized() if id(t) not in before]
    assert alive == []


@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_fullgraph_forward_and_backward(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        halfbyte.nn.QuantLinear(64, 96), torch.nn.GELU(), halfbyte.nn.QuantLinear(96, 32, bias=False, format="int8")
    )
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (4, 7, 1, 33):
        x = torch.randn(batch, 64)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ya, yb = compiled(a), model(b)
        torch.testing.assert_close(ya, yb)
        ya.pow(2).sum().backward()
        bias_grad = model[0].bias.grad.clone()
        model.zero_grad()
        yb.pow(2).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(bias_grad, model[0].bias.grad)
        model.zero_grad()


def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    layer = halfbyte.nn.QuantLinear(64, 32)
    x = torch.randn(5, 64, requires_grad=True)
    y = torch.compile(layer, fullgraph=True)(x)
    y.sum().backward()
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(x.grad, layer.dequantize(torch.float32).sum(0).expand(5, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    model = torch.nn.Sequential(halfbyte.nn.QuantLinear(64, 64), torch.nn.ReLU(), halfbyte.nn.QuantLinear(64, 64))
    x = torch.randn(4, 64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    checkpoint(model, a, use_reentrant=reentrant).sum().backward()
    model(b).sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_autocast_of_the_raw_op_agrees_with_its_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    packed = random_packed(Format.parse("nf4"), 8, 64)
    x, bias = torch.randn(3, 64), torch.randn(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.ops.halfbyte.linear(x, packed, bias, 0, 64, 64)
        with FakeTensorMode() as mode:
            fake = torch.ops.halfbyte.linear(*map(mode.from_tensor, (x, packed, bias)), 0, 64, 64)
    assert y.dtype == fake.dtype == torch.bfloat16
    expected = torch.ops.halfbyte.linear(x.bfloat16(), packed, bias.bfloat16(), 0, 64, 64)
    assert torch.equal(y, expected)


def test_gradients_flow_through_autocast() -> None:
    packed = random_packed(Format.parse("nf4"), 8, 64)
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.ops.halfbyte.linear(x, packed, None, 0, 64, 64)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    expected = torch.ops.halfbyte.linear_backward_input(torch.ones(3, 8, dtype=torch.bfloat16), packed, 0, 64, 64)
    assert torch.equal(x.grad, expected.float())


def test_threads_do_not_share_buffers() -> None:
    errors: list[float] = []

    def run(seed: int) -> None:
        format = Format.parse("nf4")
        packed = random_packed(format, 64, 128, seed=seed)
        weight = dense_of(packed, format, 128)
        for _ in range(30):
            x = torch.randn(3, 128)
            errors.append(float((ops.linear(x, packed, None, format, 128) - x @ weight.t()).abs().max()))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 120
    assert max(errors) < 1e-3


def test_wrappers_raise_type_errors_that_name_the_argument() -> None:
    packed = random_packed(Format.parse("nf4"), 8, 64)
    with pytest.raises(TypeError, match=r"halfbyte\.linear: input must be a float32.*got int64"):
        ops.linear(torch.ones(1, 64, dtype=torch.int64), packed, None, "nf4", 64)
    with pytest.raises(TypeError, match=r"halfbyte\.quantize: tensor must be a float32.*got list"):
        halfbyte.quantize([1.0])
    with pytest.raises(TypeError, match=r"halfbyte\.dequantize: packed must be a uint8 tensor, got float32"):
        halfbyte.dequantize(torch.ones(2, 48), "nf4", 64)
    with pytest.raises(TypeError, match=r"halfbyte\.embedding: indices must be an int64"):
        ops.embedding(torch.ones(2), packed, "nf4", 64)


def test_an_integer_input_leaks_nothing() -> None:
    """`str` arguments leak in the stable ABI: formats cross as ints, and 20 000 calls must not grow the process."""
    import resource

    packed = random_packed(Format.parse("nf4"), 1, 64)
    x = torch.randn(1, 64)

    def run(calls: int) -> int:
        for _ in range(calls):
            torch.ops.halfbyte.linear(x, packed, None, 0, 64, 64)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = run(2000)
    assert run(20000) - before < 4096  # KiB; a leaked string argument took 78 MB


@pytest.mark.parametrize(("N", "K"), [(608, 576), (1536, 96), (64, 1024)])
def test_bits_do_not_depend_on_where_tokens_lie(N: int, K: int) -> None:
    """Kernels read bf16 tokens where they lie or pack them first, by their address, their number and their length."""
    format = Format.parse("nf4")
    packed = random_packed(format, N, K)
    x, grad = torch.randn(513, K).bfloat16(), torch.randn(513, N).bfloat16()

    def elsewhere(t: torch.Tensor) -> torch.Tensor:
        moved = t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t)
        assert moved.data_ptr() % 4 != 0
        return moved

    for run, tokens in (
        (lambda t: ops.linear(t, packed, None, format, K), x),
        (lambda t: ops.linear_backward_input(t, packed, format, K), grad),
    ):
        whole = run(tokens[:512].clone())
        assert torch.equal(whole, run(elsewhere(tokens[:512])))
        assert torch.equal(whole, run(tokens)[:512])
