"""Typed wrappers of the dispatcher ops `torch.ops.halfbyte.*`, one file per op.

A wrapper takes a `Format` where the dispatcher takes ids, raises TypeError for wrong types and dtypes, and carries the
op's fake (shape) kernel, gradient and autocast rule. Values, shapes and sizes are checked in C++, where the raw ops can
also be called directly.
"""

from halfbyte.ops.broadcast import quantize_broadcast_, quantize_scatter_
from halfbyte.ops.dequantize import dequantize, dequantize_list
from halfbyte.ops.embedding import embedding
from halfbyte.ops.error_feedback import error_feedback
from halfbyte.ops.fp8_linear import fp8_linear
from halfbyte.ops.int8_linear import int8_linear
from halfbyte.ops.linear import clear_workspace, linear, linear_backward_input
from halfbyte.ops.lora_linear import lora_linear
from halfbyte.ops.optimizer import adam8bit_step_, adamw8bit_step_, lion8bit_step_, sgd8bit_step_
from halfbyte.ops.quantize import quantize, quantize_, quantize_list

__all__ = [
    "adam8bit_step_",
    "adamw8bit_step_",
    "clear_workspace",
    "dequantize",
    "dequantize_list",
    "embedding",
    "error_feedback",
    "fp8_linear",
    "int8_linear",
    "linear",
    "linear_backward_input",
    "lion8bit_step_",
    "lora_linear",
    "quantize",
    "quantize_",
    "quantize_broadcast_",
    "quantize_list",
    "quantize_scatter_",
    "sgd8bit_step_",
]
