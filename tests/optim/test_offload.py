"""offload: chunks cover every row once, in any size, and the result is that of a step in one piece."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from halfbyte.optim import AdamW8bit, Lion8bit, SGD8bit
from halfbyte.optim.offload import chunks, step_streamed
from halfbyte.optim.work import Work

SHAPES = ((40, 300), (3, 5000), (700, 16), (64, 64), (4, 8, 200))


def params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]


class Streamed(AdamW8bit):
    """Sends every quantized step through the chunks, as a GPU would."""

    chunk_bytes = 10_000

    def update_quantized(self, group: dict, work: Work) -> None:
        direct = super().update_quantized
        device = torch.device("cpu")
        step_streamed(work, self.moments, device, lambda part: direct(group, part), self.chunk_bytes)


@pytest.mark.parametrize("chunk_bytes", [1, 10_000, 10**9])
def test_streamed_step_equals_the_direct_one(chunk_bytes: int) -> None:
    a, b = params(), params()
    streamed = Streamed(a, lr=1e-2, stochastic_rounding=True)
    streamed.chunk_bytes = chunk_bytes
    direct = AdamW8bit(b, lr=1e-2, stochastic_rounding=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(a, b, strict=True):
            p.grad = q.grad = torch.randn(p.shape, generator=generator).bfloat16()
            if step == 1 and p.shape[0] == 64:
                p.grad = q.grad = None
        streamed.step()
        direct.step()
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)
        for key, value in direct.state[q].items():
            assert torch.equal(streamed.state[p][key], value)


def test_chunks_bound_the_state_on_the_device() -> None:
    ps = params()
    optimizer = AdamW8bit(ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = [optimizer.state[p] for p in ps]
    work = Work([p.detach() for p in ps], [p.grad for p in ps], states, [states[0]["step"]], [], None, None)  # type: ignore[misc]
    batches = list(chunks(work, optimizer.moments, 20_000))
    assert len(batches) > 3
    rows = [0] * len(ps)
    for batch in batches:
        size = sum(t.numel() * t.element_size() for chunk in batch for t in chunk.host.values())
        assert size < 2 * 20_000 + 11_000  # a chunk may pass the limit by less than one chunk, or by one row
        for chunk in batch:
            assert chunk.param.is_contiguous()
            rows[chunk.index] += chunk.param.shape[0]
    assert rows == [shape[0] for shape in SHAPES]


@pytest.mark.parametrize("cls", [AdamW8bit, Lion8bit, SGD8bit])
def test_offload_on_the_cpu_is_the_plain_step_and_resumes(cls: type) -> None:
    kw = {"momentum": 0.9} if cls is SGD8bit else {}
    a, b = params(), params()
    offloaded, plain = cls(a, offload=True, **kw), cls(b, **kw)
    for _ in range(2):
        for p, q in zip(a, b, strict=True):
            p.grad = q.grad = torch.ones_like(p)
        offloaded.step()
        plain.step()
    c = copy.deepcopy(a)
    resumed = cls(c, offload=True, **kw)
    resumed.load_state_dict(copy.deepcopy(offloaded.state_dict()))
    for ps, optimizer in ((a, offloaded), (b, plain), (c, resumed)):
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
    for p, q, r in zip(a, b, c, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)
    assert all(t.device.type == "cpu" for state in offloaded.state.values() for t in state.values())
