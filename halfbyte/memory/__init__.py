"""What a model costs in bytes, and what training it will."""

from halfbyte.memory.offload import offload_activations
from halfbyte.memory.plan import MemoryPlan, PlanComparison, PlanRow, parse_bytes, plan, plan_formats
from halfbyte.nn.report import Report, ReportRow, report, verify

__all__ = [
    "MemoryPlan",
    "PlanComparison",
    "PlanRow",
    "Report",
    "ReportRow",
    "offload_activations",
    "parse_bytes",
    "plan",
    "plan_formats",
    "report",
    "verify",
]
