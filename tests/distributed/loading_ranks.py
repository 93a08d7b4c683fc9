"""Run by test_loading.py on every rank: loads that succeed, equal to one process byte for byte. faults.py has the others."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checkpoints import Net, check, on_meta, values, write_dense
from fault_cases import flip
from ranks import gloo_group

import halfbyte
from halfbyte import reference
from halfbyte.checkpoint import files, sources
from halfbyte.distributed import connections, fully_shard, loading, quantize_broadcast, quantize_scatter
from halfbyte.nn import QuantLinear


def successes(folder: Path) -> None:
    path, rank = folder / "dense", dist.get_rank()
    opened: list[str] = []
    original = files.Checkpoint.__init__

    def counted(self: Any, where: Any) -> None:
        opened.append(str(where))
        original(self, where)

    files.Checkpoint.__init__ = counted  # type: ignore[method-assign]
    loading.BUCKET_BYTES = 4096  # many buckets, and rows of an entry in several
    for model in (on_meta("nf4"), Net(), on_meta("nf4")):
        if rank and isinstance(model.layers[0].up, QuantLinear) is False:
            for parameter in model.parameters():
                parameter.data.zero_()
        halfbyte.load_quantized(model, path if rank == 0 else "nowhere", progress=False)
        check(model)
    assert bool(opened) is (rank == 0), opened
    tokens = torch.arange(20)[None]
    wanted = model(tokens)
    model = fully_shard(on_meta("nf4"), checkpointing=False)
    halfbyte.load_quantized(model, path, source_rank=1, progress=False)
    assert torch.equal(model(tokens), wanted)  # FSDP2 works with the parameters that it was given
    model(tokens).sum().backward()
    assert model.layers[0].norm.weight.grad is not None
    assert not model.layers[0].gate.weight.to_local().numel() or rank == 0
    check(model)
    other = fully_shard(on_meta("nf4"), checkpointing=False)
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


def a_slow_source_is_not_a_dead_one(folder: Path) -> None:
    original, calls = sources.CheckpointSource.fill, [0]

    def slow(self: object, *arguments: object) -> None:
        calls[0] += 1
        if calls[0] == 3:
            time.sleep(2.5)
        original(self, *arguments)

    with (
        patch.object(sources.CheckpointSource, "fill", slow),
        patch.object(loading, "ALIVE_S", 0.2),
        patch.object(connections, "TIMEOUT_S", 1.0),
    ):
        model = on_meta("nf4")
        halfbyte.load_quantized(model, folder / "dense", progress=False)
        check(model)


def filling_and_sending_overlap(folder: Path) -> None:
    """Both made slow: while one bucket is sent, the next is filled. A bar counts the bytes, on the source alone."""
    fill, scatter = sources.CheckpointSource.fill, connections.LoaderGroup.scatter
    spans: dict[str, list[tuple[float, float]]] = {"filled": [], "sent": []}
    bars: list[Any] = []

    def slowly(original: Any, name: str) -> Any:
        def call(self: Any, *arguments: Any) -> None:
            begun = time.monotonic()
            time.sleep(0.01)
            original(self, *arguments)
            spans[name].append((begun, time.monotonic()))

        return call

    class Bar:
        def __init__(self, total: int, **_: Any) -> None:
            self.total, self.count = total, 0
            bars.append(self)

        def update(self, count: int) -> None:
            self.count += count

        def close(self) -> None:
            pass

    with (
        patch.object(sources.CheckpointSource, "fill", slowly(fill, "filled")),
        patch.object(connections.LoaderGroup, "scatter", slowly(scatter, "sent")),
        patch("tqdm.auto.tqdm", Bar),
    ):
        model = fully_shard(on_meta("nf4"), checkpointing=False)
        halfbyte.load_quantized(model, folder / "dense")
        check(model)
    assert len(bars) == (1 if dist.get_rank() == 0 else 0)
    if bars:
        assert bars[0].count == bars[0].total > 0
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans["filled"] for c, d in spans["sent"])
        assert both > 0.25 * sum(b - a for a, b in spans["sent"]), spans  # one after the other: 0


def a_damaged_cache_under_fsdp2(folder: Path) -> None:
    if dist.get_rank() == 0:
        flip(folder)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(on_meta("nf4"), checkpointing=False)
        halfbyte.load_quantized(model, folder / "dense", cache_dir=folder / "cache", progress=False)
        check(model)
    assert len([w for w in caught if "is damaged" in str(w.message)]) == (1 if dist.get_rank() == 0 else 0)


if __name__ == "__main__":
    mode, folder = sys.argv[1], Path(sys.argv[2])
    with gloo_group() as rank:
        if rank == 0:
            write_dense(folder / "dense")
        dist.barrier()
        if mode == "hybrid":
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            sharded = fully_shard(on_meta("nf4"), mesh=mesh, checkpointing=False)
            halfbyte.load_quantized(sharded, folder / "dense", progress=False)
            check(sharded)
            assert sharded.layers[0].up.weight.to_local().shape[0] == (17, 16)[rank % 2]
        else:
            successes(folder)
            a_slow_source_is_not_a_dead_one(folder)
            filling_and_sending_overlap(folder)
            a_damaged_cache_under_fsdp2(folder)
        print("DONE", flush=True)
