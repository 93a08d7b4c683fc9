"""Sharding models with packed weights by torch's own FSDP2 and FSDP1, and quantizing on one rank for all."""

from halfbyte.distributed.audit import WrapReport, audit
from halfbyte.distributed.broadcast import quantize_broadcast, quantize_scatter
from halfbyte.distributed.fsdp1 import wrap_policy
from halfbyte.distributed.fsdp2 import fully_shard
from halfbyte.distributed.replicate import replicate

__all__ = ["WrapReport", "audit", "fully_shard", "quantize_broadcast", "quantize_scatter", "replicate", "wrap_policy"]
