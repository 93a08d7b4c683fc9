"""Run by test_replicate.py on every rank: models that one rank makes arrive on the other, and failures on both."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hub_models import CONFIGS, saved
from peft import LoraConfig
from ranks import gloo_group
from transformers import AutoModelForCausalLM

import halfbyte
from halfbyte.distributed import replicate
from halfbyte.nn import QuantLinear
from lightning_plugin import FabricHalfbytePrecision
from peft_bridge import load_model


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def same(model: Any) -> None:
    """Equal bytes, outputs, gradients, trainables and random numbers on every rank."""
    tokens = torch.arange(8)[None]
    logits = model(input_ids=tokens).logits
    logits.float().pow(2).sum().backward()
    gradients = [float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None]
    mine = (digest(model), float(logits.detach().double().sum()), gradients, float(torch.rand(1)))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    assert all(one == found[0] for one in found), found
    assert gradients
    assert not any(p.is_meta for p in model.parameters())


def main(rank: int, folder: Path) -> None:
    for name in CONFIGS:
        path = folder / name
        if rank == 0:
            saved(name, path)
        dist.barrier()
        torch.manual_seed(3)
        own = path if rank == 0 else folder / "nowhere"  # rank 1 can't read
        model = load_model(own, "nf4", lora={"r": 4})
        same(model)
        if name == "llama":
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
            plain = AutoModelForCausalLM.from_pretrained(path)
            halfbyte.quantize_model(plain, "nf4")
            expected = {n: m.weight for n, m in plain.named_modules() if isinstance(m, QuantLinear)}
            base = model.get_base_model()
            got = {n: m for n, m in base.named_modules() if isinstance(m, QuantLinear)}
            assert len(got) == len(expected)
            for n, module in got.items():
                assert torch.equal(module.weight, expected[n.removesuffix(".base_layer")]), n

    # In the context of a Lightning plugin a plain from_pretrained reads once; on rank 1 the weights are gone.
    path = folder / f"llama-{rank}"
    if rank == 0:
        for other in ("llama-0", "llama-1"):
            saved("llama", folder / other)
        (folder / "llama-1" / "model.safetensors").unlink()
    dist.barrier()
    torch.manual_seed(3)
    with FabricHalfbytePrecision("nf4").module_init_context():
        model = AutoModelForCausalLM.from_pretrained(path)
        outer = load_model(path, "int8", lora=LoraConfig(r=4, target_modules="all-linear"))  # serves the ranks itself
    same(outer)
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 14

    transposed = replicate(lambda: torch.arange(6.0).view(2, 3).t())
    assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t())

    def fail() -> None:
        time.sleep(3)  # longer than the ranks wait without a word
        raise ValueError("no such luck")

    with pytest.raises(ValueError if rank == 0 else RuntimeError, match="no such luck"):
        replicate(fail)

    def hooked() -> torch.nn.Module:
        layer = torch.nn.Linear(2, 2)
        layer.register_forward_hook(lambda *_: None)
        return layer

    with pytest.raises(NotImplementedError if rank == 0 else RuntimeError, match="can't be handed to the other ranks"):
        replicate(hooked)
    print("DONE")


if __name__ == "__main__":
    with gloo_group() as rank:
        main(rank, Path(sys.argv[1]))
