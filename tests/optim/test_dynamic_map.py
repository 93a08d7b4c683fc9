"""The map in closed form: against bitsandbytes' table, against the oracle, and its exact inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte import reference_optimizer as oracle
from halfbyte.ops.optimizer import adamw8bit_step_, sgd8bit_step_
from halfbyte.optim.dynamic_map import decode_state, encode_state, map_values, row_blocks

SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@SIGNS
def test_python_definition_equals_the_oracle(signed: bool) -> None:
    assert torch.equal(map_values(signed), torch.from_numpy(oracle.dynamic_map(signed)))
    assert (map_values(signed).diff() > 0).all()


@SIGNS
def test_within_8_ulp_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed=signed).sort().values
    distance = (bits(map_values(signed)) - bits(theirs)).abs()
    assert distance.max() <= 8
    assert distance.max() > 0  # the closed form is not their table


def test_codes_are_bitsandbytes_codes() -> None:
    """Nearest entry of its own table, outside of the 8 ulp by which the tables differ."""
    functional = pytest.importorskip("bitsandbytes.functional")
    x = torch.randn(32, 1024, generator=torch.Generator().manual_seed(0)) * 0.2
    ours, scales = encode_state(x, signed=True)
    normalized = (x.view(-1, 256) / scales.view(-1, 1)).flatten().double()
    table = functional.create_dynamic_map(True).sort().values.double()
    distance, nearest = (normalized[:, None] - table).abs().sort(1)
    clear = distance[:, 1] - distance[:, 0] > 4e-6 * normalized.abs()
    assert clear.float().mean() > 0.99
    assert torch.equal(ours.flatten()[clear], nearest[clear, 0].byte())
    # Its CPU kernel looks values up in 65536 buckets: equal where those are finer than the map.
    theirs, state = functional.quantize_blockwise(x, functional.create_dynamic_map(True), blocksize=256)
    assert torch.equal(scales.flatten(), state.absmax)
    fine = (normalized.abs() > 0.02) & (distance[:, 1] - distance[:, 0] > 1e-4)
    assert fine.float().mean() > 0.8
    assert torch.equal(ours.flatten()[fine], theirs.flatten()[fine])


def neighbours_of_midpoints(signed: bool) -> torch.Tensor:
    """Every midpoint and entry of the map with the 6 floats on either side of it."""
    values = map_values(signed)
    points = torch.cat([values, ((values.double()[1:] + values.double()[:-1]) / 2).float()])
    near = (bits(points)[:, None] + torch.arange(-6, 7, dtype=torch.int32)).flatten().view(torch.float32)
    near = near[(near.abs() >= 2**-126) & (near.abs() <= 1)]  # subnormal numbers count as zero
    return near if signed else near[near >= 0]


@SIGNS
def test_kernel_encodes_to_the_nearest_entry(signed: bool) -> None:
    """Values next to every tie, each in a block whose scale is 1, so that they are the normalized values."""
    x = neighbours_of_midpoints(signed)
    x = torch.nn.functional.pad(x, (0, -len(x) % 255)).view(-1, 255)
    x = torch.cat([torch.ones(len(x), 1), x], 1)
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.zeros(len(x), 1)
    one = [torch.tensor(1.0)]
    if signed:  # momentum of the first step is the gradient
        sgd8bit_step_([torch.zeros_like(x)], [x], [codes], [scales], one, lr=0.0, momentum=0.9, dampening=0.0,
                      weight_decay=0.0, nesterov=False)  # fmt: skip
    else:  # the second moment at beta2 = 0 is the gradient's square; the values are made squares first
        root = x.sqrt()
        x = root * root
        first = [torch.full(x.shape, 127, dtype=torch.uint8)], [torch.zeros(len(x), 1)]
        adamw8bit_step_([torch.zeros_like(x)], [root], *first, [codes], [scales], one, lr=0.0, beta1=0.0, beta2=0.0,
                        eps=1e-8, weight_decay=0.0)  # fmt: skip
    assert (scales == 1).all()
    assert torch.equal(codes, torch.from_numpy(oracle.nearest_code(x.numpy(), signed)))


@pytest.mark.slow
@SIGNS
def test_kernel_encodes_every_float_to_the_nearest_entry(signed: bool) -> None:
    """All of [2**-126, 1] as first moments, the squares of all of [2**-63, 1] as second ones; exact midpoints in float64."""
    values = map_values(signed).double()
    least = 127 if signed else 1
    middle = ((values[1:] + values[:-1]) / 2)[least:]
    rows, one = 1 << 16, [torch.tensor(1.0)]
    end, step = 0x3F800001, 255 * rows  # one past the bits of 1.0; a block's first element is the 1 that makes its scale 1
    for start in range(0x00800000 if signed else 0x20000000, end, step):
        part = torch.arange(start, min(start + step, end), dtype=torch.int32).view(torch.float32)
        x = torch.ones(rows, 256)
        x[:, 1:] = torch.nn.functional.pad(part, (0, step - len(part)), value=1.0).view(rows, 255)
        params = [torch.zeros(rows, 256)]
        first = [torch.full(x.shape, 127, dtype=torch.uint8)], [torch.zeros(rows, 1)]
        if signed:
            codes, scales = first
            sgd8bit_step_(params, [x], codes, scales, one, lr=0.0, momentum=0.9, dampening=0.0, weight_decay=0.0,
                          nesterov=False)  # fmt: skip
        else:
            codes, scales = [torch.zeros(x.shape, dtype=torch.uint8)], [torch.zeros(rows, 1)]
            adamw8bit_step_(params, [x], *first, codes, scales, one, lr=0.0, beta1=0.0, beta2=0.0, eps=1e-8,
                            weight_decay=0.0)  # fmt: skip
            x = x * x
        assert (scales[0] == 1).all()
        assert torch.equal(codes[0].int(), least + torch.bucketize(x.double(), middle, out_int32=True))


@SIGNS
def test_ties_go_to_the_smaller_magnitude(signed: bool) -> None:
    values = map_values(signed).double()
    middle = (values[1:] + values[:-1]) / 2  # exact in fp64
    expected = np.arange(255)
    expected = np.where(middle.numpy() < 0, expected + 1, expected)
    if not signed:
        expected[0] = 1  # a positive second moment is never 0
    assert (oracle.nearest_code(middle.numpy(), signed) == expected).all()


@SIGNS
def test_export_has_an_exact_inverse_on_100_000_blocks(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (100_000, 32), generator=generator, dtype=torch.uint8)
    scales = torch.exp(8 * torch.randn(100_000, 1, generator=generator))
    if signed:  # the extreme of a block is code 255 or code 0, as the encoder leaves it
        codes[:, 0] = torch.where(torch.rand(100_000, generator=generator) < 0.5, 0, 255)
    else:
        codes[:, 0] = 255
    codes[:5], scales[:5] = (127 if signed else 0), 0.0
    values = decode_state(codes, scales, signed, exact_inverse=True)
    again, scales_again = encode_state(values, signed)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 600), st.booleans(), st.floats(-30, 30))
def test_torch_codec_equals_the_oracle(seed: int, rows: int, length: int, signed: bool, decade: float) -> None:
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)) * 10**decade
    x = x if signed else x.abs()
    codes, scales = encode_state(x, signed)
    for r in range(rows):
        for b in range(row_blocks(x.shape)[2]):
            at = slice(b * 256, (b + 1) * 256)
            expected, scale = oracle.encode_block(x[r, at].numpy(), signed)
            values = oracle.dynamic_map(signed)
            # The torch codec divides in fp64: next to a midpoint it may pick the other neighbour.
            step = np.abs(codes[r, at].numpy().astype(int) - expected.astype(int))
            assert step.max() <= 1
            assert (step > 0).mean() < 0.05
            assert scales[r, b] == scale
            decoded = decode_state(codes[r : r + 1], scales[r : r + 1], signed)[0, at].numpy()
            assert (decoded == values[codes[r, at].numpy()] * scale).all()


def test_positive_second_moment_never_becomes_zero() -> None:
    """Also where the normalized value underflows."""
    grad = torch.full((1, 256), 1e-16)
    grad[0, 0] = 1e15
    grad[0, 1] = 0.0
    state = (
        [torch.full((1, 256), 127, dtype=torch.uint8)],
        [torch.zeros(1, 1)],
        [torch.zeros(1, 256, dtype=torch.uint8)],
        [torch.zeros(1, 1)],
    )
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    adamw8bit_step_([torch.zeros(1, 256)], [grad], *state, [torch.tensor(1.0)], **hyper)
    codes = state[2][0][0]
    assert codes[0] == 255
    assert codes[1] == 0
    assert (codes[2:] == 1).all()
