"""Fine-tune a causal LM on packed weights over several ranks; only `--strategy` says how it is sharded.

    torchrun --nproc-per-node 2 examples/fsdp_finetune.py --strategy fsdp2
    torchrun --nproc-per-node 2 examples/fsdp_finetune.py --strategy fsdp1 --model path/to/checkpoint

Without `--model` a small Llama with random weights learns to spell Python's own documentation, byte by byte. Every rank
reads the checkpoint; the packed weights are then sharded, the adapters trained in 8-bit AdamW.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from typing import Any

import lightning.pytorch as L
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from halfbyte.optim import AdamW8bit
from lightning_plugin import HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy, HalfbytePrecision, QuantizationReport

STRATEGIES: dict[str, Any] = {"ddp": lambda: "ddp", "fsdp1": HalfbyteFSDPStrategy, "fsdp2": HalfbyteFSDP2Strategy}


class Finetune(L.LightningModule):
    """Written for one device: nothing in here knows about ranks."""

    def __init__(self, path: str | None, lr: float) -> None:
        super().__init__()
        self.path, self.lr, self.model = path, lr, None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        if self.path:
            model = transformers.AutoModelForCausalLM.from_pretrained(self.path)
        else:
            config = transformers.LlamaConfig(
                vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
            )
            model = transformers.LlamaForCausalLM(config)
        model.config.use_cache = False
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        self.model = get_peft_model(model, lora).train()

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW8bit([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def chunks(path: str | None, length: int) -> list[torch.Tensor]:
    """Python's documentation in pieces of `length` tokens: of the model's tokenizer, or bytes."""
    text = "\n".join(pydoc_data.topics.topics.values())[:400_000]
    if path:
        ids = transformers.AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    else:
        ids = list(text.encode())
    return [torch.tensor(ids[i : i + length]) for i in range(0, len(ids) - length, length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="fsdp2")
    parser.add_argument("--model", help="a local checkpoint of transformers")
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto", help="ranks of this node")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    trainer = L.Trainer(
        strategy=STRATEGIES[arguments.strategy](),
        plugins=HalfbytePrecision(arguments.format),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
        gradient_clip_val=1.0,
        callbacks=[QuantizationReport()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = DataLoader(chunks(arguments.model, arguments.length), batch_size=8, shuffle=True)
    trainer.fit(Finetune(arguments.model, arguments.lr), data)
    if trainer.is_global_zero:
        print(f"{arguments.strategy}: loss {float(trainer.callback_metrics['loss']):.3f} after {arguments.steps} steps")


if __name__ == "__main__":
    main()
