"""AdamW8bit and Adam8bit: state, eligibility, and that they follow torch.optim."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte.optim
from halfbyte.optim import Adam8bit, AdamW8bit

BOTH = pytest.mark.parametrize(("ours", "theirs"), [(AdamW8bit, torch.optim.AdamW), (Adam8bit, torch.optim.Adam)])


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.LayerNorm(200), nn.Linear(200, 96)).to(dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 30, seed: int = 1) -> float:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(net.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(32, 96, generator=generator).to(dtype)
        optimizer.zero_grad()
        loss = (net(x).float() - x.float().flip(1)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@BOTH
@pytest.mark.parametrize("kw", [{}, {"weight_decay": 0.3}, {"betas": (0.8, 0.95), "eps": 1e-6}, {"maximize": False}])
def test_follows_torch(ours: Any, theirs: Any, kw: dict[str, Any]) -> None:
    a, b = model(), model()
    loss_a = train(a, ours(a.parameters(), lr=2e-3, **kw))
    loss_b = train(b, theirs(b.parameters(), lr=2e-3, **kw))
    assert abs(loss_a - loss_b) < 0.01 * loss_b
    start = model()
    for p, q, s in zip(a.parameters(), b.parameters(), start.parameters(), strict=True):
        assert (p - q).norm() < 0.1 * (q - s).norm()


@BOTH
def test_small_parameters_keep_float32_and_are_torch_exactly(ours: Any, theirs: Any) -> None:
    a, b = nn.Linear(16, 16), nn.Linear(16, 16)
    b.load_state_dict(a.state_dict())
    for net, optimizer in ((a, ours(a.parameters())), (b, theirs(b.parameters(), fused=True))):
        for i in range(3):
            net.zero_grad()
            net(torch.full((2, 16), float(i + 1))).square().sum().backward()
            optimizer.step()
    assert torch.equal(a.weight, b.weight)
    assert torch.equal(a.bias, b.bias)


def test_state_layout_and_bytes_per_parameter() -> None:
    for r in (8, 16):
        a, b = nn.Parameter(torch.zeros(r, 1024)), nn.Parameter(torch.zeros(1024, r))
        optimizer = AdamW8bit([a, b])
        for p in (a, b):
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p, per_element in ((a, 2 + 8 / 256), (b, 2 + 8 / r)):
            state = optimizer.state[p]
            assert sorted(state) == ["exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales", "step"]
            assert state["exp_avg_codes"].shape == p.shape
            assert state["exp_avg_codes"].dtype == torch.uint8
            assert state["exp_avg_scales"].shape == (p.shape[0], -(-p.shape[1] // 256))
            size = sum(t.numel() * t.element_size() for k, t in state.items() if k != "step")
            assert size / p.numel() == per_element


def test_eligibility() -> None:
    params = {
        "matrix": nn.Parameter(torch.zeros(64, 64)),
        "small": nn.Parameter(torch.zeros(63, 65)),
        "vector": nn.Parameter(torch.zeros(8192)),
        "conv": nn.Parameter(torch.zeros(32, 16, 3, 3)),
        "double": nn.Parameter(torch.zeros(64, 64, dtype=torch.float64)),
        "scalar": nn.Parameter(torch.zeros(())),
    }
    optimizer = AdamW8bit(params.values())
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    quantized = {name for name, p in params.items() if "exp_avg_codes" in optimizer.state[p]}
    assert quantized == {"matrix", "conv"}
    assert optimizer.state[params["double"]]["exp_avg"].dtype == torch.float64
    for p in params.values():
        assert torch.isfinite(p).all()
        assert (p < 0).all()


def test_eligibility_can_be_set_per_group() -> None:
    big, small = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(300))
    optimizer = AdamW8bit([{"params": [big], "quantize_state": False}, {"params": [small], "quantize_state": True}])
    for p in (big, small):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert "exp_avg" in optimizer.state[big]
    assert optimizer.state[small]["exp_avg_codes"].shape == (300,)
    assert optimizer.state[small]["exp_avg_scales"].shape == (1, 2)


@BOTH
def test_state_dict_round_trip_is_exact(ours: Any, theirs: Any) -> None:
    net = model(torch.bfloat16)
    optimizer = ours(net.parameters(), lr=1e-3)
    train(net, optimizer, 3)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = model(torch.bfloat16)
    other.load_state_dict(saved["net"])
    resumed = ours(other.parameters())
    resumed.load_state_dict(saved["optimizer"])
    for state, expected in zip(
        resumed.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert state.keys() == expected.keys()
        for key in state:
            assert state[key].dtype == expected[key].dtype
            assert torch.equal(state[key], expected[key])
    assert train(net, optimizer, 3, seed=2) == train(other, resumed, 3, seed=2)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_loading_does_not_alias_the_step() -> None:
    net = model()
    optimizer = AdamW8bit(net.parameters())
    train(net, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    train(net, optimizer, 1)
    assert float(saved["state"][0]["step"]) == 2
    assert float(optimizer.state_dict()["state"][0]["step"]) == 3


def test_wrong_state_is_refused_by_name() -> None:
    net = model()
    optimizer = AdamW8bit(net.parameters())
    train(net, optimizer, 1)
    good = optimizer.state_dict()
    broken = copy.deepcopy(good)
    broken["state"][0]["exp_avg_codes"] = broken["state"][0]["exp_avg_codes"].float()
    with pytest.raises(ValueError, match=r"parameter 0: exp_avg_codes must be torch.uint8 .* got torch.float32"):
        AdamW8bit(model().parameters()).load_state_dict(broken)
    broken = copy.deepcopy(good)
    broken["state"][0]["exp_avg_scales"] = broken["state"][0]["exp_avg_scales"][:, :0]
    with pytest.raises(ValueError, match=r"exp_avg_scales must be torch\.float32 of shape"):
        AdamW8bit(model().parameters()).load_state_dict(broken)
    twin = model()
    dense = torch.optim.AdamW(twin.parameters())
    train(twin, dense, 1)
    with pytest.raises(ValueError, match="load_torch_state_dict"):
        AdamW8bit(model().parameters()).load_state_dict(dense.state_dict())


@pytest.mark.parametrize(("bad", "text"), [
    ({"lr": -1.0}, "lr must not be negative, got -1.0"),
    ({"lr": float("nan")}, "lr must not be negative, got nan"),
    ({"eps": -1e-8}, "eps must not be negative"),
    ({"weight_decay": -0.1}, "weight_decay must not be negative"),
    ({"betas": (1.0, 0.9)}, r"betas\[0\] must be from 0 to below 1, got 1.0"),
    ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
    ({"betas": (0.9,)}, "betas must be two numbers"),
    ({"lr": torch.ones(2)}, "lr must have one element"),
    ({"quantize_state": "no"}, "quantize_state must be None, True or False"),
    ({"seed": 2**64}, "seed must be an integer"),
])  # fmt: skip
def test_bad_hyperparameters(bad: dict[str, Any], text: str) -> None:
    for cls in (AdamW8bit, Adam8bit):
        with pytest.raises(ValueError, match=f"{cls.__name__}: .*{text}"):
            cls([nn.Parameter(torch.zeros(2))], **bad)


def test_complex_and_sparse_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="parameter 1 of group 0 is complex"):
        AdamW8bit([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(NotImplementedError, match="parameter 'w' is complex"):
        AdamW8bit([("w", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
    embedding = nn.Embedding(100, 64, sparse=True)
    optimizer = AdamW8bit(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="parameter 0 of group 0 has a sparse gradient"):
        optimizer.step()


def test_public_names() -> None:
    assert set(halfbyte.optim.__all__) >= {"AdamW8bit", "Adam8bit"}
