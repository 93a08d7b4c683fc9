"""What every optimizer of the family must do as torch.optim does it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.optim import Adam8bit, AdamW8bit, Lion8bit, Optimizer8bit, SGD8bit

FAMILY: dict[str, Callable[..., Optimizer8bit]] = {
    "adamw": lambda params, **kw: AdamW8bit(params, **{"lr": 1e-2, **kw}),
    "adam": lambda params, **kw: Adam8bit(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "lion": lambda params, **kw: Lion8bit(params, **{"lr": 1e-3, "weight_decay": 0.1, **kw}),
    "sgd": lambda params, **kw: SGD8bit(params, **{"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, **kw}),
    "nesterov": lambda params, **kw: SGD8bit(params, **{"lr": 1e-2, "momentum": 0.9, "nesterov": True, **kw}),
    "plain-sgd": lambda params, **kw: SGD8bit(params, **{"lr": 1e-2, **kw}),
}
EACH = pytest.mark.parametrize("name", FAMILY)


def params(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """A matrix with 8-bit state and a vector with float32 state per dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 128), (50,))
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for dtype in dtypes or (torch.float32,)
        for shape in shapes
    ]


def set_grads(ps: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in ps:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def run(optimizer: Optimizer8bit, ps: list[nn.Parameter], steps: int = 3, scale: float = 1.0) -> None:
    for i in range(steps):
        set_grads(ps, i, scale)
        optimizer.step()


def values(ps: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in ps]


@EACH
def test_maximize_is_the_step_on_the_negated_gradient(name: str) -> None:
    a, b = params(), params()
    run(FAMILY[name](a, maximize=True), a)
    run(FAMILY[name](b), b, scale=-1.0)
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)


@EACH
def test_mixed_dtypes_in_one_group(name: str) -> None:
    mixed = params(torch.float32, torch.bfloat16, torch.float16)
    run(FAMILY[name](mixed), mixed)
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        alone = params(torch.float32, torch.bfloat16, torch.float16)[2 * i : 2 * i + 2]
        optimizer = FAMILY[name](alone)
        for step in range(3):
            everything = params(torch.float32, torch.bfloat16, torch.float16)
            set_grads(everything, step)
            for p, source in zip(alone, everything[2 * i : 2 * i + 2], strict=True):
                p.grad = source.grad
            optimizer.step()
        for p, q in zip(alone, mixed[2 * i : 2 * i + 2], strict=True):
            assert p.dtype == dtype
            assert torch.equal(p, q)


@EACH
def test_groups_and_schedulers(name: str) -> None:
    first, second = params(), params()
    optimizer = FAMILY[name]([{"params": first, "lr": 1e-3}, {"params": second}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 2 else 1.0)
    run(optimizer, first + second, 1)
    assert not torch.equal(first[0], second[0])
    scheduler.step()
    run(optimizer, first + second, 1)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.0, 0.0]
    before = values(first + second)
    run(optimizer, first + second, 1)
    for p, old in zip(first + second, before, strict=True):
        assert torch.equal(p, old)


@EACH
def test_closure(name: str) -> None:
    (p, _) = ps = params()
    optimizer = FAMILY[name](ps)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = p.square().sum()
    loss = optimizer.step(closure)
    assert loss == before
    assert p.square().sum() < before


@EACH
def test_lr_may_be_a_tensor(name: str) -> None:
    a, b = params(), params()
    run(FAMILY[name](a, lr=torch.tensor(0.01)), a)
    run(FAMILY[name](b, lr=0.01), b)
    for p, q in zip(a, b, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


@EACH
def test_parameters_without_gradient_keep_their_count(name: str) -> None:
    (a, _), (b, _) = params(), params()
    optimizer = FAMILY[name]([a, b])
    for step in range(4):
        set_grads([a, b], step)
        if step in (1, 2):
            b.grad = None
        optimizer.step()
    alone = params()[0]
    single = FAMILY[name]([alone])
    for step in (0, 3):
        both = [params()[0], params()[0]]
        set_grads(both, step)
        alone.grad = both[1].grad
        single.step()
    assert torch.equal(alone, b)
    if name != "plain-sgd":
        assert float(optimizer.state[a]["step"]) == 4
        assert float(optimizer.state[b]["step"]) == 2


@EACH
def test_strided_parameters_are_updated_in_place(name: str) -> None:
    plain, strided = params()[0], nn.Parameter(params()[0].detach().t().contiguous().t())
    assert not strided.is_contiguous()
    run(FAMILY[name]([plain]), [plain])
    run(FAMILY[name]([strided]), [strided])
    assert torch.equal(plain, strided)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_small_parameters_and_gradients_of_any_strides(name: str, dtype: torch.dtype) -> None:
    """torch's fused steps read memory as it lies: of an expanded gradient they would read what is behind it."""
    orders = [torch.contiguous_format, torch.channels_last]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, 3, 3, generator=generator).to(dtype)
    layouts = [(of_param, of_grad) for of_param in orders for of_grad in orders]
    convolutions = [nn.Parameter(start.clone(memory_format=of_param)) for of_param, _ in layouts]
    expanded, whole = nn.Parameter(start[:, :, 0, 0].clone()), nn.Parameter(start[:, :, 0, 0].clone())
    optimizer = FAMILY[name]([*convolutions, expanded, whole])
    for _ in range(3):
        grad = torch.randn(start.shape, generator=generator).to(dtype)
        for p, (_, of_grad) in zip(convolutions, layouts, strict=True):
            p.grad = grad.clone(memory_format=of_grad)
        expanded.grad = grad[:, :1, 0, 0].expand(6, 4)
        whole.grad = expanded.grad.clone(memory_format=torch.contiguous_format)
        optimizer.step()
    for p, q in [*((p, convolutions[0]) for p in convolutions[1:]), (expanded, whole)]:
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == optimizer.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, optimizer.state[q][key]), key
    assert not torch.equal(convolutions[0], start)
    assert [p.is_contiguous() for p in convolutions] == [True, True, False, False]


@EACH
def test_many_small_parameters_are_stepped_as_each_alone(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    of_dtype = {torch.float32: [(), (0, 4), (600,)], torch.bfloat16: [(7,), (3, 5)], torch.float64: [(3, 5)]}
    kinds = [(shape, dtype) for _ in range(2) for dtype, shapes in of_dtype.items() for shape in shapes]
    starts = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in kinds]
    together, alone = [nn.Parameter(t.clone()) for t in starts], [nn.Parameter(t.clone()) for t in starts]
    optimizer, optimizers = FAMILY[name](together), [FAMILY[name]([p]) for p in alone]
    for _ in range(3):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            q.grad = p.grad.clone()
        optimizer.step()
        for other in optimizers:
            other.step()
    for p, q, other, start in zip(together, alone, optimizers, starts, strict=True):
        assert torch.equal(p, q)
        assert p.numel() == 0 or not torch.equal(p, start)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][key]), key


@EACH
def test_grad_scaler_steps_and_skips_without_reading_the_flag(name: str) -> None:
    a, b = params(), params()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain = FAMILY[name](a), FAMILY[name](b)
    for step in range(3):
        overflow = step == 1
        scaler.scale(torch.zeros(()))  # creates the scale
        set_grads(a, step, scale=scaler.get_scale())
        if overflow:
            a[0].grad[0, 0] = float("inf")  # type: ignore[index]
        before = values(a)
        scaler.step(scaled)
        scaler.update()
        if overflow:
            for p, old in zip(a, before, strict=True):
                assert torch.equal(p, old)
        else:
            set_grads(b, step)
            plain.step()
    assert scaler.get_scale() == 512.0
    for p, q in zip(a, b, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)
        if scaled.state[p]:
            assert float(scaled.state[p]["step"]) == 2


@EACH
def test_overflow_in_the_first_step_is_no_step(name: str) -> None:
    a, b = params(), params()
    scaled, plain = FAMILY[name](a), FAMILY[name](b)
    set_grads(a, 0, scale=float("inf"))
    scaled.found_inf = torch.tensor(1.0)
    scaled.step()
    del scaled.found_inf
    run(scaled, a)
    run(plain, b)
    for p, q in zip(a, b, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


@EACH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_stay_in_their_element(name: str, bad: float) -> None:
    """As in torch.optim: that element is spoiled from this step on, its neighbours train as if nothing had happened."""
    ps, clean = params(), params()
    optimizer, undisturbed = FAMILY[name](ps), FAMILY[name](clean)
    set_grads(ps, 0)
    set_grads(clean, 0)
    for p in ps:
        p.grad.view(-1)[3] = bad  # type: ignore[union-attr]
    for p in clean:
        p.grad.view(-1)[3] = 0.0  # type: ignore[union-attr]
    for step in (1, 2, 3):
        optimizer.step()
        undisturbed.step()
        for p, q in zip(ps, clean, strict=True):
            spoiled = ~torch.isfinite(p).view(-1)
            assert spoiled[3] and spoiled.sum() == 1
            # An element's own moments decide its step; its block's scale may differ by what element 3 held.
            assert torch.allclose(p.view(-1)[~spoiled], q.view(-1)[~spoiled], rtol=1e-3, atol=1e-4)
        set_grads(ps, step)
        set_grads(clean, step)


@EACH
def test_state_dict_round_trip_and_deepcopy(name: str) -> None:
    a = params(torch.bfloat16)
    optimizer = FAMILY[name](a)
    run(optimizer, a)
    b = copy.deepcopy(a)
    resumed = FAMILY[name](b)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, a)
    run(resumed, b)
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_torch(dampening: float, nesterov: bool) -> None:
    if nesterov and dampening:
        with pytest.raises(ValueError, match="nesterov needs momentum above 0 and no dampening"):
            SGD8bit(params(), momentum=0.9, dampening=dampening, nesterov=True)
        return
    a, b = params(), params()
    kw: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "nesterov": nesterov, "weight_decay": 0.1}
    run(SGD8bit(a, **kw), a, 4)
    theirs = torch.optim.SGD(b, **kw)
    for i in range(4):
        set_grads(b, i)
        theirs.step()
    assert torch.allclose(a[1], b[1], rtol=1e-5, atol=1e-6)
    start = params()[0]
    assert (a[0] - b[0]).norm() < 0.01 * (b[0] - start).norm()


@pytest.mark.parametrize("momenta", [(0.0, 0.0, 0.9, 0.9), (0.9, 0.9, 0.0, 0.0, 0.9, 0.9)], ids=["begins later", "pauses"])
def test_momentum_may_change(momenta: tuple[float, ...]) -> None:
    a, b = params(), params()
    ours, theirs = SGD8bit(a, lr=0.1, dampening=0.3, momentum=momenta[0]), torch.optim.SGD(b, lr=0.1, dampening=0.3)
    for i, momentum in enumerate(momenta):
        for optimizer, ps in ((ours, a), (theirs, b)):
            optimizer.param_groups[0]["momentum"] = momentum
            set_grads(ps, i)
            optimizer.step()
    assert torch.allclose(a[1], b[1], rtol=1e-5, atol=1e-6)
    start = params()[0]
    assert (a[0] - b[0]).norm() < 0.01 * (b[0] - start).norm()


def test_lion_follows_its_rule_in_float32() -> None:
    a = params()
    optimizer = Lion8bit(a, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    p, m = params()[1].detach(), torch.zeros(50)
    for i in range(3):
        set_grads(a, i)
        g = a[1].grad
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        optimizer.step()
    assert torch.allclose(a[1], p, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("cls", "bad", "text"), [
    (Lion8bit, {"betas": (0.9, 1.0)}, r"Lion8bit: betas\[1\]"),
    (Lion8bit, {"lr": -1.0}, "Lion8bit: lr must not be negative"),
    (SGD8bit, {"momentum": -0.1}, "SGD8bit: momentum must not be negative, got -0.1"),
    (SGD8bit, {"nesterov": True}, "SGD8bit: nesterov needs momentum"),
    (SGD8bit, {"weight_decay": -1.0}, "SGD8bit: weight_decay must not be negative"),
])  # fmt: skip
def test_bad_hyperparameters(cls: Any, bad: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cls(params(), **bad)


@EACH
def test_gradient_of_another_dtype(name: str) -> None:
    """torch allows it under `grad_dtype`; kernels widen each to float32."""
    a, b = params(torch.bfloat16), params(torch.bfloat16)
    wide, narrow = FAMILY[name](a), FAMILY[name](b)
    set_grads(b, 0)
    for p, q in zip(a, b, strict=True):
        p.grad_dtype = torch.float32
        p.grad = q.grad.float()  # type: ignore[union-attr]
    wide.step()
    narrow.step()
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)
