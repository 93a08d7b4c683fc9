"""Folders made by halfbyte.calibrate load wherever packed ones do: Conv1D and fused experts, which stay as calibrated."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GptOssConfig, MixtralConfig

import halfbyte
from lightning_plugin import FabricHalfbytePrecision
from peft_bridge import load_model

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE = {"num_local_experts": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIGS = {
    "Conv1D": GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4),
    "experts": MixtralConfig(**SIZES, **MOE),
    "transposed experts": GptOssConfig(**SIZES, **MOE, head_dim=16),
}


def read_into_dense(folder):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    halfbyte.load_quantized(model, folder, progress=False)
    return model


def in_lightnings_context(folder):
    with FabricHalfbytePrecision("int8").module_init_context():  # the checkpoint's format wins
        return AutoModelForCausalLM.from_pretrained(folder)


def born_packed(folder):
    with halfbyte.init_quantized("nf4"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    halfbyte.load_quantized(model, folder, progress=False)
    return model


@pytest.mark.filterwarnings("ignore:calibrate. .* can't be read block by block")
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_way_to_load(tmp_path, kind):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path / "dense")
    ids = torch.randint(0, 128, (8, 64), generator=torch.Generator().manual_seed(1))
    report = halfbyte.calibrate(tmp_path / "dense", ids, out=tmp_path / "out", tokens=512, seq_len=64, progress=False)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rows = {name: value for name, value in expected.state_dict().items() if value.dtype == torch.uint8}
    assert len(rows) == (8 if kind == "Conv1D" else 8 + 2 * 2)  # of experts each weight is one stack of rows
    plain = load_model(tmp_path / "dense", "nf4").state_dict()
    assert not any(torch.equal(plain[name], value) for name, value in rows.items())
    assert len(report.layers) == (8 if kind == "Conv1D" else 24)
    logits = expected(ids[:1]).logits
    for load in (load_model, read_into_dense, in_lightnings_context, born_packed):
        model = load(tmp_path / "out").eval()
        found = {name: value for name, value in model.state_dict().items() if value.dtype == torch.uint8}
        assert found.keys() == rows.keys(), load.__name__
        assert all(torch.equal(found[name], value) for name, value in rows.items()), load.__name__
        assert torch.equal(model(ids[:1]).logits, logits), load.__name__
