"""What the oracle says to bad input."""

import pytest
import torch

from halfbyte.reference import dequantize, embedding, linear, linear_backward_input, quantize, quantize_with_scales

PACKED = quantize(torch.ones(2, 65), "nf4")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(torch.ones(2, 3).int(), "nf4"), TypeError, "reference.quantize: input must be fp32.*int32"),
        (lambda: quantize(torch.ones(3), "nf4"), ValueError, "reference.quantize: input must have at least 2.*got 1"),
        (lambda: quantize(torch.ones(2, 0), "nf4"), ValueError, "in_features must be at least 1; got 0"),
        (lambda: quantize(torch.ones(2, 3), "nf5"), ValueError, "got 'nf5'"),
        (
            lambda: quantize_with_scales(torch.ones(2, 65), torch.ones(2, 1), "nf4"),
            ValueError,
            r"reference.quantize_with_scales: scales must have shape \(2, 2\); got \(2, 1\)",
        ),
        (
            lambda: quantize_with_scales(torch.ones(2, 65), torch.ones(2, 2).double(), "nf4"),
            TypeError,
            "reference.quantize_with_scales: scales must be fp32; got torch.float64",
        ),
        (
            lambda: dequantize(PACKED, "nf4", 129),
            ValueError,
            "packed must have 80 bytes per row for nf4 with in_features=129; got 48",
        ),
        (lambda: dequantize(PACKED.int(), "nf4", 65), TypeError, "packed must be uint8; got torch.int32"),
        (lambda: dequantize(PACKED, "nf4", 65, torch.float64), TypeError, "dequantize: dtype must be fp32.*float64"),
        (
            lambda: linear(torch.ones(2, 64), PACKED, None, "nf4", 65),
            ValueError,
            "reference.linear: input must have in_features=65 columns; got 64",
        ),
        (lambda: linear(torch.ones(2, 65), PACKED[0], None, "nf4", 65), ValueError, "packed must have 2 dim.*got 1"),
        (
            lambda: linear_backward_input(torch.ones(2, 3), PACKED, "nf4", 65),
            ValueError,
            "grad_output must have 2 columns, one per row of packed; got 3",
        ),
        (lambda: embedding(torch.tensor([0, 2]), PACKED, "nf4", 65), IndexError, r"indices must be in \[0, 2\); got 2"),
        (lambda: embedding(torch.tensor([-1]), PACKED, "nf4", 65), IndexError, r"indices must be in \[0, 2\); got -1"),
        (
            lambda: embedding(torch.ones(1), PACKED, "nf4", 65),
            TypeError,
            "indices must be int32 or int64; got .*float32",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
