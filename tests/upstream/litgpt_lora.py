"""Runs LitGPT's own LoRA fine-tuning, unchanged, on packed weights, and again on the same weights decoded to dense ones.

    pip install --no-deps litgpt                                    # its pins would replace the lightning that is tested
    python tests/upstream/litgpt_lora.py [--steps 4] [--format nf4] [--folder DIR]

LitGPT quantizes on one GPU only; here its `finetune.lora.main` gets a Fabric with `FabricHalfbytePrecision` on a CPU, in
one process and in two under `FabricHalfbyteFSDPStrategy`, and nothing else of halfbyte's. The model is
SmolLM2-135M-Instruct, converted by LitGPT's script; the data are Python's documentation topics. The losses of the packed
runs must be those of the same runs without the plugin from a checkpoint that holds the decoded weights.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from halfbyte.nn import QuantLinear  # noqa: E402
from lightning_plugin import FabricHalfbyteFSDPStrategy, FabricHalfbytePrecision  # noqa: E402

BOUND = 1e-3  # of a loss near 4: float32 sums in another order


def configuration(checkpoint: Path) -> Any:
    """LitGPT's, with LoRA on queries and values."""
    from litgpt.lora import Config

    return Config.from_file(checkpoint / "model_config.yaml", lora_r=8, lora_alpha=16, lora_query=True, lora_value=True)


def prepare(folder: Path) -> None:
    """The checkpoint in LitGPT's form, with adapters in it (what FSDP draws depends on how it shards), and the data."""
    import smollm2
    from litgpt.lora import GPT
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    checkpoint = folder / "dense"
    if not (checkpoint / "lit_model.pth").exists():
        shutil.copytree(smollm2.folder(folder), checkpoint, dirs_exist_ok=True)
        convert_hf_checkpoint(checkpoint, model_name="SmolLM2-135M-Instruct")
        state = torch.load(checkpoint / "lit_model.pth")
        with torch.device("meta"):
            model = GPT(configuration(checkpoint))
        torch.manual_seed(0)
        state.update({name: 0.02 * torch.randn(p.shape) for name, p in model.named_parameters() if name.endswith("lora_A")})
        torch.save(state, checkpoint / "lit_model.pth")
    topics = pydoc_data.topics.topics.items()
    rows = [{"instruction": f"Explain {name}", "input": "", "output": text[:600]} for name, text in topics]
    (folder / "data.json").write_text(json.dumps(rows))


def save_decoded(model: torch.nn.Module, dense: Path, decoded: Path) -> None:
    """A copy of LitGPT's checkpoint with the weights that the packed layers stand for."""
    state = torch.load(dense / "lit_model.pth")
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    if not layers:
        raise SystemExit("LitGPT built no packed layer")
    for name, layer in layers:
        key = name.removesuffix(".linear") + ".weight"
        state[key] = layer.dequantize(torch.float32).view(state[key].shape)  # a KeyError if LitGPT renames
    shutil.copytree(dense, decoded, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pth", "*.safetensors"))
    torch.save(state, decoded / "lit_model.pth")


def run(weights: str, ranks: int, folder: Path, steps: int, format: str) -> None:
    """One fine-tuning; rank 0 writes its losses."""
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import JSON
    from litgpt.finetune import lora
    from litgpt.lora import Block

    strategy = FabricHalfbyteFSDPStrategy(auto_wrap_policy={Block}) if ranks > 1 else "auto"
    plugins = FabricHalfbytePrecision(format) if weights == "packed" else None
    fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=plugins)
    fabric.launch()
    losses: list[float] = []
    load = lora.load_checkpoint

    def load_and_decode(fabric: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        load(fabric, model, *args, **kwargs)
        if weights == "packed" and ranks == 1:
            save_decoded(model.module, folder / "dense", folder / "decoded")

    # What it does besides training: saving its command line, and merging into dense weights.
    lora.save_hyperparameters = lora.merge_lora = lambda *args, **kwargs: None
    lora.load_checkpoint = load_and_decode
    fabric.log_dict = lambda metrics, step=None: losses.append(float(metrics["loss"])) if "loss" in metrics else None
    checkpoint = folder / ("dense" if weights == "packed" else "decoded")
    sizes = {"global_batch_size": 4, "micro_batch_size": 4 // ranks, "max_seq_length": 128}
    train = TrainArgs(save_interval=1000, log_interval=1, lr_warmup_steps=1, epochs=1, max_steps=steps, **sizes)
    evaluate = EvalArgs(interval=1000, max_new_tokens=10, max_iters=1, final_validation=False)
    data = JSON(json_path=folder / "data.json", val_split_fraction=0.05, num_workers=0)
    lora.main(fabric, ranks, 1337, configuration(checkpoint), data, checkpoint, folder / "out", train, evaluate, "AdamW")
    if fabric.global_rank == 0:
        (folder / f"{weights}-{ranks}.json").write_text(json.dumps(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--folder", type=Path, default=Path("litgpt-output"))
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # one of the runs below, in its own processes
    args = parser.parse_args()
    if args.run:
        run(args.run[0], int(args.run[1]), args.folder, args.steps, args.format)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    prepare(args.folder)
    failed = False
    for ranks in ("1", "2"):
        losses = {}
        for weights in ("packed", "decoded"):
            command = [sys.executable, __file__, *sys.argv[1:], "--run", weights, ranks]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            losses[weights] = json.loads((args.folder / f"{weights}-{ranks}.json").read_text())
        worst = max(abs(a - b) for a, b in zip(losses["packed"], losses["decoded"], strict=True))
        failed |= not worst < BOUND or len(losses["packed"]) < args.steps
        print(f"{ranks} rank(s): packed {losses['packed']}, decoded {losses['decoded']}: largest difference {worst:.1e}")
    if failed:
        sys.exit("LitGPT's losses on packed weights differ from those on the decoded ones")


if __name__ == "__main__":
    main()
