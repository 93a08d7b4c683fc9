"""Format: names, codebooks and row layout, against docs/formats.md and bitsandbytes."""

import copy
import doctest
import math
import pickle
import re
import struct
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfbyte.errors
import halfbyte.formats
from halfbyte.errors import QuantizationError
from halfbyte.formats import (
    BLOCK_SIZES,
    FORMATS,
    FP4_CODES,
    FP4_MAGNITUDES,
    FP4_THRESHOLDS,
    FP4_VALUES,
    NF4_THRESHOLDS,
    NF4_VALUES,
    Format,
)

SPECIFICATION = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()
BLOCKWISE, ROW = FORMATS[:4], FORMATS[4:]
ALL = [f"{name}:{size}" for name in BLOCKWISE for size in BLOCK_SIZES] + list(ROW)


def table(header: str) -> list[list[str]]:
    """Cells of the table of the specification whose header line starts so."""
    lines = iter(SPECIFICATION.splitlines())
    assert any(line.startswith(header) for line in lines), header
    next(lines)  # the rule below the header
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def bits(value: float) -> str:
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


@pytest.mark.parametrize("module", [halfbyte.formats, halfbyte.errors], ids=lambda module: module.__name__)
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# --- names ---


@pytest.mark.parametrize("text", ALL)
def test_parse_and_str_round_trip(text):
    format = Format.parse(text)
    assert str(format) == text.removesuffix(":64")
    assert Format.parse(str(format)) == format
    assert Format.parse(format) is format
    assert Format.from_id(format.id, format.block_size) == format
    assert eval(repr(format)) == format
    assert hash(Format.parse(text)) == hash(format)
    assert pickle.loads(pickle.dumps(format)) == copy.deepcopy(format) == format


def test_every_spelling_is_another_format():
    assert len({Format.parse(text) for text in ALL}) == len(ALL) == 34


@pytest.mark.parametrize(
    ("text", "codebook", "block_size", "scales", "width"),
    [
        ("nf4", "nf4", 64, "fp32", 4),
        ("fp4", "fp4", 64, "fp32", 4),
        ("nf4-dq", "nf4", 64, "dq", 4),
        ("fp4-dq:4096", "fp4", 4096, "dq", 4),
        ("int8", "int8", 0, "fp32", 8),
        ("fp8", "fp8", 0, "fp32", 8),
    ],
)
def test_parse(text, codebook, block_size, scales, width):
    format = Format.parse(text)
    assert (format.codebook, format.block_size, format.scales, format.bits) == (codebook, block_size, scales, width)


def test_ids_are_the_ones_of_the_operator_schemas():
    assert [Format.parse(name).id for name in FORMATS] == [0, 1, 2, 3, 4, 5]
    assert FORMATS == ("nf4", "fp4", "nf4-dq", "fp4-dq", "int8", "fp8")
    assert [(row[0].strip("`"), int(row[3])) for row in table("| name | code |")] == list(
        zip(FORMATS, range(6), strict=True)
    )


def test_formats_are_every_combination_of_codebook_and_scale_kind():
    assert set(FORMATS) == set(halfbyte.formats._NAMES)


def test_immutable():
    with pytest.raises(FrozenInstanceError):
        Format.parse("nf4").block_size = 32  # type: ignore[misc]


NAMES = "nf4, fp4, nf4-dq, fp4-dq, int8, fp8"
SIZES = "32, 64, 128, 256, 512, 1024, 2048, 4096"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Format.parse("nf5"),
            ValueError,
            f"Format.parse: format must be one of {NAMES}, with an optional block size as in 'nf4:32'; got 'nf5'",
        ),
        (lambda: Format.parse(""), ValueError, f"one of {NAMES}.*got ''"),
        (lambda: Format.parse("NF4"), ValueError, f"one of {NAMES}.*got 'NF4'"),
        (lambda: Format.parse("nf4 "), ValueError, "got 'nf4 '"),
        (lambda: Format.parse("int8-dq"), ValueError, "got 'int8-dq'"),
        (lambda: Format.parse("nf4:48"), ValueError, f"Format: nf4 takes a block size of {SIZES} elements; got 48"),
        (lambda: Format.parse("fp4-dq:16"), ValueError, f"Format: fp4-dq takes a block size of {SIZES} .*got 16"),
        (
            lambda: Format.parse("int8:64"),
            ValueError,
            r"Format: int8 is a row format \(one scale per row\) and takes no block size; got 64",
        ),
        (lambda: Format.parse("fp8:0"), ValueError, "plain number; got 'fp8:0'"),
        (lambda: Format.parse("nf4:"), ValueError, "plain number; got 'nf4:'"),
        (lambda: Format.parse("nf4:064"), ValueError, "plain number; got 'nf4:064'"),
        (lambda: Format.parse("nf4:-64"), ValueError, "plain number; got 'nf4:-64'"),
        (lambda: Format.parse("nf4:64:64"), ValueError, "plain number"),
        (lambda: Format.parse("nf4:٦٤"), ValueError, "plain number"),  # Arabic-Indic digits: int() would take them
        (lambda: Format.parse(4), TypeError, "Format.parse: format must be a Format or a string such as 'nf4'; got 4"),
        (lambda: Format.parse(None), TypeError, "got None"),
        (lambda: Format("nf3", 64), ValueError, "Format: codebook must be one of nf4, fp4, int8, fp8; got 'nf3'"),
        (lambda: Format("fp8", 0, "dq"), ValueError, "Format: scales of fp8 must be one of fp32; got 'dq'"),
        (lambda: Format("nf4", 64, "bf16"), ValueError, "Format: scales of nf4 must be one of fp32, dq; got 'bf16'"),
        (lambda: Format("nf4", 0), ValueError, "Format: nf4 takes a block size .*got 0"),
        (lambda: Format("nf4", 64.0), TypeError, "Format: block_size must be an int; got 64.0"),
        (lambda: Format("int8", False), TypeError, "got False"),
        (lambda: Format.from_id(6, 64), ValueError, "Format.from_id: id must be one of 0 nf4, 1 fp4, .*5 fp8; got 6"),
        (lambda: Format.from_id(-1, 0), ValueError, "got -1"),
        (lambda: Format.from_id(4, 64), ValueError, "int8 is a row format .*got 64"),
        (lambda: Format.parse("nf4").row_bytes(0), ValueError, "Format: in_features must be at least 1; got 0"),
        (lambda: Format.parse("int8").row_bytes(-3), ValueError, "Format: in_features must be at least 1; got -3"),
        (lambda: Format.parse("int8").num_blocks(0), ValueError, "Format: in_features must be at least 1; got 0"),
    ],
)
def test_errors_say_what_exists(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- layout ---


@pytest.mark.parametrize("row", table("| format | K |"), ids=lambda row: f"{row[0]}-{row[1]}")
def test_layout_table_of_the_specification(row):
    name, K, code_bytes, num_blocks, scales_offset, row_scales_offset, row_bytes = row
    twin = {"nf4": "fp4", "nf4-dq": "fp4-dq", "int8": "fp8"}[name]
    for format in (Format.parse(name), Format.parse(twin)):
        assert format.code_bytes(int(K)) == int(code_bytes)
        assert format.num_blocks(int(K)) == int(num_blocks)
        assert format.scales_offset(int(K)) == int(scales_offset)
        assert format.row_bytes(int(K)) == int(row_bytes)
        if row_scales_offset != "-":
            assert format.row_scales_offset(int(K)) == int(row_scales_offset)


@given(st.sampled_from(ALL).map(Format.parse), st.integers(1, 20_000))
def test_parts_of_a_row_follow_each_other_without_waste(format, K):
    block_size = format.block_size or K
    assert format.code_bytes(K) == math.ceil(K * format.bits / 8)
    assert format.num_blocks(K) == math.ceil(K / block_size)
    if format.scales == "dq":
        assert format.scales_offset(K) == format.code_bytes(K)
        gap = format.row_scales_offset(K) - (format.scales_offset(K) + format.num_blocks(K))
        assert format.row_scales_offset(K) % 4 == 0
        assert 0 <= gap < 4
        end = format.row_scales_offset(K) + 8
    else:
        gap = format.scales_offset(K) - format.code_bytes(K)
        assert format.scales_offset(K) % 4 == 0
        assert 0 <= gap < 4
        end = format.scales_offset(K) + 4 * format.num_blocks(K)
    assert format.row_bytes(K) % 16 == 0
    assert 0 <= format.row_bytes(K) - end < 16
    assert format.bits_per_weight(K) == format.row_bytes(K) * 8 / K


@pytest.mark.parametrize(
    ("text", "K", "expected"),
    [
        ("nf4", 4096, 4.50),
        ("fp4", 4096, 4.50),
        ("nf4-dq", 4096, 4.16),
        ("int8", 4096, 8.03),
        ("fp8", 4096, 8.03),
        ("nf4", 576, 4.67),
        ("nf4-dq", 576, 4.44),
    ],
)
def test_bits_per_weight(text, K, expected):
    assert round(Format.parse(text).bits_per_weight(K), 2) == expected


# --- codebooks ---


def test_nf4_table_of_the_specification():
    rows = table("| code | value |")
    assert [int(row[0]) for row in rows] == list(range(16))
    assert tuple(float(row[1]) for row in rows) == NF4_VALUES
    assert [row[2] for row in rows] == [bits(value) for value in NF4_VALUES]
    assert [row[3] for row in rows] == [bits(threshold) for threshold in NF4_THRESHOLDS] + ["-"]


def test_fp4_table_of_the_specification():
    rows = table("| magnitude code |")
    assert tuple(int(row[0]) for row in rows) == FP4_CODES
    assert [row[2] for row in rows] == [bits(FP4_MAGNITUDES[code]) for code in FP4_CODES]
    assert [row[3] for row in rows] == [bits(threshold) for threshold in FP4_THRESHOLDS] + ["-"]
    for row in rows:
        assert bits(float(row[1].removesuffix("/12")) / 12) == row[2]


def test_reader_of_the_specification_has_the_same_codebooks():
    nf4, fp4 = (
        re.search(rf"^{name} = \[(.*?)\]", SPECIFICATION, re.MULTILINE | re.DOTALL)[1] for name in ("NF4", "FP4")
    )
    assert re.findall("0x[0-9A-F]{8}", nf4) == [bits(value) for value in NF4_VALUES]
    assert re.findall("0x[0-9A-F]{8}", fp4) == [bits(value) for value in FP4_MAGNITUDES]


def test_codebooks_ascend_and_thresholds_lie_between():
    magnitudes = [FP4_MAGNITUDES[code] for code in FP4_CODES]
    for values, thresholds in ((NF4_VALUES, NF4_THRESHOLDS), (magnitudes, FP4_THRESHOLDS)):
        assert len(thresholds) == len(values) - 1
        for low, threshold, high in zip(values[:-1], thresholds, values[1:], strict=True):
            assert low < threshold < high


def test_fp4_values_carry_the_sign_in_bit_3():
    assert FP4_VALUES[:8] == FP4_MAGNITUDES
    assert [math.copysign(1, value) for value in FP4_VALUES] == [1.0] * 8 + [-1.0] * 8
    assert [-value for value in FP4_VALUES[8:]] == list(FP4_MAGNITUDES)


@pytest.mark.parametrize(("name", "values"), [("nf4", NF4_VALUES), ("fp4", FP4_VALUES)])
def test_codebooks_are_those_of_bitsandbytes(name, values):
    functional = pytest.importorskip("bitsandbytes.functional")
    assert functional.get_4bit_type(name, device="cpu").tolist() == list(values)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_zero_code_decodes_to_zero(name):
    values = {"nf4": NF4_VALUES, "fp4": FP4_VALUES}[name]
    assert bits(values[Format.parse(name).zero_code]) == "0x00000000"


# --- QuantizationError ---


def test_quantization_error_carries_names():
    error = QuantizationError("2 layers stayed dense", names=["a", "b"])
    assert isinstance(error, ValueError)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.names) == (str(error), error.names) == ("2 layers stayed dense", ("a", "b"))
    assert QuantizationError("nothing to name").names == ()
