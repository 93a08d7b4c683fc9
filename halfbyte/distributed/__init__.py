"""Sharding models with packed weights by torch's own FSDP2 and FSDP1: what becomes a unit, and what it costs."""

from halfbyte.distributed.audit import WrapReport, audit
from halfbyte.distributed.fsdp1 import wrap_policy
from halfbyte.distributed.fsdp2 import fully_shard

__all__ = ["WrapReport", "audit", "fully_shard", "wrap_policy"]
