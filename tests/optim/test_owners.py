"""What a step keeps and takes in one go: whatever changes between steps is seen, and memory is freed."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from halfbyte.optim import AdamW8bit, Optimizer8bit, SGD8bit, owners

SHAPES = [(40, 300), (1, 16), (7, 33), (1, 1), (16, 256), (3, 5)]
Both = tuple[list[Parameter], list[Optimizer8bit]]
Event = Callable[[list[Parameter], list[Optimizer8bit]], Both | None]


def tensors(optimizers: Iterable[Optimizer8bit], keys: str = "") -> list[tuple[dict[str, Tensor], str]]:
    """(state, key) of everything in the states whose key contains `keys`."""
    return [(state, key) for o in optimizers for state in o.state.values() for key in state if keys in key]


def replace(state: dict[str, Tensor], key: str) -> None:
    old = state[key]
    state[key] = old.clone()
    old.fill_(101)  # who still steps it is found out


def replace_all(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
    for state, key in tensors(optimizers):
        if key != "step":
            replace(state, key)


def replace_one(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
    for o in optimizers:
        for p in set(o.state) & {params[4]}:
            replace(o.state[p], "exp_avg_sq_scales")


def replace_memory_of_state(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
    for state, key in tensors(optimizers, "exp_avg"):
        old = state[key].data
        state[key].data = old.clone()
        old.fill_(101)


def replace_memory_of_parameters(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
    for p in params:
        old = p.data
        p.data = old.clone()
        old.fill_(float("nan"))


def load(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
    for o in optimizers:
        saved = copy.deepcopy(o.state_dict())
        saved["state"] = dict(reversed(saved["state"].items()))
        replace_all(params, [o])
        o.load_state_dict(saved)


def forget_one(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
    for o in optimizers:
        o.state.pop(params[2], None)


def rename(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
    for o in optimizers:
        for state in o.state.values():
            items = dict(reversed(state.items()))
            state.clear()
            state.update(items)


EVENTS: dict[str, Event] = {
    "nothing happens": lambda params, optimizers: None,
    "state tensors are replaced": replace_all,
    "one state tensor is replaced": replace_one,
    "the memory of state tensors is replaced": replace_memory_of_state,
    "the memory of parameters is replaced": replace_memory_of_parameters,
    "a state dict in another order is loaded": load,
    "one state is forgotten": forget_one,
    "the entries of each state come in another order": rename,
    "deep copies go on": lambda params, optimizers: copy.deepcopy((params, optimizers)),
    "pickles go on": lambda params, optimizers: pickle.loads(pickle.dumps((params, optimizers))),
}


def run(params: list[Parameter], optimizers: list[Optimizer8bit], event: Event) -> Both:
    generator = torch.Generator().manual_seed(1)
    for count in range(7):
        if count == 3:
            params, optimizers = event(params, optimizers) or (params, optimizers)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator)
            # Parameter 0 starts late, others rest: states come in another order than parameters, counts differ.
            p.grad = None if (i == 0 and count == 0) or (i in (1, 4) and count == 5) else grad
        for o in optimizers:
            o.step()
    return params, optimizers


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_one_optimizer_equals_one_for_each_parameter(event: str, groups: int) -> None:
    initial = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    together, apart = ([Parameter(t.clone()) for t in initial] for _ in range(2))
    lists = [together] if groups == 1 else [together[:4], together[4:]]
    one = AdamW8bit([{"params": params, "quantize_state": True} for params in lists], lr=1e-2)
    each = [AdamW8bit([{"params": [p], "quantize_state": True}], lr=1e-2) for p in apart]
    together, (one_after,) = run(together, [one], EVENTS[event])
    apart, each_after = run(apart, list(each), EVENTS[event])
    for i, (p, q, o) in enumerate(zip(together, apart, each_after, strict=True)):
        assert torch.equal(p, q), i
        assert one_after.state[p].keys() == o.state[q].keys()
        for key, value in one_after.state[p].items():
            assert torch.equal(value, o.state[q][key]), (i, key)


def test_a_groups_rate_may_change_between_steps() -> None:
    initial = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    together, apart = ([Parameter(t.clone()) for t in initial] for _ in range(2))
    one = AdamW8bit([{"params": part, "quantize_state": True} for part in (together[:4], together[4:])], lr=1e-2)
    each = [AdamW8bit([{"params": part, "quantize_state": True}], lr=1e-2) for part in (apart[:4], apart[4:])]

    def slower(params: list[Parameter], optimizers: list[Optimizer8bit]) -> None:
        [group for o in optimizers for group in o.param_groups][1]["lr"] = 1e-3

    run(together, [one], slower)
    run(apart, list(each), slower)
    assert all(map(torch.equal, together, apart))
    run(together, [one], EVENTS["nothing happens"])
    assert not any(map(torch.equal, together, apart))  # steps do change them


def test_states_of_one_group_are_not_those_of_another() -> None:
    a, b = Parameter(torch.zeros(2, 8)), Parameter(torch.zeros(2, 8))
    optimizer = AdamW8bit([{"params": [p], "quantize_state": True} for p in (a, b)])
    a.grad = torch.ones(2, 8)
    optimizer.step()
    a.grad, b.grad = None, torch.ones(2, 8)
    optimizer.step()
    assert float(optimizer.state[a]["step"]) == float(optimizer.state[b]["step"]) == 1


def stepped(count: int = 3, **options: bool) -> AdamW8bit:
    params = [Parameter(torch.zeros(2, 300)) for _ in range(4)]
    optimizer = AdamW8bit([{"params": params, "quantize_state": True}], **options)
    for _ in range(count):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


def references(optimizer: Optimizer8bit) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(state[key]) for state, key in tensors([optimizer], "exp_avg")]


def alive(those: list[weakref.ref[Tensor]]) -> int:
    return sum(reference() is not None for reference in those)


def test_state_has_a_second_owner() -> None:
    """It is all that keeps a tensor that was taken out of the state."""
    optimizer = stepped()
    those = references(optimizer)
    optimizer.state.clear()
    assert alive(those) == len(those) == 16


def test_new_state_has_a_second_owner_from_the_next_step() -> None:
    optimizer = stepped()
    for state, key in tensors([optimizer]):
        state[key] = state[key].detach()  # another tensor, the same memory
    optimizer.step()
    those = references(optimizer)
    optimizer.state.clear()
    assert alive(those) == len(those) == 16


def test_state_of_a_new_group_has_a_second_owner_from_the_next_step() -> None:
    optimizer = stepped()
    new = Parameter(torch.zeros(2, 300))
    optimizer.add_param_group({"params": [new], "quantize_state": False})
    new.grad = torch.ones_like(new)
    optimizer.step()
    optimizer.step()
    those = references(optimizer)
    optimizer.state.clear()
    assert alive(those) == len(those) == 16 + 2


def test_state_replaced_by_hand_is_freed_by_the_next_step() -> None:
    optimizer = stepped()
    those = references(optimizer)
    for state, key in tensors([optimizer]):
        state[key] = state[key].clone()
    optimizer.step()
    assert alive(those) == 0


def test_memory_of_state_replaced_by_hand_is_freed_by_the_next_step() -> None:
    optimizer = stepped()
    freed: list[str] = []
    for state, key in tensors([optimizer], "exp_avg"):
        weakref.finalize(state[key].untyped_storage(), freed.append, key)
        state[key].data = state[key].clone()
    optimizer.step()
    assert len(freed) == 16


def test_state_without_its_parameters_is_freed_by_the_next_step() -> None:
    optimizer = stepped()
    those = references(optimizer)
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = []
    optimizer.step()
    assert alive(those) == 0


def test_state_is_freed_when_another_is_loaded() -> None:
    optimizer = stepped()
    those = references(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert alive(those) == 0
    those = references(optimizer)
    optimizer.step()
    optimizer.load_torch_state_dict(optimizer.torch_state_dict())
    assert alive(those) == 0


def test_state_is_freed_with_the_optimizer() -> None:
    optimizer = stepped()
    those = references(optimizer)
    del optimizer
    assert alive(those) == 0


def test_large_state_has_no_second_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MOST_BYTES", 4 * (2 * 2 * 300 + 2 * 4 * 2 * 2))  # of the moments; the count is 4 more
    optimizer = stepped()
    those = references(optimizer)
    optimizer.state.clear()
    assert alive(those) == 0


def test_state_that_is_no_tensor_is_passed_over() -> None:
    optimizer = stepped()
    optimizer.state["mine"] = 3  # type: ignore[index, assignment]
    first = SGD8bit([Parameter(torch.zeros(2, 8))])
    first.state["mine"] = 3  # type: ignore[index, assignment]
    for o in (optimizer, first):
        for p in o.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        o.step()
    assert float(optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]) == 4


def test_real_state_stays_out_of_a_fake_mode() -> None:
    optimizer = stepped()
    for p in optimizer.param_groups[0]["params"]:
        p.grad = None
    for state, key in tensors([optimizer]):
        state[key] = state[key].clone()
    with FakeTensorMode():
        optimizer.step()
    optimizer.step()
    those = references(optimizer)
    optimizer.state.clear()
    assert alive(those) == 16
