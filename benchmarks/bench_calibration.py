"""Loss of calibrated against plain 4-bit weights on held-out text; every row is written as soon as it is measured.

    python benchmarks/bench_calibration.py --model FOLDER [--held-out-tokens 20480] [--only nf4 ...] [--output FILE.json]

FOLDER is a dense Hugging Face causal language model (examples/smollm2.py makes one). Held out and same-domain calibration
text: pages of `pydoc_data.topics`, every fifth page held out; the other domain: sources of the standard library.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import halfbyte
import peft_bridge

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


def texts() -> tuple[str, str, str]:
    """Held-out pages, the other pages, and Python source."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[::5]
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    source = [stdlib / name for name in ("argparse.py", "tarfile.py", "inspect.py", "ast.py", "datetime.py", "pathlib.py")]
    return (
        "\n".join(topics[name] for name in held_out),
        "\n".join(topics[name] for name in names if name not in held_out),
        "\n".join(path.read_text() for path in source if path.is_file()),
    )


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
    _, decoder = halfbyte.calibration.decoder.decoder_blocks(model)
    for layer in decoder.modules():
        if type(layer) is nn.Linear:
            codes, state = bnb.quantize_4bit(layer.weight.data.float(), blocksize=64, quant_type="nf4")
            layer.weight.data.copy_(bnb.dequantize_4bit(codes, state).view_as(layer.weight))
    return loss_on(model, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a dense model")
    parser.add_argument("--held-out-tokens", type=int, default=20480)
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on")
    parser.add_argument("--only", nargs="*", help="measure the rows whose names hold one of these")
    parser.add_argument("--keep", type=Path, help="keep the calibrated nf4 folder here")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/calibration.json"))
    args = parser.parse_args()
    logging.set_verbosity_error()
    held_out, pages, source = texts()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(held_out, verbose=False).input_ids)
    blocks = ids[: min(len(ids), args.held_out_tokens) // 512 * 512].view(-1, 512)
    dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    done: dict[str, Any] = json.loads(args.output.read_text()) if args.output.is_file() else {}
    rows: dict[str, Any] = done.setdefault("rows", {})
    done |= {"model": Path(args.model).name, "held_out_tokens": blocks.numel(), "calibration_tokens": args.tokens}
    done |= {"dtype": str(dtype), "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}

    def record(name: str, loss: float, **more: Any) -> None:
        rows[name] = {"loss": loss, "increase": loss - rows["dense"]["loss"] if name != "dense" else 0.0, **more}
        print(f"{name:34s} {loss:.4f} {rows[name]['increase']:+.4f} {more}", flush=True)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(done, indent=1) + "\n")

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
            started = time.perf_counter()
            report = halfbyte.calibrate(
                args.model, source if text == "source" else pages, format, method=method, tokens=args.tokens, out=Path(folder, "q")
            )
            seconds = time.perf_counter() - started
            mean = sum((layer.error or 0) / (layer.plain_error or 1) for layer in report.layers) / len(report.layers)
            loss = loss_on(AutoModelForCausalLM.from_pretrained(Path(folder, "q")).eval(), blocks)
            record(name, loss, seconds=round(seconds, 1), output_error_over_plain=round(mean, 4))
            if args.keep and name.startswith("nf4 calibrated, same"):
                shutil.copytree(Path(folder, "q"), args.keep, dirs_exist_ok=True)
    if wanted("bitsandbytes nf4"):
        record("bitsandbytes nf4", bitsandbytes_loss(args.model, dtype, blocks))


if __name__ == "__main__":
    main()
