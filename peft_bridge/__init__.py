"""Hugging Face bridge: transformers loads, saves and trains packed models, and PEFT puts adapters on them.

Importing it registers the quantizer of `HalfbyteConfig` with transformers, makes `init_quantized` contexts quantize what
`from_pretrained` reads, and, as soon as PEFT itself is imported, makes `LoraModel` use `HalfbyteLoraLinear`. PEFT is not
imported from here: it would add 1.3 s to the 3.5 s that transformers' quantizers take.
"""

from typing import TYPE_CHECKING, Any

from halfbyte.nn.hosts import import_after
from halfbyte.nn.settings import register_host
from peft_bridge.bitsandbytes import export_bitsandbytes
from peft_bridge.config import HalfbyteConfig
from peft_bridge.context import quantize_from_pretrained
from peft_bridge.loading import load_model
from peft_bridge.prepare import prepare_model
from peft_bridge.quantizer import HalfbyteQuantizer

if TYPE_CHECKING:
    from peft_bridge.lora import HalfbyteLoraLinear

__all__ = [
    "HalfbyteConfig",
    "HalfbyteLoraLinear",
    "HalfbyteQuantizer",
    "export_bitsandbytes",
    "load_model",
    "prepare_model",
]

register_host(quantize_from_pretrained)
import_after("peft.peft_model", "peft_bridge.lora")
import_after("accelerate.accelerator", "peft_bridge.fsdp1")


def __getattr__(name: str) -> Any:
    if name == "HalfbyteLoraLinear":
        from peft_bridge.lora import HalfbyteLoraLinear

        return HalfbyteLoraLinear
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
