"""quantize_checkpoint: equal to loading, interrupted at any point, on a full disk, with little memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import check, on_meta, values
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from halfbyte import QuantizationError, load_quantized, reference
from halfbyte.checkpoint import folder as folder_module
from halfbyte.checkpoint import quantize_checkpoint
from halfbyte.checkpoint.folder import plan_shards
from halfbyte.checkpoint.sources import Entry

ROOT = Path(__file__).parents[2]


def quantize(dense: Path, out: Path, **arguments):
    return quantize_checkpoint(dense, out, **{"model": on_meta(), "progress": False, **arguments})


def loaded(out: Path, format: str = "nf4") -> None:
    model = on_meta()
    load_quantized(model, out, progress=False)
    check(model, format)


@pytest.mark.parametrize("limit", [5 << 30, 3000])
def test_the_folder_is_what_loading_gives(dense, tmp_path, limit) -> None:
    (dense / "config.json").write_text(json.dumps({"model_type": "x"}))
    (dense / "tokenizer.json").write_text("{}")
    (dense / "pytorch_model.bin").write_text("not copied")
    planned = quantize(dense, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    report = quantize(dense, tmp_path / "out", max_shard_bytes=limit)
    assert report == planned
    loaded(tmp_path / "out")
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(shards) > 4) is (limit == 3000)
    data = sum(t.numel() * t.element_size() for file in shards for t in load_file(file).values())
    assert data == report.bytes
    assert len(report.quantized) == 9 and report.dense_bytes == sum(t.numel() * t.element_size() for t in values().values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "nf4" and config["model_type"] == "x"
    names = {file.name for file in (tmp_path / "out").iterdir()} - {file.name for file in shards}
    assert names == {"config.json", "tokenizer.json", "model.safetensors.index.json"}


def test_a_mapping_and_names(tmp_path) -> None:
    names = [name.removesuffix(".weight") for name in values() if re.search(r"(up|down|gate)\.weight", name)]
    report = quantize_checkpoint(values(), tmp_path / "out", "int8", linears=names, progress=False)
    assert len(report.quantized) == 9
    loaded(tmp_path / "out", "int8")


def test_embeddings_and_skips(tmp_path) -> None:
    save_file({"0.weight": torch.randn(40, 64), "1.weight": torch.randn(8, 64)}, tmp_path / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Embedding(40, 64), torch.nn.Linear(64, 8, bias=False))
    report = quantize_checkpoint(
        tmp_path / "model.safetensors", tmp_path / "out", model=model, skip=("1",), embedding_format="int8", progress=False
    )
    assert report.quantized == ("0.weight",)
    assert {row.name: row.reason for row in report.rows if row.reason} == {"1.weight": "skip='1'"}
    load_quantized(model, tmp_path / "out", progress=False)
    table = load_file(tmp_path / "model.safetensors")["0.weight"]
    assert torch.equal(model[0].weight, reference.quantize(table, "int8"))


def test_refusals(dense, tmp_path) -> None:
    with pytest.raises(TypeError, match="give model or linears"):
        quantize_checkpoint(dense, tmp_path / "out")
    with pytest.raises(QuantizationError, match="nothing would be quantized"):
        quantize_checkpoint(dense, tmp_path / "out", linears=["up"])
    quantize(dense, tmp_path / "out")
    with pytest.raises(NotImplementedError, match="is quantized already"):
        quantize(tmp_path / "out", tmp_path / "again")
    with pytest.raises(FileExistsError, match="holds another checkpoint"):
        quantize(dense, tmp_path / "out", format="int8")
    with pytest.raises(FileExistsError, match="holds another checkpoint"):
        quantize(dense, dense)
    loaded(tmp_path / "out")


def test_no_room_is_said_before_anything_is_written(dense, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 12345})())
    with pytest.raises(OSError, match=r"needs 1.1 MB, 0.0 MB are free; nothing was written"):
        quantize(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


FULL = """
import resource, signal, sys; sys.path[:0] = sys.argv[3:5]
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from checkpoints import on_meta
from halfbyte.checkpoint import quantize_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[5]), resource.RLIM_INFINITY))
quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), model=on_meta(), progress=False, max_shard_bytes=15000)
"""


def test_a_full_disk_loses_nothing(dense, tmp_path) -> None:
    def run(limit: int) -> subprocess.CompletedProcess[str]:
        paths = [str(dense), str(tmp_path / "out"), str(ROOT), str(Path(__file__).parent)]
        return subprocess.run(
            [sys.executable, "-c", FULL, *paths, str(limit)], capture_output=True, text=True, timeout=90, check=False
        )

    before = {file: file.read_bytes() for file in dense.iterdir()}
    done = run(16000)  # the embedding's shard is larger
    assert done.returncode == 1
    assert re.search(r"File too large: .*model-00002-of-00004.safetensors needs 0.0 MB; finished shards are", done.stderr)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model-00001-of-00004.safetensors"]
    assert not list((tmp_path / "out").glob(".*"))
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    with pytest.raises(FileNotFoundError):
        loaded(tmp_path / "out")
    assert {file: file.read_bytes() for file in dense.iterdir()} == before
    done = run(10**6)
    assert done.returncode == 0, done.stderr
    loaded(tmp_path / "out")


def test_killed_at_any_point_it_goes_on_where_it_was(dense, tmp_path, monkeypatch) -> None:
    """Every shard in turn is the one that is never finished; finished ones aren't written again."""
    original = folder_module.write_shard
    written: list[str] = []

    def dies_at(number: int):
        def write(file, *args):
            if len(written) == number:
                left = folder_module.temporary_of(file).name.replace(str(os.getpid()), "99999999")
                (file.parent / left).write_bytes(b"half")  # what a kill leaves
                raise KeyboardInterrupt
            written.append(file.name)
            original(file, *args)

        return write

    total = None
    for number in range(20):
        monkeypatch.setattr(folder_module, "write_shard", dies_at(number + 1 if number else 0))
        try:
            quantize(dense, tmp_path / "out", max_shard_bytes=3000)
            total = len(written)
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert total == len(set(written)) > 4
    loaded(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*"))


def test_a_finished_shard_that_was_damaged_meanwhile_is_written_again(dense, tmp_path) -> None:
    out = tmp_path / "out"
    quantize(dense, out, max_shard_bytes=3000)
    (out / "model.safetensors.index.json").unlink()
    file = sorted(out.glob("*.safetensors"))[2]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    # A file that is replaced gets another inode; its time may be the same, within a tick of the clock that stamps files.
    inodes = {f: f.stat().st_ino for f in out.glob("*.safetensors")}
    quantize(dense, out, max_shard_bytes=3000)
    loaded(out)
    assert [f for f, before in inodes.items() if f.stat().st_ino != before] == [file]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(1, 800))
def test_shards_hold_every_entry_once_and_respect_the_limit(sizes: list[int], limit: int) -> None:
    entries = [Entry(str(i), (size,), torch.uint8) for i, size in enumerate(sizes)]
    shards = plan_shards(entries, limit)
    assert [entry for shard in shards for entry in shard] == entries
    assert all(sum(e.nbytes for e in shard) <= limit or len(shard) == 1 for shard in shards)


MEMORY = """
import sys, threading, time; sys.path.insert(0, sys.argv[2])
import torch
from pathlib import Path
from halfbyte.checkpoint import quantize_checkpoint
torch.set_num_threads(1)
def anonymous(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) << 10
quantize_checkpoint({"a.weight": torch.randn(64, 64)}, Path(sys.argv[1]) / "warm", linears=["a"], progress=False)
peak, stop, before = [0], threading.Event(), anonymous()
def watch():
    while not stop.wait(0.002): peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch); thread.start()
quantize_checkpoint(Path(sys.argv[1]) / "big", Path(sys.argv[1]) / "out", linears=["a", "b"], progress=False)
stop.set(); thread.join()
print(peak[0] - before)
"""


def test_memory_is_a_few_pieces_not_a_tensor(tmp_path) -> None:
    (tmp_path / "big").mkdir()
    state = {name: torch.zeros(4096, 8192, dtype=torch.bfloat16) for name in ("a.weight", "b.weight")}  # 64 MiB each
    save_file(state, tmp_path / "big" / "model.safetensors")
    del state
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(ROOT)], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 40 << 20  # two pieces of 8 MiB, and what the allocator keeps; a tensor is 64 (fp32: 128)
