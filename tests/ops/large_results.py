"""For each op with a large result: prints whether the system was asked for pages of 2 MiB under its input and its result.

A program of its own, for memory that the C library keeps when it is freed keeps what was asked for it: run it with
`MALLOC_MMAP_THRESHOLD_` set, which lets no tensor of a MiB be made from such memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from halfbyte import ops

_TOKENS, _COLUMNS = 1 << 17, 96  # results of 48 MiB, packed ones too
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, packed: ops.linear(x, packed, None, "nf4", _COLUMNS),
    "linear_backward_input": lambda x, packed: ops.linear_backward_input(x, packed, "nf4", _COLUMNS),
    "lora_linear": lambda x, packed: ops.lora_linear(x, packed, None, x[:2], x[:_COLUMNS, :2], 1.0, "nf4", _COLUMNS),
    "int8_linear": lambda x, _: ops.int8_linear(x, ops.quantize(x[:_COLUMNS], "int8"), None, _COLUMNS),
    "fp8_linear": lambda x, _: ops.fp8_linear(x, ops.quantize(x[:_COLUMNS], "fp8"), None, _COLUMNS),
    "dequantize": lambda x, packed: ops.dequantize(packed.repeat(len(x) // len(packed), 1), "nf4", _COLUMNS, x.dtype),
    "embedding": lambda x, packed: ops.embedding(torch.arange(len(x)) % 2, packed, "nf4", _COLUMNS, x.dtype),
    "quantize": lambda x, _: ops.quantize(x.expand(4, *x.shape).reshape(-1, _COLUMNS), "int8"),
}


def _asked(tensor: Tensor) -> bool:
    """Whether the mapping that holds the middle of a tensor has the flag `hg` in `/proc/self/smaps`."""
    address = tensor.data_ptr() + tensor.numel() * tensor.element_size() // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"{address:#x} is in no mapping")


def _input_and_result(op: str) -> tuple[bool, bool]:
    x = torch.linspace(-1, 1, _TOKENS * _COLUMNS).view(_TOKENS, _COLUMNS)
    packed = ops.quantize(x[:_COLUMNS], "nf4")
    result = OPS[op](x, packed)
    return _asked(x), _asked(result)


if __name__ == "__main__":
    print(json.dumps({op: _input_and_result(op) for op in OPS}))
