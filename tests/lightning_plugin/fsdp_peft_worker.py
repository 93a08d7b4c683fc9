"""One rank of the FSDP tests with transformers and PEFT: `fsdp_peft_worker.py FOLDER`; each case against one process."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning.pytorch as L
import torch
import torch.distributed as dist
import transformers
from lightning_models import Batches, trainer
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.tensor import DTensor

from halfbyte.distributed import audit
from halfbyte.nn import QuantLinear
from halfbyte.optim import AdamW8bit
from lightning_plugin import HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy, HalfbytePrecision

STEPS, SAVED_AT, ROWS = 4, 2, 4
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(family: str, tied: bool, seed: int = 0, checkpointing: str = "", dtype: Any = torch.float32) -> Any:
    """LoRA with random B on a randomly initialized causal model; `checkpointing`: "", "reentrant" or "not"."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=tied)
    )
    if family == "Qwen2":  # its attention biases start as zeros
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    model.config.use_cache = False
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
    adapted = get_peft_model(model, config)
    torch.manual_seed(seed + 1)  # how many numbers the layers drew depends on how they were built
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if checkpointing:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
    return adapted


class Causal(L.LightningModule):
    def __init__(self, optimizer: Any = torch.optim.AdamW, **how: Any) -> None:
        super().__init__()
        self.how, self.optimizer, self.model, self.losses = how, optimizer, None, []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = model_of(**self.how).train()

    def training_step(self, _: Any, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + self.global_step)
        tokens = torch.randint(0, 96, (ROWS, 12), generator=generator)
        share = ROWS // self.trainer.world_size
        tokens = tokens[self.global_rank * share : (self.global_rank + 1) * share]
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        group: dict[str, Any] = {"params": [p for p in self.parameters() if p.requires_grad]}
        if self.optimizer is AdamW8bit:
            group["quantize_state"] = True  # these adapters are too small for the rule
        return self.optimizer([group], lr=1e-2)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Batches(), batch_size=1)


def fit(strategy: Any, module: Causal, steps: int = STEPS, devices: int = 2, path: Any = None, **kwargs: Any) -> Any:
    kwargs = {"gradient_clip_val": 0.1, **kwargs}
    run = trainer(
        HalfbytePrecision("nf4"),
        steps,
        strategy=strategy,
        devices=devices,
        use_distributed_sampler=False,
        **kwargs,
    )
    run.fit(module, ckpt_path=path, weights_only=False)
    return run


def mean(losses: list[float]) -> list[float]:
    tensor = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def compare(label: str, losses: list[float], expected: list[float], bound: float = 1e-4) -> None:
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert difference <= bound, (label, losses, expected)
    if dist.get_rank() == 0:
        print(f"CASE {label}: {difference:.1e}", flush=True)


def local_bytes(module: Causal) -> int:
    """Bytes of packed rows on this rank."""
    total = 0
    for layer in module.modules():
        if isinstance(layer, QuantLinear):
            weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
            total += weight.numel() * weight.element_size()
    return total


def main(folder: Path) -> None:
    cases = [(family, tied) for family in ("Llama", "Qwen2") for tied in (False, True)]
    expected, packed = {}, {}
    for family, tied in cases:  # before any process group exists
        module = Causal(family=family, tied=tied)
        fit("auto", module, devices=1)
        expected[family, tied], packed[family, tied] = module.losses, local_bytes(module)
    eight = Causal(AdamW8bit, family="Llama", tied=True)
    fit("auto", eight, devices=1)
    low = Causal(family="Qwen2", tied=False, dtype=torch.bfloat16)
    fit("auto", low, devices=1)
    accumulated = Causal(family="Llama", tied=True)
    fit("auto", accumulated, devices=1, accumulate_grad_batches=2)
    makers: dict[str, Any] = {
        "fsdp2": lambda: HalfbyteFSDP2Strategy(save_distributed_checkpoint=False),
        "fsdp1": HalfbyteFSDPStrategy,
    }
    for kind, make in makers.items():
        for family, tied in cases:
            module = Causal(family=family, tied=tied)
            run = fit(make(), module)
            compare(f"{kind} {family} tied={tied}", mean(module.losses), expected[family, tied])
            report = audit(run.strategy.model)
            # A unit per block; the embedding and the head unless tied; FSDP1: one per packed layer too.
            assert len(report.units) == 1 + 3 + (0 if tied else 2) + (21 if kind == "fsdp1" else 0), report.units
            share = local_bytes(module)
            whole = torch.tensor(share)
            dist.all_reduce(whole)
            assert share <= 0.51 * packed[family, tied] and int(whole) == packed[family, tied]
            path = folder / f"{kind}-{family}-{tied}.ckpt"
            first = Causal(family=family, tied=tied)
            fit(make(), first, SAVED_AT).save_checkpoint(path)
            resumed = Causal(family=family, tied=tied, seed=55)
            fit(make(), resumed, path=path)
            compare(f"{kind} {family} tied={tied} resumed", first.losses + resumed.losses, module.losses, 0.0)
        for checkpointing in ("reentrant", "not"):
            module = Causal(family="Llama", tied=True, checkpointing=checkpointing)
            fit(make(), module)
            compare(f"{kind} checkpointing {checkpointing}", mean(module.losses), expected["Llama", True])
        module = Causal(family="Llama", tied=True)
        fit(make(), module, accumulate_grad_batches=2)
        compare(f"{kind} accumulation", mean(module.losses), accumulated.losses)
        module = Causal(AdamW8bit, family="Llama", tied=True)
        fit(make(), module)
        # FSDP1 cuts inside rows: there the blocks of the moments differ from those of one process.
        compare(f"{kind} AdamW8bit", mean(module.losses), eight.losses, 1e-4 if kind == "fsdp2" else 5e-4)
        makers_saving = [
            make,
            (lambda: HalfbyteFSDPStrategy(state_dict_type="sharded")) if kind == "fsdp1" else HalfbyteFSDP2Strategy,
        ]
        for form, saving in zip(("file", "folder"), makers_saving, strict=True):
            path = folder / f"{kind}-8bit-{form}.ckpt"
            first, resumed = (
                Causal(AdamW8bit, family="Llama", tied=True),
                Causal(AdamW8bit, family="Llama", tied=True, seed=55),
            )
            fit(saving(), first, SAVED_AT).save_checkpoint(path)
            fit(saving(), resumed, path=path)
            compare(f"{kind} AdamW8bit resumed from a {form}", first.losses + resumed.losses, module.losses, 0.0)
    module = Causal(family="Qwen2", tied=False)
    fit(HalfbyteFSDPStrategy(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)), module)
    compare("fsdp1 bf16 mixed precision", mean(module.losses), expected["Qwen2", False], 0.05)
    for sharding in ("SHARD_GRAD_OP", "NO_SHARD"):
        module = Causal(family="Llama", tied=True)
        fit(HalfbyteFSDPStrategy(sharding_strategy=sharding), module)
        compare(f"fsdp1 {sharding}", mean(module.losses), expected["Llama", True])
    for kind, make in makers.items():  # bfloat16 norms, biases and tables beside float32 adapters
        module = Causal(family="Qwen2", tied=False, dtype=torch.bfloat16)
        run = fit(make(), module)
        compare(f"{kind} bf16 model", mean(module.losses), low.losses, 0.03)
        outside = audit(run.strategy.model).outside
        assert len(outside) == (3 * (2 + 3) if kind == "fsdp1" else 0), outside  # norms and biases of three blocks
        first, path = Causal(family="Qwen2", tied=False, dtype=torch.bfloat16), folder / f"{kind}-bf16.ckpt"
        resumed = Causal(family="Qwen2", tied=False, dtype=torch.bfloat16, seed=55)
        fit(make(), first, SAVED_AT).save_checkpoint(path)
        fit(make(), resumed, path=path)
        compare(f"{kind} bf16 model resumed", first.losses + resumed.losses, module.losses, 0.0)
    module = Causal(family="Llama", tied=True)
    fit(HalfbyteFSDPStrategy(cpu_offload=True), module)
    compare("fsdp1 cpu_offload", mean(module.losses), expected["Llama", True])


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
