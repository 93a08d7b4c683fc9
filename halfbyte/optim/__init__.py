"""Optimizers whose state is 8 bits per moment and element, with torch.optim's interface."""

from halfbyte.optim.adamw8bit import Adam8bit, AdamW8bit
from halfbyte.optim.base import Optimizer8bit
from halfbyte.optim.lion8bit import Lion8bit
from halfbyte.optim.sgd8bit import SGD8bit
from halfbyte.optim.sharding import annotate_fsdp1

__all__ = ["Adam8bit", "AdamW8bit", "Lion8bit", "Optimizer8bit", "SGD8bit", "annotate_fsdp1"]
