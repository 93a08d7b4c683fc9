"""Checkpoints: quantized folders, loading them and dense ones, and those of other libraries, read without them."""

from halfbyte.checkpoint import bitsandbytes
from halfbyte.checkpoint.folder import save_quantized
from halfbyte.checkpoint.load import load_quantized
from halfbyte.checkpoint.stream import quantize_checkpoint

__all__ = ["bitsandbytes", "load_quantized", "quantize_checkpoint", "save_quantized"]
