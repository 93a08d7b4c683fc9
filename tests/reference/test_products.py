"""The oracle's products and embedding against exact arithmetic and autograd."""

from fractions import Fraction

import pytest
import torch
from exact import DTYPES, SMALLEST_FORMATS, gaussian

from halfbyte.formats import FORMATS, Format
from halfbyte.reference import dequantize, embedding, linear, linear_backward_input, quantize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALLEST_FORMATS)
def test_linear_and_its_gradient_in_exact_arithmetic(name, dtype):
    N, K = 5, 65
    packed = quantize(gaussian(N, K), name)
    input, bias = gaussian(2, 3, K, seed=1, dtype=dtype), gaussian(N, seed=2, dtype=dtype)
    grad = gaussian(2, 3, N, seed=3, dtype=dtype)
    for weight_dtype in (None, torch.float32):
        weight = dequantize(packed, name, K, weight_dtype or dtype).double().tolist()
        output = linear(input, packed, bias, name, K, weight_dtype=weight_dtype)
        grad_input = linear_backward_input(grad, packed, name, K, weight_dtype=weight_dtype)
        assert output.dtype == grad_input.dtype == torch.float64
        assert output.shape == (2, 3, N)
        assert grad_input.shape == (2, 3, K)
        for m, row in enumerate(input.double().view(-1, K).tolist()):
            for n in range(N):
                terms = [Fraction(a) * Fraction(b) for a, b in zip(row, weight[n], strict=True)] + [Fraction(bias[n].item())]
                bound = (K + 1) * Fraction(1, 2**53) * sum(map(abs, terms))
                assert abs(Fraction(output.view(-1, N)[m, n].item()) - sum(terms)) <= bound
        for m, row in enumerate(grad.double().view(-1, N).tolist()):
            for k in range(K):
                terms = [Fraction(a) * Fraction(b[k]) for a, b in zip(row, weight, strict=True)]
                bound = N * Fraction(1, 2**53) * sum(map(abs, terms))
                assert abs(Fraction(grad_input.view(-1, K)[m, k].item()) - sum(terms)) <= bound
    without = linear(input, packed, None, name, K)
    assert torch.equal(without + bias.double(), linear(input, packed, bias, name, K))


def test_linear_backward_input_is_the_gradient_of_linear():
    packed = quantize(gaussian(7, 100), "nf4")
    input = gaussian(3, 100, seed=1).requires_grad_()
    grad = gaussian(3, 7, seed=2)
    linear(input, packed, None, "nf4", 100).backward(grad.double())
    torch.testing.assert_close(input.grad, linear_backward_input(grad, packed, "nf4", 100).float())


@pytest.mark.parametrize("name", FORMATS)
def test_empty_sizes(name):
    row = Format.parse(name).row_bytes(65)
    empty = quantize(torch.empty(0, 65), name)
    assert empty.shape == (0, row)
    assert dequantize(empty, name, 65).shape == (0, 65)
    assert linear(torch.ones(2, 65), empty, None, name, 65).shape == (2, 0)
    assert torch.equal(linear_backward_input(torch.empty(2, 0), empty, name, 65), torch.zeros(2, 65).double())
    packed = quantize(torch.ones(3, 65), name)
    assert linear(torch.empty(0, 65), packed, None, name, 65).shape == (0, 3)
    assert linear_backward_input(torch.empty(0, 3), packed, name, 65).shape == (0, 65)
    assert embedding(torch.empty(0, dtype=torch.int64), packed, name, 65).shape == (0, 65)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_embedding_gathers_rows(name, index_dtype):
    packed = quantize(gaussian(9, 65), name)
    dense = dequantize(packed, name, 65, torch.float16)
    indices = torch.tensor([[0, 8, 3], [3, 3, 1]], dtype=index_dtype)
    rows = embedding(indices, packed, name, 65, torch.float16)
    assert rows.dtype == torch.float16
    assert torch.equal(rows, dense[indices.long()])
    assert torch.equal(embedding(indices[1, 2], packed, name, 65, torch.float16), dense[1])
