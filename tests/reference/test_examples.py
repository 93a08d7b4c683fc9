"""The oracle against the examples of the specification, and of its own docstrings."""

import doctest

import pytest
import torch
from exact import examples, numbers, row_bytes, same_floats, specification_reader

from halfbyte import reference
from halfbyte.formats import FORMATS, Format
from halfbyte.reference import dequantize, quantize


def test_docstring_examples():
    result = doctest.testmod(reference)
    assert result.attempted > 0
    assert result.failed == 0


def test_specification_has_an_example_of_every_format():
    assert {Format.parse(example["format"]).name for example in examples()} == set(FORMATS)


@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example['format']} {example['input'].strip()}")
def test_examples_of_the_specification(example):
    format = Format.parse(example["format"])
    row, expected = numbers(example["input"]), numbers(example["values"])
    packed = quantize(torch.tensor([row]), format)
    assert row_bytes(packed).hex(" ") == bytes.fromhex(example["packed"]).hex(" ")
    values = dequantize(packed, format, len(row), torch.float32)[0].tolist()
    assert same_floats([float(f"{value:.6g}") for value in values], expected)
    read = specification_reader()(row_bytes(packed), format.name, format.block_size, len(row))
    assert same_floats(read, values)
