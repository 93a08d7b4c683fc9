"""One device, DDP, FSDP1 and FSDP2 on the same models: do they compute and resume the same, and what does a rank hold.

    python benchmarks/bench_sharding.py            # all of it, about 10 minutes of two idle cores
    python benchmarks/bench_sharding.py --quick    # without the memory of a dense model
    python benchmarks/bench_sharding.py --quick --only Llama,Qwen2   # these rows anew, the others as the file has them

Two gloo processes on the CPU through Lightning's Trainer; only `strategy=` changes. Losses are compared with one device on
the whole batch, block by block outputs of the first step with its share of them; "resume" saves after two steps, loads into
a model drawn from another seed, saves again, and compares every tensor of both files byte by byte. Bytes all-gathered are
those of the third step. Memory is RssAnon above what the case started with, at its peak while the model is built and
sharded (every rank builds all of it here, already packed) and at its peak while it is trained.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests/distributed"), str(ROOT / "tests/lightning_plugin")]

STRATEGIES = ("single", "ddp", "fsdp1", "fsdp2")
MODELS = ("plain", "Llama", "Llama tied", "Qwen2", "Qwen2 tied")
STEPS, SAVED_AT, ROWS, TOKENS, VOCABULARY = 4, 2, 4, 32, 1024
WIDTH, HIDDEN, BLOCKS = 512, 1376, 8
MIB = 2**20


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.lora_A, self.lora_B = nn.Parameter(torch.empty(8, WIDTH)), nn.Parameter(torch.empty(HIDDEN, 8))

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.norm(input)
        adapted = self.up(hidden) + hidden @ self.lora_A.T @ self.lora_B.T
        return input + self.down(nn.functional.silu(adapted))


class Plain(nn.Module):
    """No host library: an embedding, blocks with packed layers and adapters of their own, a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(PlainBlock() for _ in range(BLOCKS))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embedding.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(name: str, seed: int) -> Any:
    """A model with adapters whose B is random; called in `configure_model`, so its linear layers are packed at birth."""
    torch.manual_seed(seed)
    if name == "plain":
        model: Any = Plain()
    else:
        import transformers
        from peft import LoraConfig, get_peft_model

        family = name.split()[0]
        config = getattr(transformers, f"{family}Config")(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=BLOCKS,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=name.endswith("tied"),
            use_cache=False,
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("proj.bias"):  # Qwen2's start as zeros
                nn.init.normal_(parameter, std=0.1)
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False))
    torch.manual_seed(seed + 1)  # how many numbers the layers drew depends on how they were built
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def module_class() -> Any:
    """The LightningModule; Lightning is imported by the ranks alone."""
    import lightning.pytorch as L
    from lightning_models import Batches

    class Causal(L.LightningModule):
        def __init__(self, name: str, seed: int = 0) -> None:
            super().__init__()
            self.name, self.seed, self.model = name, seed, None
            self.losses: list[float] = []
            self.outputs: list[Tensor] = []

        def configure_model(self) -> None:
            if self.model is None:
                self.model = build(self.name, self.seed)
                from halfbyte.distributed.grouping import blocks

                for block in blocks(self.model).values():
                    block.register_forward_hook(self.note)

        def note(self, module: nn.Module, args: Any, output: Any) -> None:
            if self.global_step == 0:
                self.outputs.append((output[0] if isinstance(output, tuple) else output).detach().clone())

        def training_step(self, _: Any, index: int) -> Tensor:
            generator = torch.Generator().manual_seed(100 + self.global_step)
            tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
            share = ROWS // self.trainer.world_size
            tokens = tokens[self.global_rank * share : (self.global_rank + 1) * share]
            loss = self.model(tokens) if self.name == "plain" else self.model(input_ids=tokens, labels=tokens).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Batches(), batch_size=1)

    return Causal


# -- what is counted


class Gathered:
    """Bytes that all-gathers produce on this rank; FSDP looks torch's functions up by these names at every call."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.bytes = 0
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            outputs = args[0] if args else next(kwargs[k] for k in ("tensor_list", "output_tensor", "output") if k in kwargs)
            for tensor in outputs if isinstance(outputs, list) else [outputs]:
                self.bytes += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return counted


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    start, running, found = anonymous(), [True], [0]

    def watch() -> None:
        while running:
            found[0] = max(found[0], anonymous() - start)
            time.sleep(0.003)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        running.clear()
        thread.join()


def packed_bytes(module: nn.Module) -> int:
    """Bytes of packed rows that this rank holds between steps."""
    from halfbyte.nn.packed import PackedRows
    from halfbyte.optim.sharding import local

    weights = [local(m.weight) for m in module.modules() if isinstance(m, PackedRows)]
    return sum(w.numel() * w.element_size() for w in weights)


def same_tensors(first: Path, second: Path) -> tuple[bool, int]:
    """Whether two checkpoints hold the same bytes, and how many tensors that are."""
    files = [torch.load(path, weights_only=False) for path in (first, second)]
    flat = [torch.utils._pytree.tree_leaves([f["state_dict"], f["optimizer_states"]]) for f in files]
    tensors = [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves in flat]
    equal = len(tensors[0]) == len(tensors[1]) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        for a, b in zip(*tensors, strict=True)
    )
    return equal, len(tensors[0])


# -- one rank


def strategy_of(kind: str) -> Any:
    from lightning_plugin import HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy

    makers: dict[str, Any] = {
        "single": lambda: "auto",
        "ddp": lambda: "ddp",
        "fsdp1": HalfbyteFSDPStrategy,
        "fsdp2": lambda: HalfbyteFSDP2Strategy(checkpointing=False, save_distributed_checkpoint=False),
    }
    return makers[kind]()


def rank_main(kind: str, folder: Path, models: list[str]) -> None:
    import torch.distributed as dist
    from lightning.pytorch import Callback
    from lightning_models import trainer

    import halfbyte
    from lightning_plugin import HalfbytePrecision

    causal, rank, gathered = module_class(), int(os.environ["LOCAL_RANK"]), Gathered()

    class Step(Callback):
        def __init__(self, peak: list[int]) -> None:
            self.peak = peak

        def on_train_start(self, *args: Any) -> None:
            self.building = self.peak[0]
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            self.peak[0] = 0

        def on_train_batch_start(self, run: Any, *args: Any) -> None:
            self.before = gathered.bytes

        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            if run.global_step == 3:
                self.bytes = gathered.bytes - self.before

    def fit(
        name: str, steps: int, seed: int = 0, path: Path | None = None, peak: list[int] | None = None
    ) -> tuple[Any, Any, Step]:
        module, step = causal(name, seed), Step(peak or [0])
        run = trainer(
            HalfbytePrecision("nf4"),
            steps,
            strategy=strategy_of(kind),
            devices=1 if kind == "single" else 2,
            use_distributed_sampler=False,
            gradient_clip_val=0.1,
            callbacks=[step],
        )
        run.fit(module, ckpt_path=path, weights_only=False)
        return run, module, step

    for name in ("plain", "Llama"):  # process group, imports, first calls: not part of any case's memory
        fit(name, 1)
    for name in models:
        with peak_memory() as peak:
            _, module, step = fit(name, STEPS, peak=peak)
        row: dict[str, Any] = {"losses": module.losses, "gathered": step.bytes, "packed": packed_bytes(module)}
        row |= {"building": step.building, "training": peak[0], "model": halfbyte.report(module).bytes}
        reference = folder / f"{name}.pt"
        if kind == "single":
            torch.save((module.losses, module.outputs), reference)
            row["outputs"] = 0.0
        else:
            share = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
            pairs = zip(module.outputs, torch.load(reference)[1], strict=True)
            row["outputs"] = max((ours - whole[share]).abs().max().item() for ours, whole in pairs)
        losses = module.losses
        del module
        first, second = folder / f"{kind}-{name}-1.ckpt", folder / f"{kind}-{name}-2.ckpt"
        fit(name, SAVED_AT)[0].save_checkpoint(first)
        fit(name, SAVED_AT, 55, first)[0].save_checkpoint(second)
        if dist.is_initialized():
            dist.barrier()
        row["resumed"], row["tensors"] = same_tensors(first, second)
        row["goes_on"] = fit(name, STEPS, 55, first)[1].losses == losses[SAVED_AT:]
        (folder / f"{kind}-{name}-rank{rank}.json").write_text(json.dumps(row))
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


# -- all of it


def compare(folder: Path, models: list[str]) -> list[dict[str, Any]]:
    import ranks

    for kind in STRATEGIES:
        print(f"{kind} ...", file=sys.stderr, flush=True)
        arguments = ("--rank", kind, str(folder), ",".join(models))
        ranks.run_ranks(Path(__file__), *arguments, world=1 if kind == "single" else 2, timeout=1800)
    rows = []
    for name in models:
        expected = torch.load(folder / f"{name}.pt")[0]
        for kind in STRATEGIES:
            world = 1 if kind == "single" else 2
            found = [json.loads((folder / f"{kind}-{name}-rank{r}.json").read_text()) for r in range(world)]
            losses = [sum(step) / len(step) for step in zip(*(f["losses"] for f in found), strict=True)]
            row = {
                "model": name,
                "strategy": kind,
                "loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
                "output_difference": max(f["outputs"] for f in found),
                "resume_restores_every_tensor": all(f["resumed"] for f in found),
                "tensors": found[0]["tensors"],
                "resumed_run_equals_uninterrupted": all(f["goes_on"] for f in found),
                "packed_bytes_per_rank": max(f["packed"] for f in found),
                "gathered_bytes_per_step": max(f["gathered"] for f in found),
                "model_bytes": found[0]["model"],
                "peak_bytes_building": max(f["building"] for f in found),
                "peak_bytes_training": max(f["training"] for f in found),
            }
            if row["loss_difference"] > 1e-4 or row["output_difference"] or not row["resume_restores_every_tensor"]:
                raise AssertionError(f"{kind} does not do what one device does: {row}")
            rows.append(row)
    return rows


def dense_memory() -> list[dict[str, Any]]:
    import ranks

    rows = []
    for which, title in (
        ("wrong", "dense bf16, stock FSDPStrategy, a policy that matches nothing"),
        ("halfbyte", "dense bf16, HalfbyteFSDPStrategy"),
        ("nf4-fsdp1", "nf4, HalfbyteFSDPStrategy"),
        ("nf4-fsdp2", "nf4, HalfbyteFSDP2Strategy"),
    ):
        print(f"{title} ...", file=sys.stderr, flush=True)
        log = ranks.run_ranks(ROOT / "tests/lightning_plugin/fsdp_memory_worker.py", which)[0]
        measured, expected = json.loads(next(line for line in log.splitlines() if line.startswith("[")))
        rows.append({"case": title, "peak_bytes_above_start_of_training": measured, "audit_expects": expected})
    return rows


def tables(rows: list[dict[str, Any]], dense: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What benchmarks/table.py prints."""
    parameters = f"{BLOCKS} blocks of width {WIDTH} and {HIDDEN}, vocabulary {VOCABULARY}, fp32 beside nf4"
    columns = ["model", "strategy", "loss vs one device", "block outputs vs one device", "resume restores every tensor"]
    columns += ["model MB", "packed MB per rank", "all-gathered MB per step", "peak MB building", "peak MB training"]
    body = [
        [
            row["model"],
            row["strategy"],
            f"{row['loss_difference']:.1e}",
            f"{row['output_difference']:.1e}",
            f"{'yes' if row['resume_restores_every_tensor'] else '**no**'} ({row['tensors']})",
            f"{row['model_bytes'] / 1e6:.2f}",
            f"{row['packed_bytes_per_rank'] / 1e6:.2f}",
            f"{row['gathered_bytes_per_step'] / 1e6:.2f}",
            f"{row['peak_bytes_building'] / 1e6:.0f}",
            f"{row['peak_bytes_training'] / 1e6:.0f}",
        ]
        for row in rows
    ]
    found = [{"title": f"two ranks, {parameters}", "columns": columns, "rows": body}]
    if dense:
        sizes = ("peak_bytes_above_start_of_training", "audit_expects")
        body = [[row["case"], *(f"{row[size] / MIB:.0f}" for size in sizes)] for row in dense]
        title = "two ranks, 96 M parameters (192 MiB in bf16): peak above the start of training"
        found.append({"title": title, "columns": ["case", "measured MiB", "audit expects MiB"], "rows": body})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the memory of a dense model")
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/sharding.json")
    args = parser.parse_args()
    if unknown := [name for name in args.only.split(",") if name not in MODELS]:
        parser.error(f"--only {','.join(unknown)!r} is no model; models: {', '.join(MODELS)}")
    # glibc otherwise keeps freed buffers up to 32 MiB in its heap, where holes hide what is really held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), args.only.split(","))
    before = json.loads(args.json.read_text()) if args.json.exists() else {"rows": [], "dense": []}
    rows += [row for row in before["rows"] if row["model"] not in args.only.split(",")]
    rows.sort(key=lambda row: (MODELS.index(row["model"]), STRATEGIES.index(row["strategy"])))
    dense = before["dense"] if args.quick else dense_memory()
    environment = {**harness.environment(), "threads": 1}
    result = {"benchmark": "sharding", "environment": environment, "rows": rows, "dense": dense}
    result["tables"] = tables(rows, dense)
    harness.write_json(args.json, result)
    import table

    print(table.plain(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        rank_main(sys.argv[2], Path(sys.argv[3]), sys.argv[4].split(","))
    else:
        main()
