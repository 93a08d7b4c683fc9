"""QuantizationReport: once, on rank 0, with the bytes in the loggers and a warning about modules in eval mode."""

from __future__ import annotations

import logging
import warnings

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning_models import Module, trainer

import halfbyte
from lightning_plugin import HalfbytePrecision, QuantizationReport


def test_reports_once_and_logs_bytes(tmp_path, caplog) -> None:
    logger, callback, module = CSVLogger(tmp_path), QuantizationReport(), Module("configure")
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*eval mode.*")
        trainer(HalfbytePrecision(), max_steps=2, callbacks=[callback], logger=logger, log_every_n_steps=1).fit(module)
    tables = [record.message for record in caplog.records if "Quantization report" in record.message]
    assert len(tables) == 1
    assert "net.first" in tables[0]
    assert "output embedding (classifier)" in tables[0]
    expected = halfbyte.report(module)
    assert (callback.report.bytes, callback.report.dense_bytes) == (expected.bytes, expected.dense_bytes)
    logged = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "halfbyte/bytes" in logged
    assert str(float(expected.bytes)) in logged


def test_warns_of_modules_in_eval_mode_by_their_topmost_name() -> None:
    module = Module("init")
    module.net.eval()
    with pytest.warns(UserWarning, match=r"modules in eval mode: net\. Their dropout"):
        trainer(HalfbytePrecision(), max_steps=1, callbacks=[QuantizationReport()]).fit(module)
