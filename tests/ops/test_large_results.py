"""Large results on the CPU: the system is asked for pages of 2 MiB under them, where it leaves that to programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte import ops

_TOKENS, _COLUMNS = 1 << 17, 96  # a result of 48 MiB: more than any that glibc takes from memory it has kept (32 MiB)
_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, packed: ops.linear(x, packed, None, "nf4", _COLUMNS),
    "linear_backward_input": lambda x, packed: ops.linear_backward_input(x, packed, "nf4", _COLUMNS),
    "lora_linear": lambda x, packed: ops.lora_linear(x, packed, None, x[:2], x[:_COLUMNS, :2], 1.0, "nf4", _COLUMNS),
    "int8_linear": lambda x, _: ops.int8_linear(x, ops.quantize(x[:_COLUMNS], "int8"), None, _COLUMNS),
    "fp8_linear": lambda x, _: ops.fp8_linear(x, ops.quantize(x[:_COLUMNS], "fp8"), None, _COLUMNS),
    "dequantize": lambda x, packed: ops.dequantize(packed.repeat(len(x) // len(packed), 1), "nf4", _COLUMNS, x.dtype),
    "embedding": lambda x, packed: ops.embedding(torch.arange(len(x)) % 2, packed, "nf4", _COLUMNS, x.dtype),
    "quantize": lambda x, _: ops.quantize(x.expand(4, *x.shape).reshape(-1, _COLUMNS), "int8"),
}


def _flags(address: int) -> list[str]:
    """What `/proc/self/smaps` says of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError(f"{address:#x} is in no mapping")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a system without such pages")
@pytest.mark.parametrize("op", _OPS)
def test_large_results_ask_for_large_pages(op: str) -> None:
    x = torch.linspace(-1, 1, _TOKENS * _COLUMNS).view(_TOKENS, _COLUMNS)
    packed = ops.quantize(x[:_COLUMNS], "nf4")
    result = _OPS[op](x, packed)
    assert result.numel() * result.element_size() >= 32 << 20
    assert "hg" not in _flags(x.data_ptr() + x.numel() * 2)
    assert "hg" in _flags(result.data_ptr() + result.numel() * result.element_size() // 2)
