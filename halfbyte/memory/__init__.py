"""What a model costs in bytes (`report`), and what training it will (`plan`, which sits above `halfbyte.nn`: import it there)."""

from halfbyte.memory.report import Report, ReportRow, report, verify

__all__ = ["Report", "ReportRow", "report", "verify"]
