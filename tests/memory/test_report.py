"""report and verify: bytes, reasons, and every kind of unsound model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.nn import QuantLinear


def model() -> nn.Module:
    return nn.ModuleDict({"embed": nn.Embedding(100, 64), "fc": nn.Linear(64, 256), "score": nn.Linear(256, 4)})


def test_bytes_are_those_of_the_tensors() -> None:
    m = model()
    dense = sum(p.numel() * p.element_size() for p in m.parameters())
    report = halfbyte.quantize_model(m)
    assert report.dense_bytes == dense
    assert report.bytes == sum(p.numel() * p.element_size() for p in m.parameters())
    assert report.quantized == ("fc",)
    assert report.skipped == ("score",)
    row = next(row for row in report.rows if row.name == "fc")
    assert (row.format, row.bytes, row.dense_bytes) == ("nf4", 256 * 48 + 1024, 256 * 64 * 4 + 1024)


def test_tied_tensors_count_once() -> None:
    m = model()
    m["head"] = nn.Linear(64, 100, bias=False)
    m["head"].weight = m["embed"].weight
    assert halfbyte.report(m).bytes == sum(p.numel() * 4 for p in m.parameters())


def test_table_groups_numbered_layers() -> None:
    m = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    lines = str(halfbyte.quantize_model(m)).splitlines()
    assert lines[0].split() == ["module", "count", "format", "MB", "dense", "MB", "error", "why", "dense"]
    assert [line.split()[:3] for line in lines[2:-2]] == [["*", "3", "nf4"]]
    assert lines[-1].startswith("total")
    assert lines[-1].endswith("x smaller")


def test_verify_accepts_a_sound_model_and_measures_errors() -> None:
    m = model()
    reference = {k: v.clone() for k, v in m.state_dict().items()}
    halfbyte.quantize_model(m)
    (row,) = [row for row in halfbyte.verify(m, reference).rows if row.format]
    weight = reference["fc.weight"]
    expected = float((m["fc"].dequantize(torch.float32) - weight).norm() / weight.norm())
    assert row.error == pytest.approx(expected, rel=1e-6)
    assert 0.05 < row.error < 0.15  # nf4 on a uniform distribution


def test_verify_names_every_unsound_module() -> None:
    m = nn.ModuleDict({name: QuantLinear(64, 4) for name in ("nan", "size", "ok")})
    m["frozen"] = nn.Linear(4, 4)
    weight = torch.randn(4, 64)
    weight[2, 5] = float("nan")
    m["nan"].quantize_(weight)
    m["size"].weight = nn.Parameter(torch.zeros(4, 64, dtype=torch.uint8), requires_grad=False)
    m["frozen"].requires_grad_(False)
    with pytest.raises(halfbyte.QuantizationError, match="1 of 4 rows have scales that are NaN or Inf") as raised:
        halfbyte.verify(m)
    assert set(raised.value.names) == {"nan", "size", "frozen"}
    assert "asked for but dense" in str(raised.value)


def test_verify_of_meta_rows_and_of_nothing() -> None:
    with pytest.raises(halfbyte.QuantizationError, match="on meta: nothing was loaded"):
        halfbyte.verify(QuantLinear(64, 4, device="meta"))
    with pytest.raises(halfbyte.QuantizationError, match="verify: nothing was quantized"):
        halfbyte.verify(model())
    with pytest.raises(halfbyte.QuantizationError, match="reference has no weight for 0"):
        halfbyte.verify(nn.Sequential(QuantLinear(64, 4)), {})


def test_verify_lists_the_worst_layer_first() -> None:
    torch.manual_seed(0)
    m = nn.ModuleDict({name: nn.Linear(64, 32, bias=False) for name in ("even", "spiky", "normal")})
    with torch.no_grad():
        m["even"].weight.uniform_(-1, 1)
        m["normal"].weight.normal_()
        m["spiky"].weight.normal_()[:, 0] = 30.0  # one value a block that pushes the others towards zero
    reference = {name: value.clone() for name, value in m.state_dict().items()}
    halfbyte.quantize_model(m, skip=())
    rows = halfbyte.verify(m, reference).rows
    errors = [row.error for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert {row.name for row in rows} == set(m)
    assert len(set(errors)) == 3
