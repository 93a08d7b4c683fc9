"""What must hold for every row, whatever its values."""

import math

import pytest
import torch
from exact import DTYPES, ROWS, SMALLEST_FORMATS, gaussian
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfbyte.formats import FORMATS, Format
from halfbyte.reference import dequantize, quantize, quantize_with_scales, unpack


@pytest.mark.parametrize("name", ["nf4:32", "fp4:32"])
@settings(max_examples=100, deadline=None)
@given(row=ROWS, dtype=st.sampled_from(DTYPES))
def test_plain_4_bit_formats_are_idempotent(name, row, dtype):
    input = torch.tensor([row], dtype=dtype)
    packed = quantize(input, name)
    _, scales = unpack(packed, name, len(row))
    # a product with a subnormal scale loses bits and may then be another code
    assume(bool(((scales >= 2.0**-126) | (scales == 0) | scales.isnan()).all()))
    assert torch.equal(quantize(dequantize(packed, name, len(row), torch.float32), name), packed)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), K=st.integers(1, 300), exponent=st.integers(-90, 90))
def test_a_power_of_two_moves_scales_and_leaves_codes(name, seed, K, exponent):
    input = gaussian(2, K, seed=seed).clamp(-8, 8)
    assume(float(input.abs().amin(dim=1).min()) > 2.0**-30)  # with it, no step of -dq gets near the subnormals
    codes, scales = unpack(quantize(input, name), name, K)
    moved_codes, moved_scales = unpack(quantize(input * 2.0**exponent, name), name, K)
    assert torch.equal(codes, moved_codes)
    assert torch.equal(scales * 2.0**exponent, moved_scales)


@pytest.mark.parametrize("name", SMALLEST_FORMATS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), N=st.integers(0, 9), K=st.integers(1, 100), cut=st.integers(0, 9))
def test_shard_then_quantize_is_quantize_then_shard(name, seed, N, K, cut):
    input = gaussian(N, K, seed=seed)
    if N:
        input[N // 2, K // 2] = math.nan  # must stay in its row
    whole = quantize(input, name)
    assert whole.shape == (N, Format.parse(name).row_bytes(K))
    assert torch.equal(torch.cat((quantize(input[:cut], name), quantize(input[cut:], name))), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_and_strides_do_not_matter(name):
    input = gaussian(3, 4, 65)
    packed = quantize(input, name)
    assert packed.shape == (3, 4, Format.parse(name).row_bytes(65))
    assert torch.equal(packed.flatten(0, 1), quantize(input.flatten(0, 1), name))
    assert torch.equal(quantize(input.transpose(0, 1), name), packed.transpose(0, 1))
    values = dequantize(packed, name, 65, torch.float32)
    assert torch.equal(dequantize(packed.transpose(0, 1), name, 65, torch.float32), values.transpose(0, 1))
    _, scales = unpack(packed, name, 65)
    if not name.endswith("-dq"):
        assert torch.equal(quantize_with_scales(input, scales, name), packed)


@pytest.mark.parametrize("K", [1, 63, 65, 100, 576, 4304])
@pytest.mark.parametrize("name", FORMATS)
def test_error_is_within_half_a_gap(name, K):
    format = Format.parse(name)
    input = gaussian(5, K, seed=K)
    packed = quantize(input, name)
    error = (dequantize(packed, name, K, torch.float32).double() - input.double()).abs()
    block_size = format.block_size or K
    absmax = torch.stack([part.abs().amax(dim=1) for part in input.double().split(block_size, dim=1)], dim=1)
    absmax = absmax.repeat_interleave(block_size, dim=1)[:, :K]
    # half of the widest gap: nf4 -1..-0.696, fp4 2/3..1, int8 1/127, fp8 2**-4 of the element or half a subnormal
    half = {"nf4": 0.152, "fp4": 1 / 6, "int8": 0.5 / 127, "fp8": 0.0}[format.codebook]
    bound = absmax * half + (torch.maximum(input.double().abs() / 16, absmax / 448 * 2.0**-10) if name == "fp8" else 0)
    if format.scales == "dq":  # a scale is off by half a step, at most (largest - smallest) / 510
        bound = bound + (absmax.amax(dim=1, keepdim=True) - absmax.amin(dim=1, keepdim=True)) / 510
    assert bool((error <= bound * (1 + 1e-5)).all())
    assert bool((error.amax() > bound.amax() / 100) | (K == 1))  # and the bound says something


def test_given_scales_saturate_and_zero_scales_erase():
    input = torch.tensor([[1000.0, -1000.0, 0.5]])
    for name in ("nf4", "fp4", "int8", "fp8"):
        values = dequantize(quantize_with_scales(input, torch.ones(1, 1), name), name, 3, torch.float32)
        assert values[0, :2].tolist() == [1.0, -1.0], name
        for zero in (0.0, -0.0):
            packed = quantize_with_scales(input, torch.tensor([[zero]]), name)
            assert torch.equal(packed, quantize(torch.zeros(1, 3), name)), name
    # codes are normalized by the given scale, not by the decoded one
    scales = torch.tensor([[1.0, 0.9971, 0.5]])
    input = gaussian(1, 96, seed=3)
    codes, decoded = unpack(quantize_with_scales(input, scales, "nf4-dq:32"), "nf4-dq:32", 96)
    plain, _ = unpack(quantize_with_scales(input, scales, "nf4:32"), "nf4:32", 96)
    assert torch.equal(codes, plain)
    assert decoded[0, 1] != scales[0, 1]
    assert (decoded - scales).abs().max() <= 0.5 / 510 * (1 + 1e-5)
