"""The oracle against bitsandbytes."""

import pytest
import torch
from exact import DTYPES, gaussian, midpoints

from halfbyte.formats import FP4_VALUES, Format
from halfbyte.reference import dequantize, quantize, unpack


@pytest.fixture(scope="module")
def bitsandbytes():
    return pytest.importorskip("bitsandbytes.functional")


def bitsandbytes_codes(packed: torch.Tensor) -> torch.Tensor:
    flat = packed.flatten()
    return torch.stack((flat >> 4, flat & 15), dim=1).flatten()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("codebook", ["nf4", "fp4"])
def test_4_bit_is_that_of_bitsandbytes(bitsandbytes, codebook, block_size, dtype):
    """nf4 byte for byte; fp4 in values (it writes -0.0, we don't), except at its fp32-rounded midpoints."""
    N, K = 6, 8192
    input = gaussian(N, K, seed=block_size, dtype=dtype)
    input[1, :block_size] = 0  # an all-zero block
    theirs, state = bitsandbytes.quantize_4bit(input, blocksize=block_size, quant_type=codebook)
    format = Format(codebook, block_size)
    codes, scales = unpack(quantize(input, format), format, K)
    assert torch.equal(scales.flatten(), state.absmax)
    if codebook == "nf4":
        assert torch.equal(quantize(input, format)[:, : K // 2].flatten(), theirs.flatten())
    else:
        values = torch.tensor(FP4_VALUES)
        differ = values[bitsandbytes_codes(theirs).int()] != values[codes.flatten().int()]
        v = (input.float().view(-1, block_size) * (1 / scales.view(-1, 1))).flatten().abs()
        middle = torch.tensor([float(midpoint) for midpoint in midpoints(sorted(FP4_VALUES[:8]))])  # rounds to fp32
        assert not bool((differ & ~torch.isin(v, middle)).any())
        assert int(differ.sum()) < N * K / 1000
    for to in DTYPES if block_size < 2048 else ():  # beyond that it takes a torch.compile of seconds
        state.dtype = to
        assert torch.equal(
            bitsandbytes.dequantize_4bit(quantize(input, format)[:, : K // 2].reshape(-1, 1), state),
            dequantize(quantize(input, format), format, K, to),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_that_of_bitsandbytes(bitsandbytes, dtype):
    input = gaussian(32, 1000, seed=5, dtype=dtype)
    input[:, ::7] = 0
    theirs, absmax, _ = bitsandbytes.int8_vectorwise_quant(input)
    codes, scales = unpack(quantize(input, "int8"), "int8", 1000)
    assert torch.equal(codes.view(torch.int8), theirs)
    assert torch.equal(scales.flatten(), absmax)
