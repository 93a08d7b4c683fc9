"""What loading a model costs each of two ranks: one rank reads and quantizes for all, or every rank by itself.

    python benchmarks/bench_loading.py                        # makes a random Llama of 473 M parameters, about 1 GB on disk
    python benchmarks/bench_loading.py --layers 2 --repeats 1 # a small one

Every case runs in fresh processes, the cases in turn. Reported per rank: wall time from the first call to the loaded model
(the slowest rank's counts), and the peak of anonymous memory above what the imports hold, sampled every 5 ms (mapped file
pages don't count, and `ru_maxrss` would count them). Afterwards the models of all halfbyte cases are checked to be the same
bytes on every rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/distributed")]

import harness  # noqa: E402
import torch  # noqa: E402
from measured_memory import PeakMemory  # noqa: E402

CASES = {
    "one rank for all": "halfbyte.load_quantized, every rank gets all rows (DDP)",
    "one rank for all, FSDP2": "halfbyte.load_quantized into fully_shard(model): every rank gets its rows",
    "one rank for all, cached": "halfbyte.load_quantized(cache_dir=) the second time: nothing is quantized",
    "each by itself": "halfbyte.load_quantized in every process",
    "transformers + halfbyte, each": "from_pretrained(quantization_config=HalfbyteConfig('nf4')) in every process",
    "transformers + bitsandbytes, each": "from_pretrained(quantization_config=BitsAndBytesConfig(load_in_4bit, nf4))",
}


def model_config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32000,
        hidden_size=1280,
        intermediate_size=3456,
        num_hidden_layers=layers,
        num_attention_heads=20,
        num_key_value_heads=20,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def on_meta(config: Any) -> Any:
    from transformers import LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def make_checkpoint(folder: Path, layers: int) -> int:
    """Writes random bf16 shards, one at a time; returns the number of parameters."""
    from safetensors.torch import save_file

    config = model_config(layers)
    shapes = {name: tuple(p.shape) for name, p in on_meta(config).named_parameters()}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        groups.setdefault(parts[2] if "layers" in parts else "rest", []).append(name)
    weight_map = {}
    for number, names in enumerate(groups.values(), 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        generator = torch.Generator().manual_seed(number)
        tensors = {n: (torch.randn(shapes[n], generator=generator) * 0.02).bfloat16() for n in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(folder)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode())
        found.update(whole.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def rank_main(case: str, folder: Path, layers: int) -> None:
    """One rank of one case: prints its figures as JSON."""
    import torch.distributed as dist
    import transformers

    import halfbyte
    import peft_bridge

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = model_config(layers)
    library = case.partition(" + ")[2].partition(",")[0]
    if library == "bitsandbytes":
        import bitsandbytes  # noqa: F401
    halfbyte.quantize(torch.zeros(2, 64))
    dist.barrier()
    began = time.perf_counter()
    with PeakMemory() as memory:
        if library:
            made: Any = peft_bridge.HalfbyteConfig("nf4")
            if library == "bitsandbytes":
                made = transformers.BitsAndBytesConfig(
                    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
                )
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, quantization_config=made, device_map={"": "cpu"}
            )
        elif case == "each by itself":
            model = on_meta(config)
            own = dist.new_subgroups(1)[0]
            halfbyte.load_quantized(model, folder, "nf4", process_group=own, progress=False)
        else:
            model = on_meta(config)
            if "FSDP2" in case:
                halfbyte.quantize_model(model, "nf4")
                model = halfbyte.distributed.fully_shard(model, checkpointing=False)
            cache = folder.parent / "cache" if "cached" in case else None
            halfbyte.load_quantized(model, folder, "nf4", cache_dir=cache, progress=False)
    figures = {"rank": rank, "seconds": time.perf_counter() - began, "peak": memory.bytes, "kept": memory.kept}
    if library != "bitsandbytes":
        figures["digest"] = digest(model)
    print("FIGURES " + json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_case(case: str, folder: Path, layers: int, world: int) -> list[dict[str, Any]]:
    from ranks import run_ranks

    arguments = ("--rank-of", case, "--folder", str(folder), "--layers", str(layers))
    outputs = run_ranks(Path(__file__), *arguments, world=world, timeout=900)
    return [json.loads(output.partition("FIGURES ")[2].splitlines()[0]) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20, help="decoder layers; 20 make 473 M parameters")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args.rank_of, args.folder, args.layers)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "dense"
        folder.mkdir()
        parameters = make_checkpoint(folder, args.layers)
        print(f"{parameters / 1e6:.0f} M parameters, bf16, {args.ranks} ranks, 1 thread each, load {os.getloadavg()[0]:.1f}")
        found: dict[str, list[list[dict[str, Any]]]] = {case: [] for case in CASES}
        run_case("one rank for all, cached", folder, args.layers, args.ranks)  # fills the cache
        for _ in range(args.repeats):
            for case in CASES:
                found[case].append(run_case(case, folder, args.layers, args.ranks))
    digests = {rank["digest"] for runs in found.values() for run in runs for rank in run if "digest" in rank}
    if len(digests) != 1:
        raise SystemExit(f"the loads differ: {digests}")
    rows = []
    for case, runs in found.items():
        seconds = [max(rank["seconds"] for rank in run) for run in runs]
        peaks = [f"{min(run[rank]['peak'] for run in runs) / 2**20:.0f}" for rank in range(args.ranks)]
        kept = [f"{min(run[rank]['kept'] for run in runs) / 2**20:.0f}" for rank in range(args.ranks)]
        rows.append([f"{case}: {CASES[case]}", f"{min(seconds):.2f}", " / ".join(peaks), " / ".join(kept)])
    title = (
        f"A random Llama of {parameters / 1e6:.0f} M parameters, bf16 on disk, to nf4 on {args.ranks} ranks of one thread: "
        "the slowest rank's time (best of the repeats), anonymous memory above the imports per rank."
    )
    columns = ["case", "s", "peak MiB per rank", "kept MiB per rank"]
    harness.save_table("loading", title, columns, rows, args.json)


if __name__ == "__main__":
    main()
