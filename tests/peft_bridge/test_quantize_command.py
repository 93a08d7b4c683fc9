"""`halfbyte quantize`: the folder of a load and a save, made row by row from files of any kind, whatever interrupts it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GgufConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import halfbyte
import halfbyte.checkpoint.folder as folder_module
from halfbyte.cli import main
from halfbyte.errors import QuantizationError
from halfbyte.nn.packed import Packed
from peft_bridge import load_model
from peft_bridge.folder import quantize_folder
from peft_bridge.rows import ConvertedSource, _Numbers

pytest.importorskip("gguf")
import gguf_writer

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "hidden_size": 96, "intermediate_size": 72}
KEYS = {"num_key_value_heads": 2, "head_dim": 16}
DEEPSEEK = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 40}
CLIP = CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, **KEYS, tie_word_embeddings=True)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=96, n_layer=2, n_head=4, vocab_size=61, n_positions=32)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, **KEYS, num_local_experts=3)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **KEYS, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=40),
    ),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**SIZES, **KEYS, num_local_experts=3)),  # experts that lie (E, K, N)
    "deepseek_v3": (  # a bias that stays in float32, a dense layer before the experts
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**SIZES, num_key_value_heads=4, first_k_dense_replace=1, **DEEPSEEK),
    ),
    "llava": (  # prefixes that come and go
        LlavaForConditionalGeneration,
        LlavaConfig(text_config=LlamaConfig(**SIZES, **KEYS).to_dict(), vision_config=CLIP.to_dict()),
    ),
}


def dense_folder(path, name, dtype=torch.bfloat16):
    torch.manual_seed(0)
    kind, config = MODELS[name]
    model = kind(config).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path, max_shard_size="60KB")
    return path


def tensors_of(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_equal_folders(made, expected):
    ours, theirs = tensors_of(made), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name
    assert (made / "config.json").read_text() == (expected / "config.json").read_text()


def loaded_and_saved(dense, path, format="nf4"):
    load_model(dense, format).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_folder_of_a_load_and_a_save(tmp_path, capsys, name):
    dense = dense_folder(tmp_path / "in", name)
    (dense / "notes.txt").write_text("kept")
    out, expected = tmp_path / "out", loaded_and_saved(dense, tmp_path / "expected")
    assert main(["quantize", str(dense), str(out), "--json"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert re.search(rf"{data['bytes'] / 1e6:.1f} MB will be written, [\d.]+ MB are free", printed.err)
    assert data["bytes"] == sum(value.nbytes for value in tensors_of(out).values())
    assert_equal_folders(out, expected)
    assert (out / "notes.txt").read_text() == "kept"
    models = [load_model(out), MODELS[name][0].from_pretrained(expected)]
    state = models[1].state_dict()
    assert models[0].state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in models[0].state_dict().items())
    assert any(isinstance(module, Packed) for module in models[0].modules())


def test_other_dtypes_pickles_and_what_the_model_has_no_place_for(tmp_path, capsys):
    """float32 files of a bfloat16 model, as pytorch_model.bin shards, with a tensor too many and both tied ones."""
    dense = dense_folder(tmp_path / "in", "llama", torch.float32)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    state = tensors_of(dense)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for file in dense.glob("*.safetensors*"):
        file.unlink()
    names = sorted(state)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:])):
        torch.save({name: state[name] for name in part}, dense / f"pytorch_model-{number}.bin")
        weight_map.update(dict.fromkeys(part, f"pytorch_model-{number}.bin"))
    (dense / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    expected = loaded_and_saved(dense, tmp_path / "expected", "int8")
    torch.save({**{name: state[name] for name in names[:5]}, "model.old": torch.ones(3)}, dense / "pytorch_model-0.bin")
    assert main(["quantize", str(dense), str(tmp_path / "out"), "--format", "int8"]) == 0
    assert "1 tensors are no part of the model: model.old" in capsys.readouterr().err
    assert_equal_folders(tmp_path / "out", expected)
    assert tensors_of(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16


def test_heads_that_are_tied_in_config_alone_and_weights_that_are_missing(tmp_path, capsys):
    dense = dense_folder(tmp_path / "in", "llama")
    state = tensors_of(dense)
    for file in dense.glob("*.safetensors*"):
        file.unlink()
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    save_file(state, dense / "model.safetensors")
    assert main(["quantize", str(dense), str(tmp_path / "out")]) == 0
    assert_equal_folders(tmp_path / "out", loaded_and_saved(dense, tmp_path / "expected"))
    assert "lm_head.weight" in tensors_of(tmp_path / "out")
    capsys.readouterr()
    del state["model.embed_tokens.weight"], state["model.layers.1.mlp.up_proj.weight"]  # the head stands for the table
    save_file(state, dense / "model.safetensors")
    assert main(["quantize", str(dense), str(tmp_path / "other")]) == 0
    assert "1 tensors of the model are not in SRC: model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
    assert torch.equal(tensors_of(tmp_path / "other")["model.embed_tokens.weight"], state["lm_head.weight"])
    modules = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]["modules"]
    assert "model.layers.0.mlp.up_proj" in modules
    assert "model.layers.1.mlp.up_proj" not in modules


@pytest.mark.parametrize("architecture", gguf_writer.FIELDS)
def test_gguf(tmp_path, capsys, architecture):
    """llama permutes heads, gpt2 transposes, gemma2 computes norms, qwen3moe merges stacks, qwen35moe does all of it."""
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "tiny.gguf"
    gguf_writer.write_gguf(file, architecture)
    assert main(["quantize", str(file), str(tmp_path / "out"), "--format", "nf4:32"]) == 0
    assert " MB will be written, " in capsys.readouterr().err
    dense = AutoModelForCausalLM.from_pretrained(
        tmp_path / "in", gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    vars(dense).pop("_weight_conversions", None)  # as 5.24 does: saved in the layout of the model's own checkpoints
    dense.save_pretrained(tmp_path / "dense")
    assert_equal_folders(tmp_path / "out", loaded_and_saved(tmp_path / "dense", tmp_path / "expected", "nf4:32"))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc").input_ids
    assert halfbyte.verify(load_model(tmp_path / "out")).quantized


def test_a_gguf_architecture_without_a_mapping_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gguf_writer.FIELDS, "strange", {"block_count": 1})
    gguf_writer._write(tmp_path / "strange.gguf", "strange", {"a.weight": torch.ones(32, 32).numpy()})
    assert main(["quantize", str(tmp_path / "strange.gguf"), str(tmp_path / "out")]) == 1
    assert "transformers has no mapping for the GGUF architecture 'strange'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def sources(tmp_path):
    """One of each kind that needs a mapping: merged, transposed, decoded."""
    (tmp_path / "gguf").mkdir()
    gguf_writer.write_gguf(tmp_path / "gguf" / "tiny.gguf", "qwen3moe")
    yield dense_folder(tmp_path / "mixtral", "mixtral")
    yield dense_folder(tmp_path / "gpt2", "gpt2")
    yield tmp_path / "gguf" / "tiny.gguf"


def test_killed_between_any_two_shards_it_goes_on_where_it_was(tmp_path, monkeypatch):
    original, written = folder_module.write_shard, []
    for number, src in enumerate(sources(tmp_path)):
        whole, out = tmp_path / f"whole{number}", tmp_path / f"out{number}"
        quantize_folder(src, whole, "nf4", max_shard_bytes=60_000)
        shards = len(list(whole.glob("*.safetensors")))
        assert shards >= 3
        written.clear()
        limit = [0]

        def write(file, *args, limit=limit):
            if len(written) == limit[0]:
                raise KeyboardInterrupt
            written.append(file.name)
            original(file, *args)

        monkeypatch.setattr(folder_module, "write_shard", write)
        for limit[0] in range(shards):
            with pytest.raises(KeyboardInterrupt):
                quantize_folder(src, out, "nf4", max_shard_bytes=60_000)
            assert not (out / "model.safetensors.index.json").exists()
        limit[0] = -1
        quantize_folder(src, out, "nf4", max_shard_bytes=60_000)
        assert len(written) == len(set(written)) == shards
        for file in sorted(whole.iterdir()):
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
        monkeypatch.setattr(folder_module, "write_shard", original)


FULL = """
import resource, signal, sys; sys.path.insert(0, sys.argv[3])
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from peft_bridge.folder import quantize_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
quantize_folder(Path(sys.argv[1]), Path(sys.argv[2]), "nf4", max_shard_bytes=20_000)
"""


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, capsys):
    dense = dense_folder(tmp_path / "in", "mixtral")
    before = {file: file.read_bytes() for file in dense.iterdir()}
    root = str(Path(__file__).parents[2])
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 12345})())
    assert main(["quantize", str(dense), str(tmp_path / "out")]) == 1
    assert "MB, 0.0 MB are free; nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    plain = tmp_path / "plain"
    quantize_folder(dense, plain, "nf4", max_shard_bytes=20_000)
    biggest = max(file.stat().st_size for file in plain.glob("*.safetensors"))
    assert biggest < 30_000
    limited = FULL.replace("30_000", str(biggest - 1))
    done = subprocess.run(
        [sys.executable, "-c", limited, str(dense), str(tmp_path / "out"), root],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert "finished shards are kept, nothing else was changed" in done.stderr
    kept = {file: file.stat().st_ino for file in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert {file: file.read_bytes() for file in dense.iterdir()} == before
    quantize_folder(dense, tmp_path / "out", "nf4", max_shard_bytes=20_000)
    assert {file: file.stat().st_ino for file in kept} == kept
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == {
        f.name: f.read_bytes() for f in plain.iterdir()
    }


def test_refusals(tmp_path):
    dense = dense_folder(tmp_path / "in", "gpt2")
    quantize_folder(dense, tmp_path / "out", "nf4")
    with pytest.raises(FileExistsError, match="holds another checkpoint"):
        quantize_folder(dense, tmp_path / "out", "int8")
    with pytest.raises(NotImplementedError, match="is quantized already"):
        quantize_folder(tmp_path / "out", tmp_path / "again", "nf4")
    state = tensors_of(dense)
    for name in dense.glob("*.safetensors*"):
        name.unlink()
    state["transformer.h.0.mlp.c_fc.weight"] = state["transformer.h.0.mlp.c_fc.weight"][:, :5].clone()
    save_file(state, dense / "model.safetensors")
    with pytest.raises(QuantizationError, match=r"c_fc.weight has shape \(96, 5\) in the checkpoint, \(96, 384\) in the mo"):
        quantize_folder(dense, tmp_path / "again", "nf4")
    assert not (tmp_path / "again").exists()


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch):
    dense = dense_folder(tmp_path / "in", "gpt2")
    original = ConvertedSource.fill

    def fill(self, *args):
        os.utime(next(dense.glob("*.safetensors")), ns=(1, 1))
        original(self, *args)

    monkeypatch.setattr(ConvertedSource, "fill", fill)
    with pytest.raises(QuantizationError, match="was changed while it was being read"):
        quantize_folder(dense, tmp_path / "out", "nf4")


def test_rows_that_are_moved_are_followed_and_rows_that_are_computed_are_noticed():
    numbers = _Numbers()
    other = numbers.stand_for("rows", "other", (3, 8))
    stack = numbers.stand_for("rows", "stack", (2, 3, 8))
    across = numbers.stand_for("columns", "across", (8, 3))
    bias = numbers.stand_for("rows", "bias", (6,))
    moved = torch.cat([stack[1], other.flip(0)])
    rows = numbers.rows(moved, (6, 8))
    where = [(origin.name, part.tolist()) for origin, part in numbers.segments(rows)]
    assert where == [("stack", [3, 4, 5]), ("other", [2, 1, 0])]
    assert [part.tolist() for _, part in numbers.segments(numbers.rows(across.t(), (3, 8)))] == [[0, 1, 2]]
    assert [part.tolist() for _, part in numbers.segments(numbers.rows(bias.flip(0), (6,)))] == [[5, 4, 3, 2, 1, 0]]
    for wrong in (other + 1, -other, other.flip(-1), other.roll(1, -1), other.float(), other.float().long(), other * 2):
        assert numbers.rows(wrong, (3, 8)) is None
    assert numbers.rows(other.view(3, 2, 2).transpose(1, 2).reshape(3, 4), (3, 8)) is None  # interleaved along the row
    assert numbers.rows(other.t(), (3, 8)) is None
    assert numbers.rows(numbers.stand_for("rows", "step", ()), ()).numel() == 1


MEMORY = """
import os, sys, threading; sys.path.insert(0, sys.argv[3])
import torch
from pathlib import Path
from peft_bridge.folder import quantize_folder
torch.set_num_threads(1)
def anonymous(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) << 10
src, out = Path(sys.argv[1]), Path(sys.argv[2])
quantize_folder(Path(sys.argv[4]), out / "warm", "nf4")
peak, stop, before = [0], threading.Event(), anonymous()
def watch():
    while not stop.wait(0.002): peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch); thread.start()
quantize_folder(src, out / "big", "nf4")
stop.set(); thread.join()
print(peak[0] - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2", "gguf"])
def test_memory_is_a_few_pieces_not_a_layer(tmp_path, kind):
    """A layer's experts are 96 MiB in all, a Conv1D 32; a stack of experts in a GGUF is 64 MiB decoded."""
    warm = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    big = {**warm, "num_hidden_layers": 2, "hidden_size": 2048}
    configs = {
        "qwen3_moe": [Qwen3MoeConfig(**size, **moe, moe_intermediate_size=1024) for size in (warm, big)],
        "gpt2": [GPT2Config(n_embd=n, n_layer=4, n_head=4, vocab_size=64, n_positions=32) for n in (64, 2048)],
    }
    files = []
    for number in range(2):
        path = tmp_path / f"in{number}"
        path.mkdir()
        if kind == "gguf":
            fields = dict(gguf_writer.FIELDS["qwen3moe"])
            if number:
                fields.update({"embedding_length": 2048, "expert_feed_forward_length": 2048, "attention.key_length": 512})
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(gguf_writer.FIELDS, "qwen3moe", fields)
                gguf_writer.write_gguf(path / "m.gguf", "qwen3moe")
            files.append(path / "m.gguf")
            continue
        AutoModelForCausalLM.from_config(configs[kind][number]).to(torch.bfloat16).save_pretrained(path)
        files.append(path)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, files[1], tmp_path, str(Path(__file__).parents[2]), files[0]],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"},
        check=True,
    )
    print(f"{kind}: {int(done.stdout) / 2**20:.0f} MiB")
    assert int(done.stdout) < 150 << 20
