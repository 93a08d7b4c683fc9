"""State from and to torch.optim and from bitsandbytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.optim import Adam8bit, AdamW8bit, Lion8bit, Optimizer8bit, SGD8bit
from halfbyte.optim.dynamic_map import decode_state, encode_state

TWINS = {
    "adamw": (AdamW8bit, torch.optim.AdamW, {"lr": 3e-3}),
    "adam": (Adam8bit, torch.optim.Adam, {"lr": 3e-3}),
    "sgd": (SGD8bit, torch.optim.SGD, {"lr": 3e-3, "momentum": 0.9}),
}
EACH = pytest.mark.parametrize("name", TWINS)


def params(width: int = 300) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, width), (50,))]


def run(optimizer: torch.optim.Optimizer, ps: list[nn.Parameter], steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def states_equal(a: Optimizer8bit, b: Optimizer8bit) -> bool:
    x, y = a.state_dict()["state"], b.state_dict()["state"]
    return x.keys() == y.keys() and all(
        x[i].keys() == y[i].keys() and all(torch.equal(x[i][k], y[i][k]) for k in x[i]) for i in x
    )


@EACH
def test_export_and_import_is_exact(name: str) -> None:
    ours, _, kw = TWINS[name]
    ps = params()
    optimizer = ours(ps, **kw)
    run(optimizer, ps)
    again = ours(copy.deepcopy(ps))
    again.load_torch_state_dict(optimizer.torch_state_dict())
    if name == "sgd":  # torch's SGD has no count: 1 says that the buffer exists
        for state in again.state.values():
            state["step"].fill_(3.0)
    assert states_equal(again, optimizer)
    assert again.param_groups[0]["lr"] == 3e-3


@EACH
def test_torch_continues_from_our_state(name: str) -> None:
    ours, theirs, kw = TWINS[name]
    ps = params()
    optimizer = ours(ps, **kw)
    run(optimizer, ps)
    copies = copy.deepcopy(ps)
    twin = theirs(copies, lr=1.0)
    twin.load_state_dict(optimizer.torch_state_dict())
    assert twin.param_groups[0]["lr"] == 3e-3
    before = [p.detach().clone() for p in ps]
    run(optimizer, ps, 1)
    run(twin, copies, 1)
    for p, q, start in zip(ps, copies, before, strict=True):
        assert (p - q).norm() < 0.02 * (q - start).norm()


@EACH
def test_we_continue_from_torchs_state(name: str) -> None:
    ours, theirs, kw = TWINS[name]
    ps = params()
    twin = theirs(ps, **kw)
    run(twin, ps)
    copies = copy.deepcopy(ps)
    optimizer = ours(copies)
    optimizer.load_torch_state_dict(copy.deepcopy(twin.state_dict()))
    before = [p.detach().clone() for p in ps]
    run(twin, ps, 1)
    run(optimizer, copies, 1)
    for p, q, start in zip(ps, copies, before, strict=True):
        assert (p - q).norm() < 0.02 * (p - start).norm()
    assert optimizer.state[copies[0]][optimizer.moments[0].codes].dtype == torch.uint8


def test_torch_state_that_has_no_8_bit_form_is_refused() -> None:
    ps = params()
    twin = torch.optim.AdamW(ps, amsgrad=True)
    run(twin, ps, 1)
    with pytest.raises(ValueError, match="amsgrad=True has no 8-bit form"):
        AdamW8bit(params()).load_torch_state_dict(twin.state_dict())
    twin = torch.optim.AdamW(ps)
    run(twin, ps, 1)
    with pytest.raises(ValueError, match=r"the groups must have \[1\] parameters, got \[2\]"):
        AdamW8bit(params()[:1]).load_torch_state_dict(twin.state_dict())
    with pytest.raises(
        ValueError, match=r"state of parameter 0: exp_avg must be a tensor of the parameter's shape \(40, 9\)"
    ):
        AdamW8bit(params(9)).load_torch_state_dict(twin.state_dict())


# bitsandbytes: its CPU optimizers may be missing or slow, so its state is written here as it writes it.


def bitsandbytes_state(ps: list[nn.Parameter], block: int, wrapped: bool, two: bool = True) -> dict[str, Any]:
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(2)
    maps = [functional.create_dynamic_map(True).sort().values, functional.create_dynamic_map(False).sort().values]
    state: dict[int, dict[str, Any]] = {}
    for i, p in enumerate(ps):
        entry: dict[str, Any] = {}
        for m in range(2 if two else 1):
            codes = torch.randint(0, 256, p.shape, generator=generator, dtype=torch.uint8)
            scales = torch.rand(-(-p.numel() // block), generator=generator)
            entry |= {f"state{m + 1}": codes, f"absmax{m + 1}": scales, f"qmap{m + 1}": maps[m]}
        state[i] = {"step": 5, **({"__bnb_optimizer_quant_state__": entry} if wrapped else entry)}
    groups = [
        {
            "params": list(range(len(ps))),
            "lr": 2e-3,
            "betas": (0.8, 0.9),
            "eps": 1e-7,
            "weight_decay": 0.3,
            "alpha": 0.0,
        }
    ]
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "wrapped"])
def test_bitsandbytes_state_byte_for_byte(wrapped: bool) -> None:
    ps = [nn.Parameter(torch.zeros(8, 512)), nn.Parameter(torch.zeros(16, 4, 64))]
    saved = bitsandbytes_state(ps, 256, wrapped)
    optimizer = AdamW8bit(ps)
    optimizer.load_bitsandbytes_state_dict(saved)
    for i, p in enumerate(ps):
        theirs = saved["state"][i]
        theirs = theirs.get("__bnb_optimizer_quant_state__", theirs)
        state = optimizer.state[p]
        assert float(state["step"]) == 5
        for m, moment in enumerate(optimizer.moments):
            assert torch.equal(state[moment.codes], theirs[f"state{m + 1}"])
            assert torch.equal(state[moment.scales].flatten(), theirs[f"absmax{m + 1}"])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-3, (0.8, 0.9), 1e-7, 0.3)
    assert "alpha" not in group


@pytest.mark.parametrize(("width", "block"), [(300, 256), (512, 2048)])
def test_other_blocks_are_coded_anew(width: int, block: int) -> None:
    (p, _) = params(width)
    saved = bitsandbytes_state([p], block, False)
    optimizer = AdamW8bit([p])
    optimizer.load_bitsandbytes_state_dict(saved)
    theirs = saved["state"][0]
    for m, moment in enumerate(optimizer.moments):
        table, scales = theirs[f"qmap{m + 1}"], theirs[f"absmax{m + 1}"].repeat_interleave(block)[: p.numel()]
        dense = (table[theirs[f"state{m + 1}"].flatten().int()] * scales).view(p.shape)
        codes, scales = encode_state(dense, moment.signed)
        assert torch.equal(optimizer.state[p][moment.codes], codes)
        assert torch.equal(optimizer.state[p][moment.scales], scales)
        back = decode_state(codes, scales, moment.signed)
        assert ((back - dense).abs() <= 0.5 * dense.abs() + 1e-6 * scales.max()).all()


def test_bitsandbytes_block_size_is_asked_for() -> None:
    (p, _) = params(300)
    saved = bitsandbytes_state([p], 1200, False)
    with pytest.raises(ValueError, match="10 scales for 12000 elements fit no single power of two; pass block_size="):
        AdamW8bit([p]).load_bitsandbytes_state_dict(saved)
    AdamW8bit([p]).load_bitsandbytes_state_dict(saved, block_size=1200)
    with pytest.raises(ValueError, match="block_size=256 does not give 10 scales"):
        AdamW8bit([p]).load_bitsandbytes_state_dict(saved, block_size=256)


def test_bitsandbytes_float32_state_and_one_moment() -> None:
    ps = params()
    saved = bitsandbytes_state(ps, 256, False, two=False)
    saved["state"][1]["state1"] = torch.randn(50)
    optimizer = Lion8bit(ps)
    optimizer.load_bitsandbytes_state_dict(saved)
    assert optimizer.state[ps[0]]["exp_avg_codes"].shape == (40, 300)
    assert torch.equal(optimizer.state[ps[1]]["exp_avg"], saved["state"][1]["state1"])


def test_a_bitsandbytes_state_with_missing_entries_is_refused() -> None:
    (p, _) = params()
    for key in ("absmax2", "qmap1", "state2"):
        saved = bitsandbytes_state([p], 256, False)
        del saved["state"][0][key]
        with pytest.raises(ValueError, match=f"state of parameter 0: .*{key}"):
            AdamW8bit([p]).load_bitsandbytes_state_dict(saved)


def test_real_bitsandbytes_optimizer() -> None:
    """A state dict that bitsandbytes itself wrote on this machine."""
    bnb = pytest.importorskip("bitsandbytes")
    p = nn.Parameter(torch.randn(32, 256))
    theirs = bnb.optim.AdamW8bit([p], lr=1e-3)
    p.grad = torch.randn(32, 256)
    theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    q = nn.Parameter(p.detach().clone())
    optimizer = AdamW8bit([q])
    optimizer.load_bitsandbytes_state_dict(saved)
    quant = saved["state"][0]["__bnb_optimizer_quant_state__"]
    assert torch.equal(optimizer.state[q]["exp_avg_codes"], quant["state1"])
    assert torch.equal(optimizer.state[q]["exp_avg_sq_scales"].flatten(), quant["absmax2"])
