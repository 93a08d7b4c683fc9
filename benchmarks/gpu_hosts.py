"""What gpu_check.py asks of whole hosts on a GPU: Lightning and its strategies, transformers and PEFT, torch.compile.

Each scenario is what a user writes, on a Llama of random weights (no network): it raises AssertionError, or returns figures.
Scenarios of a library that is not installed say so. `--dry-run` runs them tiny on the CPU.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import BF16, Bench
from torch import Tensor, nn

import halfbyte
from halfbyte.distributed.fsdp2 import MINIMUM_TORCH, takes_packed_rows
from halfbyte.optim import AdamW8bit

Scenario = Callable[[Bench, Path], dict[str, Any]]
SCENARIOS: dict[str, tuple[Scenario, tuple[str, ...]]] = {}


def scenario(*needs: str) -> Callable[[Scenario], Scenario]:
    """Registers a scenario that imports `needs`."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (function, needs)
        return function

    return register


def llama(b: Bench) -> Any:
    """The configuration of a small Llama; about 340 million weights, or next to none in a dry run."""
    from transformers import LlamaConfig

    d = b.size(1024, 64)
    return LlamaConfig(
        vocab_size=b.size(32000, 128),
        hidden_size=d,
        intermediate_size=b.size(2816, 128),
        num_hidden_layers=b.size(24, 2),
        num_attention_heads=d // 32,
        num_key_value_heads=d // 64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
    )


def write_llama(b: Bench, folder: Path) -> int:
    """A bf16 checkpoint of such a model with random weights.

    Returns:
        Bytes of its weights.
    """
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(b.device):
        model = LlamaForCausalLM(llama(b)).to(BF16)
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def tokens(b: Bench, rows: int) -> Tensor:
    """Rows that repeat a short pattern each, which adapters learn within a few steps."""
    generator = torch.Generator().manual_seed(1)
    pattern = torch.randint(0, b.size(32000, 128), (rows, 8), generator=generator)
    return pattern.repeat(1, b.size(512, 32) // 8)


def peak(b: Bench) -> int:
    return torch.cuda.max_memory_allocated(b.device) if b.cuda else 0


def forget(b: Bench) -> None:
    """Frees what earlier scenarios left, and starts to watch the peak."""
    gc.collect()
    if b.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(b.device)


def train(b: Bench, folder: Path, **trainer: Any) -> dict[str, Any]:
    """A few steps of LoRA on a packed base under Lightning's Trainer."""
    import lightning as L
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    from lightning_plugin import HalfbytePrecision

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
                self.model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).train()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> AdamW8bit:
            return AdamW8bit([p for p in self.parameters() if p.requires_grad], lr=5e-3)

    forget(b)
    module, steps = Module(), 12
    run = L.Trainer(
        accelerator="gpu" if b.cuda else "cpu",
        devices=1,
        max_steps=steps,
        plugins=HalfbytePrecision("nf4"),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,  # the rows of the run without a strategy, in their order
        **trainer,
    )
    batch = tokens(b, 4)
    start = time.perf_counter()
    run.fit(module, DataLoader([*batch] * steps, batch_size=4))
    report = halfbyte.report(module.model)
    assert len(module.losses) == steps
    assert module.losses[-1] < module.losses[0] - 0.1, f"the loss did not fall: {module.losses}"
    return {"losses": module.losses, "seconds": time.perf_counter() - start, "peak": peak(b), "weights": report.bytes}


@scenario("lightning", "transformers", "peft")
def lightning_trainer_and_its_strategies(b: Bench, folder: Path) -> dict[str, Any]:
    """The plugin alone, under DDP, FSDP1 and FSDP2 with one rank: the same losses, never the dense model's memory."""
    from lightning_plugin import HalfbyteFSDP2Strategy, HalfbyteFSDPStrategy

    dense = write_llama(b, folder)
    single = train(b, folder)
    found: dict[str, Any] = {"dense_bytes": dense, "single": single}
    if b.cuda:  # a rank of its own here; on the CPU tests/lightning_plugin has two
        strategies = {"ddp": "ddp", "fsdp1": HalfbyteFSDPStrategy()}
        if takes_packed_rows():
            strategies["fsdp2"] = HalfbyteFSDP2Strategy()
        else:
            found["fsdp2"] = "not run: needs torch {}.{}".format(*MINIMUM_TORCH)
        for name, strategy in strategies.items():
            found[name] = train(b, folder, strategy=strategy)
            pairs = [*zip(found[name]["losses"], single["losses"], strict=True)][:4]
            assert all(abs(ours - alone) < 0.02 * alone for ours, alone in pairs), f"{name}, and alone: {pairs}"
        assert single["weights"] < 0.5 * dense, f"weights take {single['weights']} bytes, dense {dense}"
    return found


@scenario("transformers")
def one_model_on_both_devices(b: Bench, folder: Path) -> dict[str, Any]:
    """Quantized while it loads onto the device: the bytes of the CPU, never the dense model in memory, the same logits."""
    from transformers import AutoModelForCausalLM

    import peft_bridge

    dense = write_llama(b, folder)
    forget(b)
    before = torch.cuda.memory_allocated(b.device) if b.cuda else 0
    how = {"quantization_config": peft_bridge.HalfbyteConfig("nf4"), "dtype": torch.float32}
    ours = AutoModelForCausalLM.from_pretrained(folder, device_map={"": b.device}, **how).eval()
    loading = peak(b) - before
    cpu = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    state = cpu.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value.cpu(), state[name]), f"{name} differs from the CPU's"
    ids = tokens(b, 1)[:, :64]
    with torch.no_grad():
        logits, expected = ours(ids.to(b.device)).logits.float().cpu(), cpu(ids).logits.float()
    error = float((logits - expected).norm() / expected.norm())
    assert error < 1e-4, f"logits differ by {error}"
    if b.cuda:
        assert loading < 0.75 * dense, f"loading took {loading} bytes, dense weights {dense}"
    again = folder / "packed"
    ours.save_pretrained(again)
    reloaded = AutoModelForCausalLM.from_pretrained(again, device_map={"": b.device}).eval()
    with torch.no_grad():
        assert torch.equal(reloaded(ids.to(b.device)).logits.float().cpu(), logits), "a reloaded model gives other logits"
    options = {"max_new_tokens": b.size(64, 8), "use_cache": True, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    start = time.perf_counter()
    with torch.inference_mode():
        new = ours.generate(ids.to(b.device), **options).shape[1] - ids.shape[1]
    b.synchronize()
    taken = time.perf_counter() - start
    return {"dense_bytes": dense, "loading_peak": loading, "error": error, "new_tokens_s": new / taken}


class Mlp(nn.Module):
    """A gated MLP with a norm before it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(d), nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 3 * d, bias=False)
        self.down = nn.Linear(3 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


@scenario()
def compiled_as_eager(b: Bench, folder: Path) -> dict[str, Any]:
    """torch.compile without graph breaks, forward and backward, of few tokens and of many."""
    torch.manual_seed(0)
    with torch.device(b.device), halfbyte.init_quantized("nf4"):
        model = nn.Sequential(*[Mlp(b.size(1024)) for _ in range(4)]).to(BF16)
    fast = torch.compile(model, fullgraph=True)
    found = {}
    for rows in (4, b.size(700, 40)):
        x = b.randn(rows, b.size(1024)).requires_grad_()
        results = []
        for run in (model, fast):
            y = run(x)
            (dx,) = torch.autograd.grad(y.float().square().mean(), x)
            results.append((y.detach().float(), dx.float()))
        for ours, eager in zip(results[1], results[0], strict=True):
            error = float((ours - eager).norm() / eager.norm())
            assert error < 2e-2, f"{rows} rows: compiled and eager differ by {error}"
            found[f"error_{rows}"] = error
    return found


@scenario()
def born_packed(b: Bench, folder: Path) -> dict[str, Any]:
    """A model built on the device under init_quantized never takes its dense weights' memory."""
    forget(b)
    before = torch.cuda.memory_allocated(b.device) if b.cuda else 0
    previous = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device(b.device), halfbyte.init_quantized("nf4"):
            model = nn.Sequential(*[Mlp(b.size(4096)) for _ in range(6)])
    finally:
        torch.set_default_dtype(previous)
    taken = peak(b) - before
    dense = 6 * 9 * b.size(4096) ** 2 * 2
    if b.cuda:
        assert taken < 0.45 * dense, f"building took {taken} bytes, dense weights {dense}"
    return {"dense_bytes": dense, "peak": taken, "weights": halfbyte.report(model).bytes}


@scenario()
def scaled_fp16_gradients(b: Bench, folder: Path) -> dict[str, Any]:
    """fp16 autocast with a GradScaler: a step with overflowing gradients changes nothing and halves the scale."""
    torch.manual_seed(0)
    d = b.size(512)
    with torch.device(b.device), halfbyte.init_quantized("nf4"):
        base = Mlp(d)
    adapter = nn.Linear(d, d, device=b.device)
    optimizer = AdamW8bit(adapter.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(b.device.type, init_scale=2.0**10)
    x, losses = torch.randn(64, d, device=b.device), []
    for step in range(12):
        before = adapter.weight.detach().clone()
        with torch.autocast(b.device.type, torch.float16):
            loss = (base(adapter(x)).float() - x).square().mean()
        scaler.scale(loss).backward()
        if step == 5:
            adapter.weight.grad[0, 0] = float("inf")  # type: ignore[index]
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(adapter.weight, before) == (step == 5), f"step {step}"
        assert scaler.get_scale() == (scale / 2 if step == 5 else scale)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], losses
    return {"losses": losses}


def hosts(b: Bench) -> dict[str, Any]:
    """Every scenario; one that raises does not keep the others from running.

    Raises:
        AssertionError: naming the scenarios that failed, with the figures of all in `found`.
    """
    found: dict[str, Any] = {}
    failed = []
    for name, (run, needs) in SCENARIOS.items():
        missing = [need for need in needs if importlib.util.find_spec(need) is None]
        if missing:
            found[name] = f"not run: {', '.join(missing)} not installed"
        else:
            start = time.perf_counter()
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found[name] = run(b, Path(folder))
            except Exception as error:
                found[name] = f"FAIL: {type(error).__name__}: {error}"
                failed.append(f"{name}: {type(error).__name__}: {error}")
            else:
                found[name]["total_s"] = time.perf_counter() - start
        print(f"  {name}: {found[name]}", flush=True)
    if failed:
        error = AssertionError("; ".join(failed))
        error.found = found  # type: ignore[attr-defined]
        raise error
    return found
