"""What calibrating a model of the 8B class takes: blocks of Llama-3-8B's shapes with random weights, streamed from a folder.

    python benchmarks/bench_calibration_8b.py [--blocks 2] [--tokens 8192] [--model-blocks 32]

CPU time and memory do not depend on the values: every block is the same work, so the model's time is its number of blocks
times one block's (the first is not counted where there are several: it also warms up). Divide by the cores at work. The
peak is anonymous memory above the imports, in a process of its own; beside it what the design says it should be, tensor by
tensor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from unittest import mock

import harness
import torch
from measured_memory import PeakMemory
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

import halfbyte
from halfbyte.calibration.folder import Folder
from halfbyte.calibration.report import CalibratedLayer

WIDTH, INNER, HEADS, KV_HEADS, VOCABULARY, LENGTH = 4096, 14336, 32, 8, 1024, 512


def make(folder: str, blocks: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, num_hidden_layers=blocks, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def expected(tokens: int) -> dict[str, float]:
    """Bytes, when the widest layer (down_proj) is solved: its block, its moment, two float64 matrices of the inversion."""
    head = WIDTH // HEADS
    block = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * head + 3 * WIDTH * INNER)
    return {
        "dense block, bf16": block,
        "moment of down_proj's input, float32": 4 * INNER**2,
        "its inverse's factor, two float64 matrices": 16 * INNER**2,
        "hidden states (mapped files, not counted in the peak)": 2 * 2 * tokens * WIDTH,
    }


def child(folder: str, tokens: int) -> None:
    """Calibrates, and prints CPU seconds per block and the peak as JSON."""
    finished = [time.process_time()]
    finish = Folder.finish_block

    def noted(self: Folder, index: int, layers: list[CalibratedLayer]) -> None:
        finish(self, index, layers)
        finished.append(time.process_time())

    ids = torch.randint(0, VOCABULARY, (tokens // LENGTH, LENGTH), generator=torch.Generator().manual_seed(0))
    with (
        tempfile.TemporaryDirectory() as out,
        mock.patch.object(Folder, "finish_block", noted),
        PeakMemory() as memory,
    ):
        halfbyte.calibrate(folder, ids, "nf4", tokens=tokens, out=Path(out, "q"))
    seconds = [after - before for before, after in itertools.pairwise(finished)]
    print(json.dumps({"seconds": seconds, "peak": memory.bytes}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--model-blocks", type=int, default=32, help="of the whole model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.set_verbosity_error()
    if args.child:
        child(args.child, args.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args.blocks)
        result = harness.in_child(__file__, "--child", folder, "--tokens", str(args.tokens))
    each = result["seconds"][1:] or result["seconds"]
    one = sum(each) / len(each)
    rows: list[list[object]] = [[name, f"{value / 1e6:.0f} MB"] for name, value in expected(args.tokens).items()]
    rows += [
        ["peak, measured", f"{result['peak'] / 1e6:.0f} MB"],
        ["one block, measured", f"{one:.0f} CPU s"],
        [f"{args.model_blocks} blocks, by that", f"{one * args.model_blocks / 3600:.1f} CPU h"],
    ]
    title = (
        f"Calibrating a Llama of width {WIDTH} and inner width {INNER} (Llama-3-8B's blocks, random weights) to nf4 on "
        f"{args.tokens} tokens, block by block from a folder"
    )
    harness.save_table("calibration-8b", title, ["what", "figure"], rows, args.json)


if __name__ == "__main__":
    main()
