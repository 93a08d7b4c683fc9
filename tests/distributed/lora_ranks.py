"""Run by test_lora.py on two ranks: PEFT's LoRA on a transformers Llama under DDP, FSDP1 and FSDP2, block by block."""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from hub_models import CONFIGS
from peft import LoraConfig, get_peft_model
from ranks import gloo_group
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import halfbyte
import peft_bridge  # noqa: F401  the adapters are ours
from halfbyte.distributed import fully_shard, wrap_policy
from halfbyte.distributed.grouping import blocks
from halfbyte.nn import QuantLinear
from halfbyte.nn import linear as quant_linear

BOTH = (4, 9)  # of both ranks: sequences and tokens


def adapted(checkpointing: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.config.use_cache = False
    halfbyte.quantize_model(model, "nf4")
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
    return model.train()


def wrapped(model: Any, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp2":
        return fully_shard(model, checkpointing=False)
    policy = wrap_policy(model)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def step(model: Any, tokens: Tensor, watched: Any) -> tuple[list[Tensor], float]:
    """Outputs of every block in one forward, and the global norm of the gradients."""
    outputs: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for block in blocks(watched).values()
    ]
    model(input_ids=tokens, labels=tokens).loss.backward()
    outputs = [output.detach().clone() for output in outputs[: len(hooks)]]  # what follows is recomputed
    for hook in hooks:
        hook.remove()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if isinstance(model, FullyShardedDataParallel):
        norm = model.clip_grad_norm_(1e9)
    else:
        norm = nn.utils.get_total_norm(grads)
    return outputs, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def released(model: Any) -> bool:
    """Whether no packed unit of FSDP1 is gathered."""
    units = [m for m in FullyShardedDataParallel.fsdp_modules(model) if isinstance(m.module, QuantLinear)]
    assert len(units) == 14
    return all(u._handle.flat_param._full_param_padded.untyped_storage().size() == 0 for u in units)


def main() -> None:
    rank = dist.get_rank()
    tokens = torch.randint(0, 100, BOTH, generator=torch.Generator().manual_seed(1))
    share = slice(rank * BOTH[0] // 2, (rank + 1) * BOTH[0] // 2)
    fused: list[int] = []
    original = quant_linear.lora_linear_by_id
    quant_linear.lora_linear_by_id = lambda *args: fused.append(1) or original(*args)  # type: ignore[assignment]
    for checkpointing in ("", "reentrant", "not"):
        single = adapted(checkpointing)
        expected, norm = step(single, tokens, single)
        calls = len(fused)
        assert calls == 14 * (2 if checkpointing else 1), calls
        for how in ("ddp", "fsdp1", "fsdp2"):
            model = adapted(checkpointing)
            whole = wrapped(model, how)
            fused.clear()
            outputs, found = step(whole, tokens[share], model)
            assert len(fused) == calls, (how, checkpointing, len(fused))
            for ours, theirs in zip(outputs, expected, strict=True):
                assert torch.equal(ours, theirs[share]), (how, checkpointing, (ours - theirs[share]).abs().max())
            assert abs(found - norm) < 1e-5 * norm, (how, checkpointing, found, norm)
            assert how != "fsdp1" or released(whole)
            fused.clear()
        fused.clear()
    print("DONE", flush=True)


if __name__ == "__main__":
    with gloo_group():
        main()
