"""What `halfbyte.plan` predicts against what real training steps took: peak bytes of one rank, on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/bench_plan.py [--only TEXT] [--json FILE]

Sharded cases run as gloo processes on this machine. Prints a table and writes JSON; fails if a prediction is off by more
than 10 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from measured_memory import measured_peak
from torch import nn

import halfbyte
from halfbyte.memory.simulate import OPTIMIZERS

LIMIT = 0.10


@dataclass(frozen=True)
class PlanCase:
    """One training set-up.

    Attributes:
        format: None: dense, full fine-tune.
        lora: rank; 0: what the model leaves trainable.
        spread: tokens differ, so that a mixture's routing spreads them over its experts. Plans assume that all tokens take
            the same experts, as equal tokens do.
    """

    model: str
    format: str | None
    lora: int
    optimizer: str
    checkpointing: bool
    batch_size: int
    seq_len: int
    dtype: str = "float32"
    strategy: str = "single"
    world_size: int = 1
    spread: bool = False

    def __str__(self) -> str:
        kind = f"{self.format or 'dense'}{f' LoRA {self.lora}' if self.lora else ''} {self.dtype}"
        ranks = f" {self.strategy} x {self.world_size}" if self.world_size > 1 else ""
        ranks += ", tokens differ" if self.spread else ""
        checkpointing = " ckpt" if self.checkpointing else ""
        return f"{self.model} {kind}, {self.optimizer}, {self.batch_size} x {self.seq_len}{checkpointing}{ranks}"


CASES = [
    PlanCase("llama", "nf4", 8, "adamw8bit", True, 4, 128),
    PlanCase("llama", "nf4", 8, "adamw8bit", False, 2, 128),
    PlanCase("llama", None, 0, "adamw8bit", True, 2, 128),
    PlanCase("llama", None, 0, "adamw8bit", False, 1, 128),
    PlanCase("llama", None, 0, "adamw", True, 1, 128),
    PlanCase("llama", None, 0, "sgd", False, 1, 256),
    PlanCase("llama", "int8", 8, "adamw", True, 2, 256),
    PlanCase("llama", "nf4-dq", 16, "lion8bit", False, 1, 64),
    PlanCase("llama", "nf4", 8, "adamw8bit", True, 2, 128, "bfloat16"),
    PlanCase("llama", None, 0, "adamw8bit", False, 1, 128, "bfloat16"),
    PlanCase("qwen2", "fp8", 8, "sgd8bit", False, 2, 64),
    PlanCase("qwen2", None, 0, "lion8bit", True, 1, 64),
    PlanCase("mixer", "nf4", 0, "adamw8bit", False, 4, 64),
    PlanCase("mixer", None, 0, "adam", False, 2, 64),
    PlanCase("llama", "nf4", 8, "adamw8bit", True, 2, 128, strategy="ddp", world_size=2),
    PlanCase("llama", None, 0, "adamw8bit", True, 1, 128, strategy="ddp", world_size=2),
    PlanCase("llama", "nf4", 8, "adamw8bit", True, 2, 128, strategy="fsdp2", world_size=2),
    PlanCase("llama", None, 0, "adamw8bit", True, 1, 64, strategy="fsdp2", world_size=2),
    PlanCase("llama", None, 0, "adamw", False, 1, 64, strategy="fsdp2", world_size=2),
    PlanCase("llama", "nf4", 8, "adamw8bit", False, 2, 128, strategy="fsdp1", world_size=2),
    PlanCase("llama", None, 0, "adamw8bit", False, 1, 64, strategy="fsdp1", world_size=2),
    PlanCase("llama", "nf4", 8, "adamw8bit", True, 2, 128, strategy="fsdp1", world_size=2),
    PlanCase("llama", None, 0, "adamw8bit", True, 1, 128, strategy="fsdp1", world_size=2),
    PlanCase("mixtral", "nf4", 8, "adamw8bit", True, 2, 128),
    PlanCase("mixtral", "nf4", 8, "adamw8bit", False, 1, 128),
    PlanCase("mixtral", "nf4", 8, "adamw8bit", True, 2, 128, spread=True),
    PlanCase("mixtral", "nf4", 8, "adamw8bit", False, 1, 128, spread=True),
    PlanCase("mixtral", None, 0, "adamw8bit", True, 2, 128),
    PlanCase("qwen3_moe", "nf4", 8, "adamw", True, 4, 128),
    PlanCase("qwen3_moe", "int8", 8, "adamw8bit", False, 2, 128, "bfloat16"),
    PlanCase("qwen3_moe", "nf4", 8, "adamw8bit", True, 4, 128, spread=True),
    PlanCase("qwen3_moe", None, 0, "adamw8bit", False, 2, 64, "bfloat16"),
    PlanCase("mixtral", "nf4", 8, "adamw8bit", True, 2, 128, strategy="ddp", world_size=2),
    PlanCase("mixtral", "nf4", 8, "adamw8bit", True, 2, 128, strategy="fsdp2", world_size=2),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(256), nn.Dropout(0.1)
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.dropout(self.second(nn.functional.gelu(self.first(self.norm(input)))))


class Mixer(nn.Module):
    """A plain torch model without tokens: its loss is the mean square of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            input = block(input)
        return input.square().mean()


def make_model(case: PlanCase) -> nn.Module:
    torch.manual_seed(0)
    if case.model == "mixer":
        model: Any = Mixer()
    else:
        import transformers

        sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        name = {"llama": "Llama", "qwen2": "Qwen2", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}[case.model]
        experts = {
            "mixtral": {"num_local_experts": 4},
            "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 32},
        }.get(case.model, {})
        config = getattr(transformers, f"{name}Config")(**{**sizes, **experts}, **heads, use_cache=False)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to(getattr(torch, case.dtype))
    if case.format:
        halfbyte.quantize_model(model, case.format)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        layers = ["q_proj", "k_proj", "v_proj", "o_proj"] if "moe" in case.model or case.model == "mixtral" else "all-linear"
        lora = LoraConfig(r=case.lora, target_modules=layers)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model.train()


def make_batch(case: PlanCase) -> Any:
    if case.model == "mixer":
        return torch.zeros(case.batch_size, case.seq_len, 256, dtype=getattr(torch, case.dtype))
    ids = torch.zeros(case.batch_size, case.seq_len, dtype=torch.long)
    if case.spread:
        ids += torch.arange(ids.numel()).view(ids.shape)
    return {"input_ids": ids, "labels": ids}


def planned(case: PlanCase) -> halfbyte.MemoryPlan:
    return halfbyte.plan(
        make_model(case),
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        optimizer=case.optimizer,
        strategy=case.strategy,
        world_size=case.world_size,
        checkpointing=case.checkpointing,
        batch=lambda *_: make_batch(case),
    )


def build(case: PlanCase) -> Callable[[], None]:
    """The real thing: a step of plain PyTorch."""
    model: Any = make_model(case)
    if case.checkpointing and case.strategy != "fsdp2":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif case.strategy == "fsdp2":
        halfbyte.distributed.fully_shard(model, checkpointing=case.checkpointing)
    elif case.strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        from halfbyte.distributed.fsdp1 import separate_parameters

        separate = separate_parameters(model)
        policy = halfbyte.distributed.wrap_policy(model)
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"), ignored_states=separate
        )
        halfbyte.optim.annotate_fsdp1(model)
    batch = make_batch(case)
    optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        out = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(case: PlanCase) -> int:
    """Peak bytes of the first rank."""
    if case.world_size == 1:
        return measured_peak(partial(build, case))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (case, folder), nprocs=case.world_size)
        return int(Path(folder, "peak").read_text())


def _rank(rank: int, case: PlanCase, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case.world_size)
    # A flat gradient's copy inside gloo is as large as a unit, and seen until its address is used again.
    peak = min(measured_peak(partial(build, case)) for _ in range(6 if case.strategy == "fsdp1" else 3))
    if rank == 0:
        Path(folder, "peak").write_text(str(peak))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only cases whose title contains this")
    parser.add_argument(
        "--json", type=Path, help="where to write (default: benchmarks/results/plan-ISA.json; with --only nowhere)"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, errors = [], []
    print(f"{'case':64} {'planned':>9} {'measured':>9} {'error':>7}")
    for case in CASES:
        if args.only in str(case):
            plan, took = planned(case), measured(case)
            error = plan.peak_bytes / took - 1
            print(f"{case!s:64} {plan.peak_bytes / 1e6:9.2f} {took / 1e6:9.2f} {100 * error:+6.1f} %", flush=True)
            rows.append([str(case), f"{plan.peak_bytes / 1e6:.2f}", f"{took / 1e6:.2f}", f"{100 * error:+.1f}"])
            errors.append(abs(error))
    title = "Peak memory of one rank in a training step, MB: what `halfbyte.plan` says and what the allocator measured."
    harness.save_table("plan", title, ["case", "planned", "measured", "error, %"], rows, args.json, args.only)
    print(f"largest error: {100 * max(errors):.1f} %")
    if max(errors) > LIMIT:
        sys.exit(f"a prediction is off by more than {100 * LIMIT:.0f} %")


if __name__ == "__main__":
    main()
