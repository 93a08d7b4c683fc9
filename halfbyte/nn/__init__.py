"""Modules with packed weights."""

from halfbyte.nn.embedding import QuantEmbedding
from halfbyte.nn.experts import QuantExperts
from halfbyte.nn.linear import QuantLinear

__all__ = ["QuantEmbedding", "QuantExperts", "QuantLinear"]
