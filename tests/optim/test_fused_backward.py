"""fused_backward: equal to a step after backward, gradients freed, and refused where it would be wrong."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.optim import AdamW8bit, Lion8bit, SGD8bit


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 100), nn.GELU(), nn.Linear(100, 96))


@pytest.mark.parametrize(("cls", "kw"), [(AdamW8bit, {}), (Lion8bit, {}), (SGD8bit, {"momentum": 0.9})])
def test_equals_a_step_after_backward(cls: Any, kw: dict[str, Any]) -> None:
    a, b = model(), model()
    fused, plain = cls(a.parameters(), lr=1e-2, fused_backward=True, **kw), cls(b.parameters(), lr=1e-2, **kw)
    scheduler = torch.optim.lr_scheduler.StepLR(fused, 1, 0.5), torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for _ in range(3):
        x = torch.randn(8, 96)
        a(x).square().mean().backward()
        assert all(p.grad is None for p in a.parameters())
        fused.step()
        b(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        for s in scheduler:
            s.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_dict_and_copies_keep_stepping() -> None:
    a = model()
    optimizer = AdamW8bit(a.parameters(), fused_backward=True)
    a(torch.ones(1, 96)).sum().backward()
    b = model()
    resumed = AdamW8bit(b.parameters(), fused_backward=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    b(torch.ones(1, 96)).sum().backward()
    assert float(resumed.state[b[0].weight]["step"]) == 2
    net, twin = copy.deepcopy((a, optimizer))
    before = net[0].weight.detach().clone()
    net(torch.ones(1, 96)).sum().backward()
    assert float(twin.state[net[0].weight]["step"]) == 2
    assert not torch.equal(net[0].weight, before)


def test_parameters_outlive_the_optimizer() -> None:
    net = model()
    optimizer = AdamW8bit(net.parameters(), fused_backward=True)
    del optimizer
    gc.collect()
    net(torch.ones(1, 96)).sum().backward()
    assert net[0].weight.grad is not None


def test_later_groups_are_stepped_too() -> None:
    net, extra = model(), nn.Parameter(torch.ones(96))
    optimizer = AdamW8bit(net.parameters(), fused_backward=True)
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    (net(torch.ones(1, 96)) * extra).sum().backward()
    assert extra.grad is None
    assert (extra - 1).abs().max() > 0.4


def test_grad_scaler_is_refused_by_name() -> None:
    net = model()
    optimizer = AdamW8bit(net.parameters(), fused_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(1, 96)).sum()).backward()
    with pytest.raises(NotImplementedError, match="fused_backward cannot be used with GradScaler"):
        scaler.step(optimizer)


def test_attach_ddp_needs_fused_backward() -> None:
    with pytest.raises(ValueError, match=r"attach_ddp: build the optimizer with fused_backward=True"):
        AdamW8bit(model().parameters()).attach_ddp(model())
