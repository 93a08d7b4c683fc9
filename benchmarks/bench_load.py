"""Time and memory of loading a Llama of 446 M parameters in 4 bits: halfbyte, bitsandbytes, Quanto, and dense bfloat16.

Each row is a process of its own that loads one folder of random bfloat16 weights and, where the library can, the quantized
folder that it saved itself. Memory is sampled from /proc/self/status every 2 ms, and reported above what the imports took:
RssAnon is memory that is really used up; RssFile are pages of the checkpoint that the kernel may drop at any time.
Rows are interleaved over the rounds; a load counts only if every packed layer is there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROWS = (
    "dense bfloat16",
    "halfbyte nf4",
    "bitsandbytes nf4",
    "quanto int4",
    "halfbyte nf4, saved",
    "bitsandbytes nf4, saved",
)
SIZES = {
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 20,
    "num_attention_heads": 20,
    "num_key_value_heads": 10,
    "vocab_size": 32000,
}
COLUMNS = ("load", "seconds", "low .. high", "peak anonymous MiB", "anonymous MiB after", "peak file MiB")
LINEARS = 7 * SIZES["num_hidden_layers"]


def make_models(folder: Path) -> int:
    """Writes the dense model and what each library saves of it; returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    torch.set_default_dtype(default)
    model.save_pretrained(folder / "dense", max_shard_size="200MB")
    count = sum(p.numel() for p in model.parameters())
    del model
    for name in ("halfbyte nf4", "bitsandbytes nf4"):
        load(name, folder).save_pretrained(folder / name, max_shard_size="200MB")
    return count


def load(row: str, folder: Path) -> Any:
    """The model of one row."""
    import torch
    from transformers import AutoModelForCausalLM

    if row.endswith(", saved"):
        return AutoModelForCausalLM.from_pretrained(folder / row.removesuffix(", saved"), dtype=torch.bfloat16)
    config: Any = None
    if row.startswith("halfbyte"):
        from peft_bridge import HalfbyteConfig

        config = HalfbyteConfig("nf4")
    elif row.startswith("bitsandbytes"):
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    elif row.startswith("quanto"):
        from transformers import QuantoConfig

        config = QuantoConfig(weights="int4")
    return AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.bfloat16, quantization_config=config)


def resident() -> dict[str, int]:
    """RssAnon and RssFile of this process, bytes."""
    text = Path("/proc/self/status").read_text()
    return {key: int(re.search(rf"{key}:\s+(\d+)", text)[1]) * 1024 for key in ("RssAnon", "RssFile")}  # type: ignore[index]


def measure(row: str, folder: Path) -> dict[str, float]:
    """Loads once in this process."""
    import torch
    import transformers.quantizers.auto
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import halfbyte
    import peft_bridge  # noqa: F401

    transformers.logging.disable_progress_bar()
    if row.startswith("bitsandbytes"):
        import bitsandbytes  # noqa: F401
    if row.startswith("quanto"):
        import optimum.quanto  # noqa: F401
    halfbyte.quantize(torch.randn(64, 64))
    before, peak, done = resident(), dict.fromkeys(("RssAnon", "RssFile"), 0), threading.Event()

    def sample() -> None:
        while not done.is_set():
            for key, value in resident().items():
                peak[key] = max(peak[key], value)
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    started = time.perf_counter()
    model = load(row, folder)
    seconds = time.perf_counter() - started
    done.set()
    thread.join()
    if not row.startswith("dense"):
        names = {"halfbyte": "QuantLinear", "bitsandbytes": "Linear4bit", "quanto": "QLinear"}
        kind = names[row.split()[0]]
        found = sum(type(module).__name__ == kind for module in model.modules())
        if found != LINEARS:
            raise SystemExit(f"{row}: {found} of {LINEARS} layers are {kind}")
    after = resident()
    return {
        "seconds": seconds,
        "peak_anonymous_bytes": peak["RssAnon"] - before["RssAnon"],
        "peak_file_bytes": peak["RssFile"] - before["RssFile"],
        "anonymous_bytes_after": after["RssAnon"] - before["RssAnon"],
    }


def main() -> None:
    """Runs the rows in turn, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write (default: benchmarks/results/load-ISA.json)")
    parser.add_argument("--child", nargs=2, metavar=("ROW", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT", json.dumps(measure(args.child[0], Path(args.child[1]))))
        return
    import harness

    folder = Path(tempfile.mkdtemp(prefix="halfbyte-load-"))
    try:
        count = make_models(folder)
        results: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
        for _ in range(args.rounds):
            for row in ROWS:
                done = subprocess.run(
                    [sys.executable, __file__, "--child", row, str(folder)], capture_output=True, text=True, check=False
                )
                line = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
                if not line:
                    raise SystemExit(f"{row} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
                results[row].append(json.loads(line[0].removeprefix("RESULT ")))
    finally:
        shutil.rmtree(folder)
    rows = []
    for row, rounds in results.items():
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        low, high = min(each["seconds"] for each in rounds), max(each["seconds"] for each in rounds)
        kinds = ("peak_anonymous_bytes", "anonymous_bytes_after", "peak_file_bytes")
        sizes = (f"{median[kind] / 2**20:.0f}" for kind in kinds)
        rows.append([row, f"{median['seconds']:.2f}", f"{low:.2f} .. {high:.2f}", *sizes])
    title = (
        f"Loading a Llama of {count / 1e6:.0f} M parameters from local safetensors, medians of {args.rounds} processes; "
        f"MiB of RssAnon and RssFile above what the imports took."
    )
    harness.save_table("load", title, COLUMNS, rows, args.json)


if __name__ == "__main__":
    main()
