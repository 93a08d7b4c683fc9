"""What a model costs in bytes."""

from halfbyte.memory.report import Report, ReportRow, report, verify

__all__ = ["Report", "ReportRow", "report", "verify"]
