"""load_quantized in one process: every kind of source into every kind of model, and what does not fit."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import Net, check, expected, on_meta, values
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import halfbyte
from halfbyte import QuantizationError, load_quantized, reference, save_quantized
from halfbyte.checkpoint import bitsandbytes, files
from halfbyte.nn import QuantEmbedding, QuantLinear


def born(format: str = "nf4") -> Net:
    with halfbyte.init_quantized(format):
        return Net()


@pytest.mark.parametrize("build", [on_meta, Net, born])
def test_a_dense_folder_into_any_model(dense: Path, build) -> None:
    model = build()
    report = load_quantized(model, dense, progress=False)
    check(model)
    assert len(report.quantized) == 9
    tokens = torch.arange(8)[None]
    other = Net()
    other.load_state_dict({**values(), "lm_head.weight": values()["embedding.weight"]})
    halfbyte.quantize_model(other)
    assert torch.equal(model(tokens), other(tokens))


@pytest.mark.parametrize("format", ["fp4", "nf4:32", "nf4-dq", "int8", "fp8"])
def test_every_format(dense: Path, format: str) -> None:
    model = on_meta()
    load_quantized(model, dense, format, compute_dtype="float32", progress=False)
    check(model, format)
    assert model.layers[0].up.compute_dtype == torch.float32


def test_parameters_keep_what_the_model_decided(dense: Path) -> None:
    model = Net().to(torch.bfloat16)
    model.layers[1].norm.requires_grad_(False)
    norm = model.layers[1].norm.weight
    load_quantized(model, dense, progress=False)
    assert model.layers[1].norm.weight is norm and not norm.requires_grad  # in place: optimizers may know it
    assert model.layers[0].norm.weight.requires_grad
    assert torch.equal(norm, values()["layers.1.norm.weight"].bfloat16())
    assert torch.equal(model.layers[0].up.weight, expected()["layers.0.up.weight"])  # from the file's own dtype


def test_pieces_smaller_than_a_tensor(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.checkpoint import folder, load, sources

    for module, name in ((sources, "_SCRATCH"), (folder, "_CHUNK"), (load, "_CHUNK"), (files, "_CHUNK")):
        monkeypatch.setattr(module, name, 100)
    model = on_meta()
    load_quantized(model, dense, progress=False)
    check(model)
    save_quantized(model, dense.parent / "out")
    other = on_meta()
    load_quantized(other, dense.parent / "out", progress=False)
    check(other)


def test_saved_folders_come_back_and_plain_readers_read_them(dense: Path, tmp_path: Path) -> None:
    model = on_meta()
    load_quantized(model, dense, "nf4-dq", progress=False)
    model.layers[2].down = QuantLinear(33, 96, bias=False, format="int8")  # formats may be mixed
    save_quantized(model, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    plain = load_file(file)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(plain[name], value), name
    with safe_open(file, "pt") as stream:
        header = json.loads(stream.metadata()["halfbyte"])
    assert header["version"] == files.VERSION
    assert header["tensors"]["layers.0.up.weight"].keys() == {"format", "in_features", "checksum"}
    assert header["tensors"]["layers.2.down.weight"]["format"] == "int8"
    for build in (on_meta, Net):
        other = build()
        load_quantized(other, tmp_path / "out", progress=False)
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


def test_saving_again_replaces_and_keeps_other_files(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for format in ("nf4", "int8", "fp4"):
        model = on_meta()
        load_quantized(model, dense, format, progress=False)
        save_quantized(model, folder)
        (folder / "tokenizer.json").write_text("{}")
        other = on_meta()
        load_quantized(other, folder, progress=False)
        check(other, format)
        assert len(list(folder.glob("*.safetensors"))) == 1
        assert not list(folder.glob(".*"))
    assert (folder / "tokenizer.json").exists()


def test_a_config_may_name_the_weights(dense: Path, tmp_path: Path) -> None:
    (dense / "model.safetensors.index.json").rename(dense / "other.safetensors.index.json")
    save_file({"nothing": torch.zeros(1)}, dense / "model.safetensors")
    (dense / "config.json").write_text('{"transformers_weights": "other.safetensors.index.json"}')
    model = Net()
    load_quantized(model, dense, "nf4", progress=False)
    check(model)
    for outside in ("../dense/model.safetensors", str(dense / "model.safetensors")):
        (dense / "config.json").write_text(json.dumps({"transformers_weights": outside}))
        with pytest.raises(QuantizationError, match="names '.*model.safetensors' as weights, which is not in the folder"):
            load_quantized(Net(), dense, progress=False)


KILLED = """
import os, pathlib, signal, sys; sys.path[:0] = sys.argv[2:4]
import torch
from test_load import configured
from halfbyte import save_quantized
torch.set_num_threads(1)  # no threads that a fork would lose
model, calls = configured("fp4"), [0]
def deadly(original, last):
    def call(*arguments, **keywords):
        calls[0] += 1
        if calls[0] > last:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)
    return call
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if child == 0:
        for owner, name in ((os, "replace"), (pathlib.Path, "unlink")):
            setattr(owner, name, deadly(getattr(owner, name), int(folder.name)))
        save_quantized(model, folder)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class _Config(SimpleNamespace):
    def to_dict(self) -> dict:
        return dict(vars(self))


def configured(format: str) -> nn.Module:
    """A small model with a config, as transformers' have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    halfbyte.quantize_model(model, format)
    model.config = _Config(made_for=format, architectures=["Net"])
    return model


@pytest.mark.parametrize("single", [False, True])
def test_killed_between_any_two_steps_a_folder_is_the_old_one_or_the_new_one(tmp_path: Path, single: bool) -> None:
    """config.json and weights are never of two saves; `single`: the old one is a file as transformers writes it."""
    for steps in range(12):
        folder = tmp_path / f"{steps:02}"
        save_quantized(configured("int8"), folder)
        if single:
            (file,) = folder.glob("model-*")
            file.rename(folder / "model.safetensors")
            (folder / "model.safetensors.index.json").unlink()
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=90, check=False)
    codes = [int(line) for line in done.stdout.split()]
    assert set(codes) == {-signal.SIGKILL, 0} and codes == sorted(codes), (codes, done.stderr)
    seen = []
    for folder in sorted(tmp_path.iterdir()):
        with files.Checkpoint(folder) as found:
            formats = {str(stored.format) for stored in found if stored.format}
            assert formats == {found.config["made_for"]} == {found.config["quantization_config"]["format"]}
        seen += formats
        model = configured(*formats)
        model[0].weight.zero_()
        load_quantized(model, folder, progress=False)
        assert torch.equal(model[0].weight, configured(*formats)[0].weight)
        save_quantized(configured("nf4"), folder)  # after which nothing of the killed one is left
        (file,) = folder.glob("*.safetensors")
        assert {f.name for f in folder.iterdir()} == {"config.json", "model.safetensors.index.json", file.name}
        assert json.loads((folder / "config.json").read_text())["made_for"] == "nf4"
    assert seen == sorted(seen, reverse=True) and seen.count("int8") > 2 and seen.count("fp4") > codes.count(0)


def test_packed_embeddings_and_layers_that_stayed_dense(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    halfbyte.quantize_model(model, "nf4", skip=("2",), embedding_format="int8")
    save_quantized(model, tmp_path)
    other = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    report = load_quantized(other, tmp_path, progress=False)
    assert type(other[0]) is QuantEmbedding and type(other[1]) is QuantLinear and type(other[2]) is nn.Linear
    assert {row.name: row.reason for row in report.rows if row.reason} == {"2": "dense in the checkpoint"}
    assert torch.equal(other(torch.arange(5)), model(torch.arange(5)))
    skipping = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    load_quantized(skipping, tmp_path, skip=("1",), progress=False)  # rows that are to be dense are decoded
    assert type(skipping[1]) is nn.Linear
    assert torch.equal(skipping[1].weight, reference.dequantize(model[1].weight, "nf4", 64, torch.float32))


@pytest.mark.parametrize("K", [64, 96])
def test_bitsandbytes_files(tmp_path: Path, K: int) -> None:
    packed = halfbyte.quantize(torch.randn(32, 64), "nf4")
    stored = bitsandbytes.write_layer(packed, "nf4", 64, "0", dtype=torch.bfloat16)
    if K == 96:  # blocks that cross rows: 32 x 64 weights read as a (64, 32)... layer of other rows
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 32]}
        stored["0.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    eight = halfbyte.quantize(torch.randn(8, 64), "int8")
    stored |= bitsandbytes.write_layer(eight, "int8", 64, "1", dtype=torch.bfloat16)
    save_file({**stored, "2.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    first = nn.Linear(32, 64, bias=False) if K == 96 else nn.Linear(64, 32, bias=False)
    model = nn.Sequential(first, nn.Linear(64, 8, bias=False), nn.LayerNorm(64, bias=False))
    report = load_quantized(model, tmp_path, progress=False)
    assert torch.equal(model[1].weight, eight)
    if K == 64:
        assert torch.equal(model[0].weight, packed)
    else:
        assert "cross rows of 32" in next(row.reason for row in report.rows if row.name == "0")
        assert torch.equal(model[0].weight.view(32, 64), reference.dequantize(packed, "nf4", 64, torch.float32))


def test_what_does_not_fit_is_named(dense: Path, tmp_path: Path) -> None:
    model = on_meta()
    model.extra = nn.LayerNorm(3)
    with pytest.raises(QuantizationError, match=r"extra.weight: missing from the checkpoint") as caught:
        load_quantized(model, dense, progress=False)
    assert caught.value.names == ("extra.weight", "extra.bias")
    model = on_meta()
    del model.layers[2]
    with pytest.raises(QuantizationError, match=r"layers.2.down.weight: not in the model"):
        load_quantized(model, dense, progress=False)
    model = on_meta()
    model.layers[1].up = nn.Linear(97, 33)
    with pytest.raises(QuantizationError, match=r"layers.1.up.weight: has shape \(33, 96\) in the checkpoint, \(33, 97\)"):
        load_quantized(model, dense, progress=False)
    with pytest.raises(QuantizationError, match=r"the module is nf4 already, format='int8' was asked for"):
        load_quantized(born(), dense, "int8", progress=False)
    with pytest.raises(ValueError, match="verify must be 'fast' or 'full', got 'slow'"):
        load_quantized(Net(), dense, verify="slow")
    with pytest.raises(ValueError, match="lazy=True none before its use; choose one"):
        load_quantized(Net(), dense, lazy=True, cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_quantized(Net(), tmp_path / "nowhere")
    with pytest.raises(QuantizationError, match="nothing was quantized"):
        load_quantized(Net(), dense, skip=("layers",), progress=False)
    (dense / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(NotImplementedError, match="quantized by gptq"):
        load_quantized(Net(), dense)


def test_a_new_head_keeps_its_values_and_old_buffers_are_passed_over(dense: Path) -> None:
    state = load_file(dense / "model-00002-of-00002.safetensors")
    save_file({**state, "layers.2.phase": torch.zeros(4)}, dense / "model-00002-of-00002.safetensors")
    model = Net()
    model.score = nn.Linear(96, 2)
    kept = model.score.weight.detach().clone()
    report = load_quantized(model, dense, progress=False)
    assert torch.equal(model.score.weight, kept) and type(model.score) is nn.Linear
    assert "score" in report.skipped
    assert torch.equal(model.layers[2].phase, torch.ones(4))


def test_buffers_on_meta_are_computed_by_the_model_or_named(dense: Path) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(QuantizationError, match=r"layers.0.phase, .* are buffers that checkpoints don't hold"):
        load_quantized(model, dense, progress=False)

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.empty(3), persistent=False)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.frequencies.copy_(torch.arange(3.0))

    model = on_meta()
    with torch.device("meta"):
        model.rotary = Rotary()
    load_quantized(model, dense, progress=False)
    assert torch.equal(model.rotary.frequencies, torch.arange(3.0))


@pytest.mark.parametrize("cut", [4, 60, 3000, -1])
def test_truncated_and_foreign_files_are_errors(dense: Path, cut: int) -> None:
    file = dense / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(QuantizationError, match="truncated|not JSON"):
        load_quantized(on_meta(), dense, progress=False)


def test_every_flipped_bit_of_a_saved_folder_is_found(dense: Path, tmp_path: Path) -> None:
    model = on_meta()
    load_quantized(model, dense, progress=False)
    save_quantized(model, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for position in range(begin, len(whole), 997):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(QuantizationError, match="is damaged: its checksum is"):
            load_quantized(on_meta(), tmp_path / "out", progress=False)


def test_lazy_layers_are_read_at_first_use(dense: Path) -> None:
    model = Net()
    load_quantized(model, dense, lazy=True, progress=False)
    deferred = [block.up for block in model.layers]
    assert all(layer._parameters["weight"].is_meta for layer in deferred)
    eager = Net()
    load_quantized(eager, dense, progress=False)
    other = copy.deepcopy(model.layers[0])  # wants the rows
    assert torch.equal(other.up.weight, eager.layers[0].up.weight)
    ones = torch.ones(96)
    assert torch.equal(model.layers[1].up(ones), eager.layers[1].up(ones))
    assert model.layers[2].up._parameters["weight"].is_meta
    assert type(model.layers[1].up) is QuantLinear
    check(model)
    assert pickle.loads(pickle.dumps(model.layers[1].up)).weight.shape == (33, 64)


def test_a_lazy_layer_notices_that_its_file_changed(dense: Path) -> None:
    model = on_meta()
    load_quantized(model, dense, lazy=True, progress=False)
    file = dense / "model-00002-of-00002.safetensors"
    with open(file, "r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\0\0\0\0")
    with pytest.raises(QuantizationError, match="was changed while it was being read"):
        model.layers[2].up(torch.ones(96))


def test_no_warning_and_no_open_file_is_left(dense: Path) -> None:
    gc.collect()  # deferred layers of other tests
    before = len(list(Path("/proc/self/fd").iterdir()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_quantized(on_meta(), dense, progress=False)
        with pytest.raises(QuantizationError):
            load_quantized(nn.Linear(3, 3), dense, progress=False)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
