"""Run by test_loading.py on every rank: loads that succeed, equal to one process byte for byte, and loads that fail."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import halfbyte
from halfbyte import reference
from halfbyte.checkpoint import files, sources
from halfbyte.distributed import fully_shard, loading, quantize_broadcast, quantize_scatter
from halfbyte.nn import QuantLinear

WIDTH, HIDDEN = 96, 33


class Block(nn.Module):
    """Rows that ranks can't share evenly (33), one row (the second rank has none), a bias, a norm, a scalar buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.norm(input)
        return input + torch.sigmoid(self.gate(hidden)) * self.down(torch.relu(self.up(hidden))) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 51, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


def built(format: str = "nf4") -> Model:
    with torch.device("meta"), halfbyte.init_quantized(format):
        return Model()


def values() -> dict[str, Tensor]:
    torch.manual_seed(7)
    state = Model().state_dict()
    del state["lm_head.weight"]
    drawn = {name: torch.randn(value.shape) for name, value in state.items()}
    return {name: value.bfloat16() if "up" in name else value for name, value in drawn.items()}


def expected(format: str = "nf4") -> dict[str, Tensor]:
    """What a model must hold, by the reference and by plain casts."""
    found: dict[str, Tensor] = {}
    model = Model()
    for name, value in values().items():
        owner = model.get_submodule(name.rpartition(".")[0])
        packed = isinstance(owner, nn.Linear) and name.endswith("weight")
        found[name] = reference.quantize(value, format) if packed else value.to(model.state_dict()[name].dtype)
    found["lm_head.weight"] = found["embedding.weight"]
    return found


def gathered(model: nn.Module) -> dict[str, Tensor]:
    state = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        state[name] = full.detach()
    return state


def check(model: nn.Module, format: str = "nf4") -> None:
    wanted, found = expected(format), gathered(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def raises(text: str, call: Any, within: float = 10.0) -> None:
    """`call` raises on this rank, in time, with `text`; afterwards the training group works."""
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError, OSError), match=re.escape(text)) as caught:
        call()
    took = time.monotonic() - start
    assert took < within, took
    print(f"RAISED {took:.2f} s: {str(caught.value)[:200]}", flush=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def on_source(monkey: Any, after: int, act: Any) -> Any:
    """Makes the source's `after`-th fill act; returns what undoes it."""
    original, calls = monkey.fill, [0]

    def fill(self: Any, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == after:
            act()
        original(self, *args)

    monkey.fill = fill

    def undo() -> None:
        monkey.fill = original

    return undo


def fail() -> None:
    raise OSError("disk read error (injected)")


def die() -> None:
    print(f"DIES AT {time.time():.2f}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def successes(folder: Path) -> None:
    path, rank = folder / "dense", dist.get_rank()
    opened: list[str] = []
    original = files.Checkpoint.__init__

    def counted(self: Any, where: Any) -> None:
        opened.append(str(where))
        original(self, where)

    files.Checkpoint.__init__ = counted  # type: ignore[method-assign]
    loading.BUCKET_BYTES = 4096  # many buckets, and rows of an entry in several
    for model in (built(), Model(), built()):
        if rank and isinstance(model.layers[0].up, QuantLinear) is False:
            for parameter in model.parameters():
                parameter.data.zero_()
        halfbyte.load_quantized(model, path if rank == 0 else "nowhere", progress=False)
        check(model)
    assert bool(opened) is (rank == 0), opened
    tokens = torch.arange(20)[None]
    wanted = model(tokens)
    model = fully_shard(built(), checkpointing=False)
    halfbyte.load_quantized(model, path, source_rank=1, progress=False)
    assert torch.equal(model(tokens), wanted)  # FSDP2 works with the parameters that it was given
    model(tokens).sum().backward()
    assert model.layers[0].norm.weight.grad is not None
    assert not model.layers[0].gate.weight.to_local().numel() or rank == 0
    check(model)
    other = fully_shard(built(), checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.to_empty(device="cpu")  # as Lightning does: memory that exists is filled in place
        for _ in range(2):  # written, then read
            halfbyte.load_quantized(other, path, cache_dir=folder / "cache", progress=False)
            check(other)
    source = values() if rank == 0 else None
    dense = None if source is None else {name: value for name, value in source.items() if value.dim() == 2}
    packed = quantize_broadcast(dense, "nf4-dq:32", bucket_bytes=1000)
    share = quantize_scatter(dense, "nf4-dq:32", bucket_bytes=1000)
    for name, value in values().items():
        if value.dim() != 2:
            continue
        rows = reference.quantize(value, "nf4-dq:32")
        assert torch.equal(packed[name], rows), name
        assert torch.equal(share[name], rows[slice(*halfbyte.ops.broadcast.shard_rows(len(rows), 2, rank))]), name
    rows = reference.quantize(values()["layers.0.up.weight"], "nf4")
    mine = torch.empty_like(rows)
    halfbyte.ops.quantize_broadcast_(mine, values()["layers.0.up.weight"] if rank == 1 else None, source_rank=1)
    assert torch.equal(mine, rows)
    mine = torch.empty_like(rows[17 * rank : 17 * rank + 17])
    halfbyte.ops.quantize_scatter_(mine, values()["layers.0.up.weight"] if rank == 1 else None, source_rank=1)
    assert torch.equal(mine, rows[17 * rank : 17 * rank + 17])
    files.Checkpoint.__init__ = original  # type: ignore[method-assign]


def failures(folder: Path) -> None:
    path, rank = folder / "dense", dist.get_rank()

    def load(where: Path = path, model: Any = None, **arguments: Any) -> None:
        halfbyte.load_quantized(model or built(), where, progress=False, **arguments)

    raises("no checkpoint at", lambda: load(folder / "nowhere"))
    raises("truncated", lambda: load(folder / "truncated"))
    raises("ranks differ in format", lambda: load(format="nf4" if rank else "fp4", model=Model()))
    raises("ranks differ in model", lambda: load(model=built("nf4" if rank else "fp4")))
    raises("lazy=True works in one process", lambda: load(lazy=True))
    raises("embedding.weight: has shape (51, 96) in the checkpoint", lambda: load(model=nn.ModuleDict(wider(rank))))
    for after in (1, 9):
        undo = on_source(sources.CheckpointSource, after, fail)
        raises("disk read error (injected)", load)
        undo()
    if rank == 1:  # a receiver that can't keep what it got
        original = sources.Entry.row_nbytes
        from halfbyte.checkpoint import layout

        write = layout.Slot.write
        layout.Slot.write = lambda self, first, data: fail()  # type: ignore[method-assign,assignment]
    raises("disk read error (injected)", load)
    if rank == 1:
        layout.Slot.write = write  # type: ignore[method-assign]
        assert original is sources.Entry.row_nbytes
    loading.ALIVE_S = 0.2
    loading.TIMEOUT_S = 1.0
    undo = on_source(sources.CheckpointSource, 3, lambda: time.sleep(2.5))  # slow is not dead
    model = built()
    load(model=model)
    undo()
    check(model)
    loading.TIMEOUT_S = 8.0
    damage(folder / "cache")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(built(), checkpointing=False)
        load(model=model, cache_dir=folder / "cache")
        check(model)
    assert [str(w.message) for w in caught if "is damaged" in str(w.message)].__len__() == (1 if rank == 0 else 0)


def wider(rank: int) -> dict[str, nn.Module]:
    with torch.device("meta"):
        model = Model()
        model.embedding = nn.Embedding(52, WIDTH)
    return dict(model.named_children())


def damage(cache: Path) -> None:
    if dist.get_rank() == 0:
        for file in cache.glob("*/model-*.safetensors"):
            content = bytearray(file.read_bytes())
            content[-100] ^= 4
            file.write_bytes(content)


def deaths(folder: Path, case: str) -> None:
    rank = dist.get_rank()
    loading.BUCKET_BYTES = 4096
    victim = 0 if case.startswith("source") else 1
    if rank == victim:
        if case == "source-before":
            files.Checkpoint.__init__ = lambda *_: die()  # type: ignore[method-assign,assignment]
        elif case == "source-during":
            on_source(sources.CheckpointSource, 9, die)
        elif case == "source-after":
            loading.LoaderGroup.finish = lambda self: die()  # type: ignore[method-assign]
        else:
            from halfbyte.checkpoint import layout

            write, calls = layout.Slot.write, [0]

            def dying(self: Any, first: int, data: Tensor) -> None:
                calls[0] += 1
                if calls[0] == 5:
                    die()
                write(self, first, data)

            layout.Slot.write = dying  # type: ignore[method-assign]
    try:
        halfbyte.load_quantized(built(), folder / "dense", progress=False, cache_dir=folder / "cache")
    except Exception as error:
        print(f"RAISED AT {time.time():.2f}: {str(error)[:200]}", flush=True)
        os._exit(0)
    raise AssertionError("did not raise")


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        (folder / "dense").mkdir(exist_ok=True)
        (folder / "truncated").mkdir(exist_ok=True)
        save_file(values(), folder / "dense" / "model.safetensors")
        whole = (folder / "dense" / "model.safetensors").read_bytes()
        (folder / "truncated" / "model.safetensors").write_bytes(whole[:-1000])
    dist.barrier()
    if mode == "hybrid":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sharded = fully_shard(built(), mesh=mesh, checkpointing=False)
        halfbyte.load_quantized(sharded, folder / "dense", progress=False)
        check(sharded)
        assert sharded.layers[0].up.weight.to_local().shape[0] == (17, 16)[dist.get_rank() % 2]
        print("DONE", flush=True)
        dist.destroy_process_group()
    elif mode == "loads":
        successes(folder)
        failures(folder)
        print("DONE", flush=True)
        dist.destroy_process_group()
    else:
        deaths(folder, mode)
