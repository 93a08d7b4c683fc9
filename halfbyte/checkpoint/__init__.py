"""Checkpoints of other libraries, read and written without them."""

from halfbyte.checkpoint import bitsandbytes

__all__ = ["bitsandbytes"]
