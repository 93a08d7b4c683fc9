"""Native low-bit training for PyTorch: a quantized weight is one matrix of bytes."""

from halfbyte import checkpoint, distributed, memory, nn, ops, optim
from halfbyte.calibration import CalibratedLayer, CalibrationReport, calibrate
from halfbyte.checkpoint import load_quantized, save_quantized
from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.memory.plan import MemoryPlan, plan, plan_formats
from halfbyte.nn.convert import quantize_model
from halfbyte.nn.init import init_quantized
from halfbyte.nn.report import Report, report, verify
from halfbyte.ops.dequantize import dequantize
from halfbyte.ops.linear import clear_workspace
from halfbyte.ops.quantize import quantize

__all__ = [
    "CalibratedLayer",
    "CalibrationReport",
    "Format",
    "MemoryPlan",
    "QuantizationError",
    "Report",
    "calibrate",
    "checkpoint",
    "clear_workspace",
    "dequantize",
    "distributed",
    "init_quantized",
    "load_quantized",
    "memory",
    "nn",
    "ops",
    "optim",
    "plan",
    "plan_formats",
    "quantize",
    "quantize_model",
    "report",
    "save_quantized",
    "verify",
]
