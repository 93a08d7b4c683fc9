"""Run by test_offload.py on two ranks: CPU offload changes nothing but where things are.

On a CPU the device that computes is the host. FSDP1's own code for offloading runs all the same (shards and gradients in
host buffers, the optimizer on them), except for what only accelerators have: pinned memory, streams to wait for, and
gradients that are elsewhere than the computation: on one device FSDP1 adds each to the last step's (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import gloo_group
from sharded_models import Model, packed_layers, train
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapped

from halfbyte.distributed import audit, fully_shard, wrap_policy
from halfbyte.optim import AdamW8bit, annotate_fsdp1

CPU = torch.device("cpu")


def fsdp1(model: nn.Module, offload: bool) -> Any:
    policy = wrap_policy(model)
    whole = Wrapped(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=CPU, cpu_offload=CPUOffload(offload)
    )
    annotate_fsdp1(whole)
    return whole


def fsdp2(model: nn.Module, offload: bool) -> Any:
    return fully_shard(model, checkpointing=False, offload_policy=CPUOffloadPolicy() if offload else None)


def trained(shard: Any, optimizer_class: Any, offload: bool) -> tuple[list[float], dict[str, Tensor]]:
    rank = dist.get_rank()
    model = shard(Model(), offload)
    group = {"params": [p for p in model.parameters() if p.requires_grad]}
    if optimizer_class is AdamW8bit:
        group["quantize_state"] = shard is fsdp1 or None  # these weights are too small for the rule
    optimizer = optimizer_class([group], lr=1e-2)
    if offload and shard is fsdp1:
        units = [unit._handle.flat_param for unit in Wrapped.fsdp_modules(model) if unit._handle is not None]
        optimizer.register_step_post_hook(lambda *_: [flat._cpu_grad.zero_() for flat in units] and None)

    def clip() -> None:
        if shard is fsdp1:
            model.clip_grad_norm_(0.05)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    losses = train(model, optimizer, 3, range(rank, rank + 1), clip)
    assert all(p.device == CPU for p in model.parameters())
    assert all(value.device == CPU for state in optimizer.state.values() for value in state.values())
    if shard is fsdp1:
        handles = [unit._handle for unit in Wrapped.fsdp_modules(model)]
        assert all(h._offload_params == offload for h in handles if h is not None)
        with Wrapped.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False)):
            state = {name: value.clone() for name, value in model.state_dict().items()}
    else:
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return losses, state


def what_the_audit_says_of_another_device() -> None:
    """As if the unit computed on a GPU: its shards and their gradients are no longer part of the peak there."""
    model = fsdp1(Model(), True)
    before = audit(model)
    assert before.host_bytes == 0
    for unit in Wrapped.fsdp_modules(model):
        if unit._handle is not None:
            unit._handle.device = torch.device("cuda", 0)
    after = audit(model)
    assert after.host_bytes == after.local_bytes == before.local_bytes
    assert after.expected_peak < before.expected_peak - before.local_bytes
    assert "in host memory: " in str(after)


def main() -> None:
    torch.Tensor.pin_memory = lambda self, device=None: self.clone()  # type: ignore[method-assign]
    torch.cpu.Stream.synchronize = lambda self: None
    rows = [layer.packed.clone() for layer in packed_layers(Model())]
    for shard in (fsdp1, fsdp2):
        for optimizer_class in (torch.optim.AdamW, AdamW8bit):
            losses, state = trained(shard, optimizer_class, False)
            other_losses, other_state = trained(shard, optimizer_class, True)
            assert losses == other_losses, (shard, optimizer_class, losses, other_losses)
            assert state.keys() == other_state.keys()
            for name, value in state.items():
                assert value.dtype == other_state[name].dtype and torch.equal(value, other_state[name]), name
            packed = [value for value in other_state.values() if value.dtype == torch.uint8]
            assert all(torch.equal(ours, before) for ours, before in zip(packed, rows, strict=True))
    what_the_audit_says_of_another_device()
    print("DONE", flush=True)


if __name__ == "__main__":
    with gloo_group():
        main()
