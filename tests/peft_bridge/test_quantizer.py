"""Loading dense and packed checkpoints through transformers, saving, and every way a checkpoint can be wrong."""

import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
)
from transformers.quantizers import auto

import halfbyte
from halfbyte.nn import QuantEmbedding, QuantLinear
from peft_bridge import HalfbyteConfig, HalfbyteQuantizer

FORMATS = ("nf4", "fp4:32", "nf4-dq", "fp4-dq", "int8", "fp8")


def load(path, format="nf4", **kwargs):
    quantization = HalfbyteConfig(
        format, **{k: kwargs.pop(k) for k in ("skip", "compute_dtype", "embedding_format") if k in kwargs}
    )
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization, **kwargs)


def packed(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}])
def test_streams_into_exactly_the_rows_that_quantize_gives(checkpoint, tokens, tied, device_map):
    path = checkpoint(tie_word_embeddings=tied)
    dense = AutoModelForCausalLM.from_pretrained(path)
    model, info = load(path, device_map=device_map, output_loading_info=True)
    assert not any(info.values())
    assert len(packed(model)) == 14
    for name, module in packed(model).items():
        assert torch.equal(module.weight, halfbyte.quantize(dense.get_submodule(name).weight.detach(), "nf4")), name
        assert module.weight.dtype == torch.uint8
        assert not module.weight.requires_grad
        assert module.bias is None or torch.equal(module.bias, dense.get_submodule(name).bias)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.dtype == torch.bfloat16
    reference = AutoModelForCausalLM.from_pretrained(path)
    halfbyte.quantize_model(reference)
    assert torch.equal(model(tokens).logits, reference(tokens).logits)
    halfbyte.verify(model, dense)


def test_no_dense_model_exists_while_it_loads(checkpoint, monkeypatch):
    alive, counts = [], []
    pack = HalfbyteQuantizer.pack

    def watched(self, model, name, value):
        alive.append(weakref.ref(value))
        packed = pack(self, model, name, value)
        weights = [model.get_submodule(planned).weight for planned in self._plan.formats]
        assert all(weight.is_meta or weight.dtype == torch.uint8 for weight in weights)
        counts.append(sum(reference() is not None for reference in alive))
        return packed

    monkeypatch.setattr(HalfbyteQuantizer, "pack", watched)
    load(checkpoint())
    assert len(counts) == 14
    assert max(counts) == 1  # the dense weight in hand; the one before is gone


@pytest.mark.parametrize("format", FORMATS)
def test_save_and_reload_without_naming_the_config(checkpoint, tokens, tmp_path, format):
    model = load(checkpoint(tie_word_embeddings=False), format, compute_dtype="bfloat16")
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "q", max_shard_size="30KB")
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 2
    stored = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "halfbyte"
    assert stored["format"] == str(halfbyte.Format.parse(format))
    assert "model.layers.*.mlp.up_proj" in stored["modules"]
    assert len(stored["modules"]) == 7
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "q", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(again(tokens).logits, expected)
    assert again.model.layers[0].mlp.up_proj.compute_dtype is torch.bfloat16
    again.save_pretrained(tmp_path / "r")  # re-save of what was loaded packed
    third = AutoModelForCausalLM.from_pretrained(tmp_path / "r", device_map="auto")
    for (name, a), (_, b) in zip(model.state_dict().items(), third.state_dict().items(), strict=True):
        assert (a.dtype, a.tolist()) == (b.dtype, b.tolist()), name


def test_skip_follows_the_rules_of_quantize_model(checkpoint):
    path = checkpoint(tie_word_embeddings=False)
    model = load(path, skip=("layers.1", "q_proj"))
    other = AutoModelForCausalLM.from_pretrained(path)
    expected = halfbyte.quantize_model(other, skip=("layers.1", "q_proj"))
    found = halfbyte.report(model)
    assert found.quantized == expected.quantized
    assert "lm_head" in found.quantized
    assert {(row.name, row.reason) for row in found.rows} == {(row.name, row.reason) for row in expected.rows}
    assert len(packed(load(path, skip=()))) == 15
    with pytest.raises(TypeError, match="single string"):
        HalfbyteConfig(skip="lm_head")


def test_every_dense_linear_says_why(checkpoint):
    model = load(checkpoint(tie_word_embeddings=True))
    assert halfbyte.report(model).skipped == ("lm_head",)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    halfbyte.verify(model)


def test_embedding_format(checkpoint, tokens, tmp_path):
    model = load(checkpoint(tie_word_embeddings=False), embedding_format="int8")
    assert isinstance(model.model.embed_tokens, QuantEmbedding)
    assert model.model.embed_tokens.padding_idx == 0
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    tied = load(checkpoint(tie_word_embeddings=True), embedding_format="int8")
    assert type(tied.model.embed_tokens) is nn.Embedding
    assert {r.name: r.reason for r in halfbyte.report(tied).rows}["model.embed_tokens"] == "tied to another module"


@pytest.mark.parametrize("from_packed", [False, True])
def test_fresh_heads_stay_dense_and_trainable(tmp_path, from_packed):
    torch.manual_seed(0)
    config = BertConfig(hidden_size=96, intermediate_size=200, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    BertForMaskedLM(config).save_pretrained(tmp_path / "dense")
    path, quantization = tmp_path / "dense", HalfbyteConfig("nf4")
    if from_packed:
        BertForMaskedLM.from_pretrained(path, quantization_config=quantization).save_pretrained(tmp_path / "packed")
        path, quantization = tmp_path / "packed", None
    model = BertForSequenceClassification.from_pretrained(path, quantization_config=quantization)
    # The pooler belongs to the base model and has no telling name: only the checkpoint shows that it is new.
    for name in ("classifier", "bert.pooler.dense"):
        module = model.get_submodule(name)
        assert type(module) is nn.Linear
        assert module.weight.requires_grad
        assert module.weight.std() > 0
        assert module.weight.isfinite().all()
    assert {"classifier", "bert.pooler.dense"} <= set(halfbyte.report(model).skipped)
    assert len(packed(model)) == 6


def test_a_mismatched_head_is_transformers_business(checkpoint):
    path = checkpoint()
    torch.manual_seed(0)
    changes = {"intermediate_size": 168, "ignore_mismatched_sizes": True}
    model = load(path, **changes)
    up = model.model.layers[0].mlp.up_proj
    assert type(up) is nn.Linear
    assert up.weight.shape == (168, 96)
    assert up.weight.std() > 0
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(path, intermediate_size=168)


def test_a_headless_base_loads_from_a_packed_model_with_head(checkpoint, tokens, tmp_path):
    model = load(checkpoint())
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier.score) is nn.Linear
    assert len(packed(classifier)) == 14


def test_dequantize_gives_the_same_logits_and_a_plain_checkpoint(checkpoint, tokens, tmp_path):
    load(checkpoint(), "int8", embedding_format="int8").save_pretrained(tmp_path / "q")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    expected = model(tokens).logits
    dense = model.dequantize()
    assert not packed(dense)
    assert not dense.is_quantized
    assert dense.dtype == torch.bfloat16
    difference = (dense(tokens).logits - expected).float().norm() / expected.float().norm()
    assert difference < 2**-6  # bfloat16 weights in another order of summation
    dense.save_pretrained(tmp_path / "d")
    assert "quantization_config" not in json.loads((tmp_path / "d" / "config.json").read_text())
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "d")(tokens).logits, dense(tokens).logits)


def test_save_writes_what_the_model_is_now(checkpoint, tmp_path):
    model = load(checkpoint())
    halfbyte.nn.linear.dequantize_linear_(
        model.model.layers[0].mlp.up_proj, nn.Parameter(model.model.layers[0].mlp.up_proj.dequantize())
    )
    model.save_pretrained(tmp_path)  # half of the up_proj layers are dense now
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(packed(again)) == 13
    assert type(again.model.layers[0].mlp.up_proj) is nn.Linear
    model.model.layers[0].mlp.up_proj = QuantLinear(96, 200, bias=False, format="int8")
    with pytest.raises(halfbyte.QuantizationError, match="another, model.layers.0.mlp.up_proj is int8"):
        model.save_pretrained(tmp_path)


# ---- checkpoints that are wrong -------------------------------------------------------------------------------------


@pytest.fixture
def saved(checkpoint, tmp_path):
    load(checkpoint()).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    """Applies `change` to the tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


KEY = "model.layers.1.mlp.up_proj.weight"


def test_a_missing_packed_key_is_named(saved):
    rewrite(saved, lambda tensors: tensors.pop(KEY))
    with pytest.raises(halfbyte.QuantizationError, match="layers.1.mlp.up_proj: its packed rows are missing") as caught:
        AutoModelForCausalLM.from_pretrained(saved)
    assert caught.value.names == ("model.layers.1.mlp.up_proj",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({KEY: t[KEY][:, :-16].contiguous()}), r"must have shape \(200, 64\), got \(200, 48\)"),
        (lambda t: t.update({KEY: t[KEY][:-1].contiguous()}), r"must have shape \(200, 64\), got \(199, 64\)"),
        (lambda t: t.update({KEY: torch.zeros(200, 95)}), "must be packed, the checkpoint holds it as torch.bfloat16"),
    ],
)
def test_rows_of_the_wrong_size_are_named(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(halfbyte.QuantizationError, match=message) as caught:
        AutoModelForCausalLM.from_pretrained(saved)
    assert caught.value.names == ("model.layers.1.mlp.up_proj",)


def test_a_dense_weight_of_the_wrong_size_is_named(saved):
    rewrite(saved, lambda t: t.update({"lm_head.weight": torch.zeros(128, 95, dtype=torch.bfloat16)}))
    with pytest.raises(halfbyte.QuantizationError, match=r"lm_head: its dense weight must have shape \(128, 96\)"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_config_of_another_format_than_the_rows_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"]["format"] = "int8"
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(halfbyte.QuantizationError, match="int8 rows for 96 columns"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_user_config_that_contradicts_the_checkpoint_is_refused(saved, tokens):
    for config, message in (
        (HalfbyteConfig("int8"), "format='nf4', got 'int8'"),
        (HalfbyteConfig("nf4", skip=("q_proj",)), "skip=None, got .'q_proj'."),
        (HalfbyteConfig("nf4", embedding_format="int8"), "embedding_format=None, got 'int8'"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(saved, quantization_config=config)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = AutoModelForCausalLM.from_pretrained(
            saved, quantization_config=HalfbyteConfig("nf4", compute_dtype="float32")
        )
    assert model.model.layers[0].mlp.up_proj.compute_dtype is torch.float32
    assert model.config.quantization_config.compute_dtype == "float32"


def test_a_dense_folder_that_claims_to_be_packed_is_refused(checkpoint, saved):
    shutil.copy(saved / "config.json", saved / "claim.json")
    for name in checkpoint().iterdir():
        shutil.copy(name, saved)
    shutil.move(saved / "claim.json", saved / "config.json")
    (saved / "model.safetensors").unlink()
    with pytest.raises(halfbyte.QuantizationError, match="must be packed, the checkpoint holds it as torch.bfloat16"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_nothing_to_quantize_raises(checkpoint):
    with pytest.raises(halfbyte.QuantizationError, match="nothing was quantized.*skip='model'"):
        load(checkpoint(), skip=("model", "lm_head"))


def test_what_cannot_work_says_so(checkpoint):
    with pytest.raises(NotImplementedError, match="disk"):
        load(checkpoint(), device_map={"model": "cpu", "lm_head": "disk"})
    with pytest.raises(TypeError, match="unknown argument load_in_4bit"):
        HalfbyteConfig("nf4", load_in_4bit=True)
    with pytest.raises(ValueError, match="format"):
        HalfbyteConfig("nf5")


# ---- the contract with transformers ---------------------------------------------------------------------------------


def test_the_config_is_plain_json_and_compares_by_value():
    config = HalfbyteConfig("nf4-dq:128", skip=("a.b",), compute_dtype=torch.bfloat16, embedding_format="int8")
    again = HalfbyteConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again != HalfbyteConfig("nf4-dq:128")
    # transformers takes a config with these keys for bitsandbytes, whatever its quant_method
    assert not {"load_in_4bit", "load_in_8bit"} & set(config.to_dict())


def test_one_config_serves_many_models(checkpoint):
    config = HalfbyteConfig("nf4")
    first = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=config)
    assert config == HalfbyteConfig("nf4")
    assert first.config.quantization_config is not config


@pytest.mark.slow
def test_a_process_without_the_bridge_says_what_the_docs_quote(saved):
    """The two messages of transformers in docs/troubleshooting.md."""
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(saved)!r})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode != 0
    assert "Unknown quantization type, got halfbyte" in done.stderr
    assert "You set `ignore_mismatched_sizes` to `False`" in done.stderr


def test_registration_and_the_pinned_hand_over_of_the_users_config():
    assert auto.AUTO_QUANTIZER_MAPPING["halfbyte"] is HalfbyteQuantizer
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["halfbyte"] is HalfbyteConfig
    merged = auto.AutoHfQuantizer.merge_quantization_configs(HalfbyteConfig("nf4").to_dict(), wish := HalfbyteConfig("int8"))
    assert merged.requested is wish


def test_the_quantizer_answers_what_transformers_and_peft_ask(checkpoint):
    model = load(checkpoint())
    assert model.is_quantized
    assert model.hf_quantizer.is_serializable()
    assert model.hf_quantizer.is_trainable
    # With this flag TRL would cast the adapters to bfloat16.
    assert not getattr(model, "is_loaded_in_4bit", False)
    sizes = {n: model.hf_quantizer.param_element_size(model, n, p) for n, p in model.named_parameters()}
    assert sum(sizes[n] * p.numel() for n, p in model.named_parameters()) == sum(p.nbytes for p in model.parameters())


def test_device_maps_are_computed_from_packed_sizes(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    quantizer = HalfbyteQuantizer(HalfbyteConfig("nf4"), pre_quantized=False)
    quantizer.preprocess_model(model)
    up = model.model.layers[0].mlp.up_proj
    size = quantizer.param_element_size(model, "model.layers.0.mlp.up_proj.weight", up.weight) * up.weight.numel()
    assert size == 200 * 64
    bias = model.model.layers[0].self_attn.q_proj.bias
    assert quantizer.param_element_size(model, "model.layers.0.self_attn.q_proj.bias", bias) == bias.element_size()


def test_files_hold_plain_uint8_rows_under_the_original_names(saved):
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert file.get_slice(KEY).get_shape() == [200, 64]
        assert file.get_slice(KEY).get_dtype() == "U8"
