"""cache_dir: the second load quantizes nothing, and nothing that happens to the cache or its source gives wrong weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from checkpoints import Net, check, on_meta
from safetensors.torch import load_file, save_file

from halfbyte import QuantizationError, load_quantized
from halfbyte.checkpoint import cache as cache_module
from halfbyte.checkpoint import files, sources


def load(dense: Path, **arguments) -> Net:
    model = on_meta()
    load_quantized(model, dense, cache_dir=dense.parent / "cache", progress=False, **arguments)
    return model


@pytest.fixture
def quantizations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Formats of every call that quantizes."""
    calls: list[str] = []
    original = sources.quantize_

    def counted(packed, input, format):
        calls.append(str(format))
        original(packed, input, format)

    monkeypatch.setattr(sources, "quantize_", counted)
    return calls


def shard(dense: Path) -> Path:
    (file,) = (dense.parent / "cache").glob("*/*.safetensors")
    return file


def test_the_second_load_quantizes_nothing_and_opens_no_shard_of_the_source_twice(dense, quantizations) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(load(dense))
        assert len(quantizations) == 9
        check(load(dense))
        check(load(dense, device="cpu"))
        assert len(quantizations) == 9
        check(load(dense, format="fp4"), "fp4")  # an entry of its own
        check(load(dense))
    assert len(quantizations) == 18
    assert len(list((dense.parent / "cache").iterdir())) == 2


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_a_changed_source_is_another_source(dense, quantizations, verify) -> None:
    check(load(dense, verify=verify))
    file = dense / "model-00002-of-00002.safetensors"
    state = load_file(file)
    state["layers.2.down.weight"] *= 2
    before = file.stat()
    save_file(state, file)
    if verify == "full":  # same size, same time: only the content differs
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    model = load(dense, verify=verify)
    plain = on_meta()
    load_quantized(plain, dense, progress=False)
    assert torch.equal(model.layers[2].down.weight, plain.layers[2].down.weight)
    assert len(quantizations) == 27


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: flip(file, -200),
        lambda file: flip(file, 100),
        lambda file: flip(file, 2000),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes()[:50]),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
        lambda file: (file.parent / files.INDEX).write_text("{"),
        lambda file: (file.parent / files.INDEX).write_text(json.dumps({"weight_map": {}})),
    ],
    ids=["data", "header", "header 2", "short", "no header", "empty", "gone", "index", "empty index"],
)
def test_damage_is_one_warning_and_a_new_entry(dense, quantizations, harm) -> None:
    check(load(dense))
    harm(shard(dense))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(load(dense))
    assert ["is damaged" in str(w.message) for w in caught] == [True]
    quantizations.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(load(dense))
    assert not quantizations
    assert len(list((dense.parent / "cache").iterdir())) == 1


def test_an_entry_that_was_made_from_something_else_is_not_used(dense, quantizations) -> None:
    check(load(dense))
    mine = shard(dense).parent
    check(load(dense, format="fp4"), "fp4")
    (other,) = (folder for folder in mine.parent.iterdir() if folder != mine)
    shutil.rmtree(mine)
    other.rename(mine)  # rows of fp4 have the sizes of nf4
    with pytest.warns(UserWarning, match="it was made from something else"):
        check(load(dense))


def test_a_damaged_cache_of_a_source_that_is_gone_too_is_an_error(dense) -> None:
    check(load(dense))
    flip(shard(dense), -200)
    original = sources.CheckpointSource.fill

    def gone(self, entry, start, stop, out):
        if self.checkpoint.path == dense.resolve():
            raise OSError("the source's disk is gone")
        original(self, entry, start, stop, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.CheckpointSource, "fill", gone)
        with pytest.warns(UserWarning, match="damaged"), pytest.raises(OSError, match="the source's disk is gone"):
            load(dense)
    shutil.rmtree(dense)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load(dense)


def test_a_cache_that_can_not_be_written_is_no_error(dense) -> None:
    (dense.parent / "cache").write_text("a file")
    with pytest.warns(UserWarning, match="could not be written"):
        check(load(dense))


def test_a_faster_writer_wins_and_nothing_of_ours_is_left(dense, monkeypatch) -> None:
    original = cache_module.write_folder

    def slow(folder, *args, **kwargs):
        monkeypatch.setattr(cache_module, "write_folder", original)
        check(load(dense))  # another process, meanwhile
        return original(folder, *args, **kwargs)

    monkeypatch.setattr(cache_module, "write_folder", slow)
    check(load(dense))
    assert len(list((dense.parent / "cache").iterdir())) == 1


WRITER = """
import sys, warnings; sys.path[:0] = sys.argv[2:4]
warnings.simplefilter("error")
from pathlib import Path
from checkpoints import check, on_meta
from halfbyte import load_quantized
for _ in range(5):
    model = on_meta()
    load_quantized(model, Path(sys.argv[1]), cache_dir=Path(sys.argv[1]).parent / "cache", progress=False)
    check(model)
"""


def test_concurrent_writers_and_readers(dense) -> None:
    root = Path(__file__).parents[2]
    arguments = [sys.executable, "-c", WRITER, str(dense), str(root), str(Path(__file__).parent)]
    runs = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for run in runs:
        _, text = run.communicate(timeout=90)
        assert run.returncode == 0, text[-2000:]
    assert len(list((dense.parent / "cache").iterdir())) == 1


def test_a_source_that_changes_while_it_is_read_is_an_error(dense) -> None:
    original, file = sources.CheckpointSource.fill, dense / "model-00001-of-00002.safetensors"

    def meanwhile(self, *arguments):
        original(self, *arguments)
        os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.CheckpointSource, "fill", meanwhile)
        with pytest.raises(QuantizationError, match="was changed while it was being read"):
            load_quantized(on_meta(), dense, progress=False)
        with pytest.raises(QuantizationError, match="was changed while it was being read"):
            load(dense)
    assert not list((dense.parent / "cache").glob("*"))
