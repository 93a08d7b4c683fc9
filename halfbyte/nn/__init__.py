"""Modules with packed weights."""

from halfbyte.nn.embedding import QuantEmbedding
from halfbyte.nn.linear import QuantLinear

__all__ = ["QuantEmbedding", "QuantLinear"]
