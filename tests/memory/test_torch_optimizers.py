"""What a step counts of torch's own optimizers, whose temporaries depend on the implementation that torch chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW, RMSprop
from torch.optim import optimizer as torch_optimizer

import halfbyte
from halfbyte.memory.simulate import OptimizerLike, _as_in_real_steps
from halfbyte.memory.tracker import StorageTracker

LAYERS, LAYER = 16, 4 * 256 * 256
WEIGHTS = LAYERS * LAYER
STEPS = 4 * LAYERS  # a float for each parameter


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256, bias=False), nn.GELU()) for _ in range(LAYERS))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            input = block(input)
        return input


def optimizer_bytes(optimizer: OptimizerLike, **arguments: Any) -> int:
    """State and temporaries of the optimizer at the peak, which is in its step: activations are tiny."""
    plan = halfbyte.plan(
        Blocks(), batch_size=1, seq_len=1, batch=lambda rows, _: torch.zeros(rows, 256), optimizer=optimizer, **arguments
    )
    return {row.what: row.bytes for row in plan.rows}["optimizer state"]


@pytest.fixture
def lists_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs are what torch's optimizers take GPUs for: devices on which they take all parameters at once ("foreach")."""
    monkeypatch.setattr(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])


@pytest.mark.usefixtures("lists_by_default")
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("adamw", 3 * WEIGHTS + STEPS),  # two moments, and the roots of the second
        ("adam", 3 * WEIGHTS + STEPS),
        ("sgd-momentum", WEIGHTS),  # in place
        (partial(SGD, lr=1e-3, momentum=0.9, weight_decay=0.1), 2 * WEIGHTS),  # gradients with the decay
        (partial(RMSprop, lr=1e-3), 2 * WEIGHTS + STEPS),
        (partial(AdamW, foreach=True), 3 * WEIGHTS + STEPS),
        (partial(AdamW, foreach=False), 2 * WEIGHTS + STEPS + 3 * LAYER),  # a root, it corrected, the last layer's
        (partial(AdamW, fused=True), 2 * WEIGHTS + STEPS),
    ],
)
def test_temporaries_are_those_of_the_implementation_that_torch_chooses(optimizer: OptimizerLike, expected: int) -> None:
    assert optimizer_bytes(optimizer) == expected


@pytest.mark.usefixtures("lists_by_default")
@pytest.mark.parametrize(("strategy", "ranks", "shards"), [("ddp", 2, 1), ("fsdp1", 2, 2), ("fsdp2", 1, 1), ("fsdp2", 4, 4)])
def test_so_they_are_where_parameters_are_sharded(strategy: str, ranks: int, shards: int) -> None:
    taken = optimizer_bytes("adamw", strategy=strategy, world_size=ranks)
    assert taken == 3 * WEIGHTS // shards + STEPS


def test_cpus_take_one_parameter_after_the_other() -> None:
    assert optimizer_bytes("adamw") == optimizer_bytes(partial(AdamW, foreach=False))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (AdamW, 3 * WEIGHTS),  # and steps are counted in host memory
        (partial(AdamW, foreach=False), 2 * WEIGHTS + 3 * LAYER),
        (partial(AdamW, fused=True), 2 * WEIGHTS + 512 * LAYERS),  # these are on the GPU, where 4 bytes take 512
        (partial(AdamW, capturable=True), 3 * WEIGHTS + 3 * 512 * LAYERS),  # as are both corrections
        (partial(SGD, lr=1e-3, momentum=0.9), WEIGHTS),
    ],
)
def test_a_step_on_cuda(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], expected: int) -> None:
    with FakeTensorMode(), torch.device("cuda"), StorageTracker(host=False) as tracker:
        parameters = [nn.Parameter(torch.empty(256, 256)) for _ in range(LAYERS)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        assert tracker.total == 2 * WEIGHTS
        with _as_in_real_steps():
            optimizer = make(parameters)
            for _ in range(2):
                optimizer.step()
    assert tracker.peak - 2 * WEIGHTS == expected


def test_fakes_are_foreign_to_torchs_optimizers_after_a_plan() -> None:
    before = list(torch_optimizer._foreach_supported_types)
    optimizer_bytes("adamw")
    with pytest.raises(ZeroDivisionError):
        optimizer_bytes(lambda parameters: 1 / 0)
    assert before == torch_optimizer._foreach_supported_types
