"""bitsandbytes folders: loaded with equal weights, saved as our own, and written back for bitsandbytes to load."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

import halfbyte
from halfbyte.nn.settings import paused
from peft_bridge import HalfbyteConfig, export_bitsandbytes, load_model

bitsandbytes = pytest.importorskip("bitsandbytes")

WIDE = {"hidden_size": 128, "intermediate_size": 192}  # whole blocks of 64: what bitsandbytes packs row by row
UP = "model.layers.1.mlp.up_proj"
FOUR_BIT = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nested fp4 in bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "bfloat16",
    },
    "nf4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
}
KINDS = {**FOUR_BIT, "int8": {"load_in_8bit": True}}


@pytest.fixture(scope="session")
def theirs(checkpoint, tmp_path_factory) -> Callable[..., Path]:
    """theirs(kind, **changes of the model) -> a folder in several shards that bitsandbytes quantized and saved."""
    made: dict[str, Path] = {}

    def make(kind: str, **changes: Any) -> Path:
        key = repr((kind, sorted(changes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("bitsandbytes")
            with paused():
                model = LlamaForCausalLM.from_pretrained(
                    checkpoint(**changes), quantization_config=BitsAndBytesConfig(**KINDS[kind])
                )
            model.save_pretrained(made[key], max_shard_size="40KB")
        return made[key]

    return make


@pytest.fixture
def damaged(theirs, tmp_path) -> Callable[..., Path]:
    """damaged(kind, change) -> a copy of the folder in one file, its tensors changed by `change(tensors)`."""

    def make(kind: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        tensors = contents(theirs(kind, **WIDE))
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(theirs(kind, **WIDE) / "config.json", tmp_path)
        return tmp_path

    return make


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def dense_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What each linear layer multiplies by, decoded by bitsandbytes or by halfbyte, in bfloat16 (int8: float32)."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # As one row: their CPU kernel (0.50.2) lets the blocks of a matrix start anew in each row, which is not how
            # they were quantized if the row is no multiple of a block; CUDA and their PyTorch fallback don't.
            state = copy.deepcopy(module.weight.quant_state)
            shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
            found[name] = bitsandbytes.functional.dequantize_4bit(module.weight.data, state).view(shape)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            found[name] = module.weight.CB.float() * (module.weight.SCB.view(-1, 1) / 127)
        elif isinstance(module, halfbyte.nn.QuantLinear):
            found[name] = module.dequantize(torch.float32 if str(module.format) == "int8" else torch.bfloat16)
        elif isinstance(module, nn.Linear):
            found[name] = module.weight.detach()
    return found


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


def assert_same_bytes(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Codes that are viewed as bfloat16 are NaN here and there."""
    assert {key: (value.dtype, value.shape) for key, value in ours.items()} == {
        key: (value.dtype, value.shape) for key, value in expected.items()
    }
    for key, value in expected.items():
        assert torch.equal(ours[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), key


@pytest.mark.parametrize("kind", KINDS)
def test_loads_with_the_weights_that_bitsandbytes_decodes(theirs, tokens, kind):
    folder = theirs(kind, **WIDE)
    assert len(list(folder.glob("*.safetensors"))) > 3  # the keys of one layer lie in several files
    expected = LlamaForCausalLM.from_pretrained(folder)
    model = load_model(folder)
    assert type(model) is LlamaForCausalLM
    assert_same(dense_weights(model), dense_weights(expected))
    format = "int8" if kind == "int8" else KINDS[kind]["bnb_4bit_quant_type"]
    assert {str(m.format) for m in model.modules() if isinstance(m, halfbyte.nn.QuantLinear)} == {format}
    assert len(halfbyte.verify(model).quantized) == 14
    for name, parameter in expected.named_parameters():  # norms, biases, embeddings
        if parameter.dim() == 1 or "embed" in name:
            ours = model.get_parameter(name)
            assert ours.dtype == parameter.dtype and torch.equal(ours, parameter), name
    assert model(tokens).logits.isfinite().all()


def test_every_way_of_asking_gives_the_same_model(theirs):
    folder = theirs("nf4", **WIDE)
    expected = load_model(folder).state_dict()
    with halfbyte.init_quantized("int8", compute_dtype="float32"):  # as for our own folders, the checkpoint's format rules
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.model.layers[0].mlp.up_proj.compute_dtype == torch.float32
    assert_same(model.state_dict(), expected)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("nf4"))
    assert_same(model.state_dict(), expected)
    assert_same(load_model(folder, "nf4", device_map="auto").state_dict(), expected)
    assert load_model(folder, lora={"r": 2}).base_model.model.model.layers[0].mlp.up_proj.r["default"] == 2


def test_nothing_changes_without_a_request(theirs):
    model = AutoModelForCausalLM.from_pretrained(theirs("nf4", **WIDE))
    assert isinstance(model.model.layers[0].mlp.up_proj, bitsandbytes.nn.Linear4bit)
    assert type(model.hf_quantizer) is Bnb4BitHfQuantizer
    explicit = BitsAndBytesConfig(**KINDS["nf4"])  # is not overruled
    with (
        pytest.warns(UserWarning, match="from the model will be used"),
        pytest.raises(halfbyte.QuantizationError, match="nothing was quantized"),
        halfbyte.init_quantized("nf4"),
    ):
        model = AutoModelForCausalLM.from_pretrained(theirs("nf4", **WIDE), quantization_config=explicit)
    assert type(model.hf_quantizer) is Bnb4BitHfQuantizer


def test_the_patch_of_transformers_passes_everything_else_on():
    merge = AutoHfQuantizer.merge_quantization_configs
    assert merge.__func__.__wrapped__.__qualname__ == "AutoHfQuantizer.merge_quantization_configs"
    saved = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert isinstance(merge(dict(saved), None), BitsAndBytesConfig)
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        assert isinstance(merge(dict(saved), BitsAndBytesConfig(load_in_4bit=True)), BitsAndBytesConfig)
    with pytest.raises(ValueError, match="passing a HalfbyteConfig config"):
        merge({"quant_method": "gptq", "bits": 4}, HalfbyteConfig("nf4"))


def test_another_format_or_other_layers_are_refused(theirs):
    with pytest.raises(halfbyte.QuantizationError, match=r"up_proj is nf4 in the .* but format='fp4' was asked for"):
        load_model(theirs("nf4", **WIDE), "fp4")
    with pytest.raises(halfbyte.QuantizationError, match=r"is nf4 in the .* but format='nf4:128' was asked for"):
        load_model(theirs("nf4", **WIDE), "nf4:128")
    with pytest.raises(ValueError, match="skip=None, got"):
        load_model(theirs("nf4", **WIDE), quantization_config=HalfbyteConfig("nf4", skip=("mlp",)))


def test_blocks_that_cross_rows_stay_dense_and_the_report_says_so(theirs):
    folder = theirs("nf4", hidden_size=96, intermediate_size=192)
    model = load_model(folder)
    assert_same(dense_weights(model), dense_weights(LlamaForCausalLM.from_pretrained(folder)))
    rows = {row.name: row for row in halfbyte.report(model).rows}
    assert rows["model.layers.1.mlp.down_proj"].format == "nf4"
    assert rows["model.layers.1.mlp.up_proj"].format is None
    assert rows["model.layers.1.mlp.up_proj"].reason == (
        "dequantized on loading: its bitsandbytes blocks of 64 cross rows of 96"
    )
    halfbyte.verify(model)


def test_layers_that_the_model_keeps_in_float32_are_decoded(theirs, monkeypatch):
    folder = theirs("nf4", **WIDE)
    expected = load_model(folder).get_submodule(UP).dequantize(torch.float32)
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"up_proj", "norm"})
    model = load_model(folder)
    assert type(model.get_submodule(UP)) is nn.Linear
    assert model.get_submodule(UP).weight.dtype == model.model.norm.weight.dtype == torch.float32
    assert torch.equal(model.get_submodule(UP).weight, expected)
    reasons = {row.name: row.reason for row in halfbyte.report(model).rows}
    assert reasons[UP] == "dequantized on loading: LlamaForCausalLM keeps it in float32 (up_proj)"


def test_saved_as_a_folder_of_our_own(theirs, tokens, tmp_path):
    model = load_model(theirs("nested", **WIDE))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "halfbyte" and saved["format"] == "nf4" and saved["modules"]
    assert saved.keys() == HalfbyteConfig("nf4").to_dict().keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(again.state_dict(), model.state_dict())
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 in bfloat16", "int8"])
def test_written_back_byte_for_byte(theirs, tmp_path, kind):
    folder = theirs(kind, **WIDE)
    model = load_model(folder)
    storage = getattr(torch, KINDS[kind].get("bnb_4bit_quant_storage", "uint8"))
    export_bitsandbytes(model, tmp_path / "back", quant_storage=storage, max_shard_size="40KB")
    assert_same_bytes(contents(tmp_path / "back"), contents(folder))
    assert_same(dense_weights(LlamaForCausalLM.from_pretrained(tmp_path / "back")), dense_weights(model))
    model.save_pretrained(tmp_path / "own")  # the export left nothing behind
    assert_same(load_model(tmp_path / "own").state_dict(), model.state_dict())


@pytest.mark.parametrize("skip", [None, (), ("gate_proj", "layers.1", "lm_head")])
def test_bitsandbytes_loads_what_was_quantized_here(checkpoint, tmp_path, skip):
    with paused():
        model = LlamaForCausalLM.from_pretrained(checkpoint(**WIDE))
    halfbyte.quantize_model(model, "fp4:128" if skip is None else "nf4", skip=skip)
    if skip is None:
        for layer in model.model.layers:  # 192 columns are no multiple of 128
            halfbyte.nn.linear.dequantize_linear_(
                layer.mlp.down_proj, nn.Parameter(layer.mlp.down_proj.dequantize(torch.bfloat16), requires_grad=False)
            )
    export_bitsandbytes(model, tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(theirs.hf_quantizer) is Bnb4BitHfQuantizer
    assert_same(dense_weights(theirs), dense_weights(model))
    assert_same(load_model(tmp_path).state_dict(), model.state_dict())


@pytest.mark.parametrize("format", ["nf4", "fp4", "nf4:128", "int8"])
def test_bitsandbytes_loads_what_was_calibrated_here(checkpoint, tmp_path, format):
    """Calibration chooses codes and scales that no quantizer would: they must arrive as they are."""
    dense = checkpoint(**{**WIDE, "intermediate_size": 256})
    ids = torch.randint(0, 128, (8, 64), generator=torch.Generator().manual_seed(1))
    halfbyte.calibrate(dense, ids, format, out=tmp_path / "out", tokens=512, seq_len=64, progress=False)
    model, plain = load_model(tmp_path / "out"), load_model(dense, format)
    rows = [(n, m.weight) for n, m in model.named_modules() if isinstance(m, halfbyte.nn.QuantLinear)]
    assert len(rows) == 14
    assert all(str(model.get_submodule(name).format) == format for name, _ in rows)
    assert not any(torch.equal(weight, plain.get_submodule(name).weight) for name, weight in rows)
    export_bitsandbytes(model, tmp_path / "back")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert type(theirs.hf_quantizer) is (Bnb8BitHfQuantizer if format == "int8" else Bnb4BitHfQuantizer)
    assert_same(dense_weights(theirs), dense_weights(model))
    assert_same(load_model(tmp_path / "back").state_dict(), model.state_dict())


def test_what_bitsandbytes_has_no_form_for_is_refused(checkpoint, tmp_path):
    model = load_model(checkpoint())
    with pytest.raises(NotImplementedError, match=r"layers\.0\.self_attn\.q_proj has 96 columns, no multiple of 64"):
        export_bitsandbytes(model, tmp_path)
    with pytest.raises(NotImplementedError, match="q_proj is fp8, bitsandbytes checkpoints hold nf4, fp4 and int8"):
        export_bitsandbytes(load_model(checkpoint(), "fp8"), tmp_path)
    model.model.layers[0].mlp.up_proj = halfbyte.nn.QuantLinear(96, 200, format="int8")
    with pytest.raises(NotImplementedError, match="the model has both"):
        export_bitsandbytes(model, tmp_path)
    with pytest.raises(halfbyte.QuantizationError, match="no layer is packed"):
        export_bitsandbytes(LlamaForCausalLM.from_pretrained(checkpoint()), tmp_path)
    with pytest.raises(TypeError, match="without adapters, got PeftModel"):
        export_bitsandbytes(load_model(checkpoint(), lora={"r": 2}), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("nf4", "weight"),
        ("nf4", "weight.absmax"),
        ("nf4", "weight.quant_map"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4"),
        ("nested", "weight.nested_absmax"),
        ("nested", "weight.nested_quant_map"),
        ("int8", "weight"),
        ("int8", "SCB"),
        ("int8", "weight_format"),
    ],
)
def test_a_missing_key_is_named(damaged, kind, key):
    folder = damaged(kind, lambda tensors: tensors.pop(f"{UP}.{key}"))
    with pytest.raises(halfbyte.QuantizationError, match=rf"{UP}\.{key} .*is missing") as caught:
        load_model(folder)
    assert caught.value.names == (UP,)


@pytest.mark.parametrize("kind", ["nf4", "nf4 in bfloat16", "int8"])
def test_a_layer_of_which_only_the_weight_is_left(damaged, kind):
    def strip(tensors):
        for key in [key for key in tensors if key.startswith(UP) and key != f"{UP}.weight"]:
            del tensors[key]

    with pytest.raises(halfbyte.QuantizationError, match=rf"{UP}\.(weight\.quant_state\S+|SCB) .*is missing"):
        load_model(damaged(kind, strip))


def test_a_layer_that_is_gone_entirely(damaged):
    def remove(tensors):
        for key in [key for key in tensors if key.startswith(UP)]:
            del tensors[key]

    with pytest.raises(halfbyte.QuantizationError, match=f"{UP}: its packed rows are missing"):
        load_model(damaged("nf4", remove))


def test_layers_that_the_checkpoint_holds_dense_stay_dense_in_the_models_dtype(damaged, theirs):
    dense = torch.randn(192, 128)

    def replace(tensors):
        for key in [key for key in tensors if key.startswith(UP)]:
            del tensors[key]
        tensors[f"{UP}.weight"] = dense

    model = load_model(damaged("nf4", replace), dtype="float16")
    assert torch.equal(model.get_submodule(UP).weight, dense.half())
    assert model.model.norm.weight.dtype == model.model.layers[0].mlp.up_proj.dense_dtype == torch.float16
    assert len(halfbyte.verify(model).quantized) == 13


def test_fresh_heads_stay_dense_and_other_classes_load(theirs):
    with halfbyte.init_quantized():
        model = LlamaForSequenceClassification.from_pretrained(theirs("nf4", **WIDE))
    assert type(model.score) is nn.Linear and model.score.weight.requires_grad
    assert len(halfbyte.verify(model).quantized) == 14


def test_a_checkpoint_of_which_no_layer_can_stay_packed(theirs):
    with pytest.raises(halfbyte.QuantizationError, match="nothing was quantized: .* blocks of 64 cross rows of 96"):
        load_model(theirs("fp4", hidden_size=96, intermediate_size=224))


def test_bitsandbytes_is_not_imported(theirs):
    code = f"""
import sys
sys.modules["bitsandbytes"] = None  # any import of it raises
import halfbyte, peft_bridge
model = peft_bridge.load_model({str(theirs("nested", **WIDE))!r})
assert len(halfbyte.report(model).quantized) == 14
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
