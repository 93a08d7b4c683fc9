"""Native low-bit training for PyTorch: a quantized weight is one matrix of bytes."""

from halfbyte.errors import QuantizationError
from halfbyte.formats import Format

__all__ = ["Format", "QuantizationError"]
