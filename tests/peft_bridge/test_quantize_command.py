"""`halfbyte quantize` on what transformers decodes, merges or transposes on loading: GGUF, experts, Conv1D."""

import json

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, Qwen3MoeConfig

import halfbyte
import peft_bridge  # noqa: F401 - so that from_pretrained knows packed folders
from halfbyte.cli import main
from halfbyte.nn import QuantLinear
from halfbyte.nn.packed import Packed

WIDTH, INNER, LAYERS = 64, 128, 2


def write_gguf(path):
    """A random Llama in Q8_0 and F32, with a byte-level vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_vocab_size(29)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    letters = ["<eos>", *"abcdefghijklmnopqrstuvwxyz", "ab", "abc"]
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(letters) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(0)

    def add(name, *shape):
        values = (0.1 * random.standard_normal(shape)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(letters), WIDTH)
    add("output.weight", len(letters), WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name, shape in (
            *((f"attn_{kind}", (WIDTH, WIDTH)) for kind in ("q", "k", "v", "output")),
            ("ffn_gate", (INNER, WIDTH)),
            ("ffn_up", (INNER, WIDTH)),
            ("ffn_down", (WIDTH, INNER)),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path, capsys):
    from transformers import GgufConfig

    (tmp_path / "in").mkdir()
    write_gguf(tmp_path / "in" / "tiny.gguf")
    assert main(["quantize", str(tmp_path / "in" / "tiny.gguf"), str(tmp_path / "out"), "--format", "int8", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["quantized"] == 7 * LAYERS
    assert " MB will be written, " in printed.err
    dense = AutoModelForCausalLM.from_pretrained(
        tmp_path / "in", gguf_file="tiny.gguf", dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    packed = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    assert len(packed) == 7 * LAYERS
    for name, module in packed.items():
        assert torch.equal(module.weight, halfbyte.quantize(dense.get_submodule(name).weight, "int8")), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc").input_ids


@pytest.mark.parametrize("kind", ["experts", "Conv1D"])
def test_merged_and_transposed_tensors(tmp_path, capsys, kind, monkeypatch):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 96}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 2}
    gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64)
    configs = {"experts": Qwen3MoeConfig(**sizes, **moe), "Conv1D": gpt2}
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(configs[kind]).to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "notes.txt").write_text("kept")
    arguments = ["quantize", str(tmp_path / "in"), str(tmp_path / "out")]
    full = OSError(28, "No space left on device")

    def no_room(self, folder, **_):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(type(dense), "save_pretrained", no_room)
        assert main(arguments) == 1
    assert "No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert " MB will be written, " in printed.err
    halfbyte.quantize_model(dense)
    expected = [name for name, module in dense.named_modules() if isinstance(module, Packed)]
    assert json.loads(printed.out)["quantized"] == len(expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name in expected:
        for leaf, rows in dense.get_submodule(name).named_parameters():
            assert torch.equal(model.get_submodule(name).get_parameter(leaf), rows), name
    assert (tmp_path / "out" / "notes.txt").read_text() == "kept"
    assert main(arguments) == 1
    assert "holds something already" in capsys.readouterr().err
