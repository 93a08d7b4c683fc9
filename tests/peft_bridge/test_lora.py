"""HalfbyteLoraLinear through PEFT's own entry points, against plain LoRA on the dequantized model."""

import copy
import inspect
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.model import LoraModel
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import AutoModelForCausalLM

import halfbyte
from halfbyte.nn import QuantLinear
from halfbyte.nn import linear as quant_linear
from halfbyte.ops.lora_linear import _kept, draw_mask
from peft_bridge import HalfbyteConfig, HalfbyteLoraLinear
from peft_bridge import lora as bridge


@pytest.fixture
def load(checkpoint):
    def from_pretrained(format="nf4", dtype=torch.float32, **kwargs):
        config = HalfbyteConfig(format, **kwargs)
        return AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=dtype, quantization_config=config)

    return from_pretrained


def lora(**kwargs):
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **kwargs})


def perturbed(model, adapter=""):
    """Gives lora_B values, so that the adapter does something."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and adapter in name:
            parameter.data.normal_(0, 0.05)
    return model


def layers(model):
    return [module for module in model.modules() if isinstance(module, HalfbyteLoraLinear)]


def set_dropouts(model, dropout):
    for module in layers(model):
        module.lora_dropout["default"] = dropout.train(model.training)


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


class DropsTheSame(nn.Dropout):
    """`nn.Dropout` as a module of its own, of the elements that lora_linear drops."""

    def forward(self, x):
        return _kept(x, draw_mask(x, self.p)) / (1 - self.p) if self.training else x


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


VARIANTS = [
    {},
    {"use_rslora": True},
    {"use_dora": True},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"},
    {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()) or "plain")
def test_outputs_and_gradients_equal_lora_on_the_dequantized_model(load, tokens, variant):
    packed = perturbed(get_peft_model(load(), lora(**variant)))
    dense = get_peft_model(load().dequantize(torch.float32), lora(**variant))
    dense.load_state_dict({k: v for k, v in packed.state_dict().items() if "lora" in k}, strict=False)
    assert {type(m) for m in layers(packed)} == {HalfbyteLoraLinear}
    assert not layers(dense)
    results = []
    for model in (packed, dense):
        model.train()
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        results.append((output.logits.detach(), gradients))
    (logits, gradients), (expected_logits, expected) = results
    assert gradients.keys() == expected.keys()
    assert len(gradients) >= 8
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4 * scale + 1e-9, msg=name)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()) or "plain")
@pytest.mark.parametrize("safe", [False, True])
def test_merge_packs_and_unmerge_restores_every_byte(load, tokens, variant, safe):
    model = perturbed(get_peft_model(load(), lora(**variant))).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(tokens).logits
    with model.disable_adapter():
        base = model(tokens).logits
    with pytest.warns(UserWarning, match="rounds the merged weights to nf4"):
        model.merge_adapter(safe_merge=safe)
    for layer in layers(model):
        assert layer.base_layer.weight.dtype == torch.uint8
        assert 0 < layer.merge_error < 1
    assert error(model(tokens).logits, expected) < 0.6 * error(base, expected)
    model.unmerge_adapter()
    after = model.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())
    assert layers(model)[0].merge_error is None
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()) or "plain")
@pytest.mark.parametrize("merged_before", [False, True])
def test_merge_and_unload_is_dense_and_loses_nothing(load, tokens, variant, merged_before, tmp_path):
    model = perturbed(get_peft_model(load(), lora(**variant))).eval()
    expected = model(tokens).logits
    if merged_before:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.merge_adapter()
            merged = model.merge_and_unload()
    else:
        merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(m, HalfbyteLoraLinear) for m in merged.modules())
    target = merged.model.layers[0].self_attn.q_proj
    assert type(target) is nn.Linear
    assert target.weight.dtype == torch.float32
    assert not target.weight.requires_grad
    if "target_modules" not in variant:
        merged.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again(tokens).logits, merged(tokens).logits)
        assert not any(isinstance(m, QuantLinear) for m in again.modules())


def test_unload_gives_the_packed_base_back(load, tokens):
    expected = load()(tokens).logits
    model = perturbed(get_peft_model(load(), lora())).unload()
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_save_and_reload_in_the_dtype_a_dense_base_gives(load, tokens, tmp_path, autocast, dtype):
    model = perturbed(get_peft_model(load(dtype=dtype), lora(), autocast_adapter_dtype=autocast)).eval()
    expected = torch.float32 if autocast else dtype
    assert {layer.lora_A.default.weight.dtype for layer in layers(model)} == {expected}
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(dtype=dtype), tmp_path, autocast_adapter_dtype=autocast)
    assert {type(m) for m in layers(again)} == {HalfbyteLoraLinear}
    assert len(layers(again)) == 14
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_several_adapters_and_mixed_batches(load, tokens):
    model = get_peft_model(load(), lora()).eval()
    model.add_adapter("second", lora(r=2))
    perturbed(model)
    default = model(tokens).logits
    model.set_adapter("second")
    second = model(tokens).logits
    assert not torch.equal(default, second)
    mixed = model(tokens, adapter_names=["default", "second"]).logits
    torch.testing.assert_close(mixed[0], default[0])
    torch.testing.assert_close(mixed[1], second[1])
    layer = layers(model)[0]
    rows = layer.base_layer.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.base_model.set_adapter(["default", "second"])
        model.merge_adapter()
        together = layer.base_layer.weight.clone()
        model.unmerge_adapter()
        model.merge_adapter(["default"])
        model.merge_adapter(["second"])  # packed again from the original rows, not on top of rounded ones
    assert torch.equal(layer.base_layer.weight, together)
    assert layer.merged_adapters == ["default", "second"]
    model.unmerge_adapter()
    assert torch.equal(layer.base_layer.weight, rows)


def test_a_merge_that_fails_changes_nothing(load, tokens):
    model = perturbed(get_peft_model(load(), lora(target_modules=["q_proj"]))).eval()
    layer = layers(model)[0]
    rows, bias = layer.base_layer.weight.clone(), layer.base_layer.bias.clone()
    layer.lora_B.default.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert not layer.merged
    assert isinstance(layer.base_layer, QuantLinear)
    assert torch.equal(layer.base_layer.weight, rows)
    assert torch.equal(layer.base_layer.bias, bias)


def test_gradient_checkpointing_changes_nothing(load, tokens):
    results = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = perturbed(get_peft_model(load(), lora()))
        if reentrant is not None:
            model.enable_input_require_grads()
            model.base_model.model.activation_checkpointing_enable(
                activation_checkpointing_kwargs={"use_reentrant": reentrant}
            )
        model.train()
        model(input_ids=tokens, labels=tokens).loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for other in results[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in results[0].items())


@pytest.mark.parametrize("initializer", ["corda", "mica", "lora_ga"])
def test_other_initializers_that_read_the_dense_weight_are_refused(load, initializer):
    kwargs = {"corda_config": __import__("peft").tuners.lora.config.CordaConfig()} if initializer == "corda" else {}
    with pytest.raises((NotImplementedError, ValueError), match="dense weight|corda|lora_ga"):
        get_peft_model(load(), lora(init_lora_weights=initializer, **kwargs))


def test_what_peft_reads_elsewhere(load):
    model = load(dtype=torch.bfloat16)
    up = model.model.layers[0].mlp.up_proj
    weight = dequantize_module_weight(up)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, up.dequantize())
    prepared = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert prepared.model.embed_tokens.weight.dtype == torch.bfloat16  # not upcast
    assert prepared.model.gradient_checkpointing
    assert not any(p.requires_grad for p in prepared.parameters())


def test_layers_copy_and_move_like_any_module(load, tokens):
    model = perturbed(get_peft_model(load(), lora())).eval()
    expected = model(tokens).logits
    assert torch.equal(copy.deepcopy(model)(tokens).logits, expected)
    halfbyte.verify(model)
    assert model.to("cpu") is model


# ---- the patch of PEFT ----------------------------------------------------------------------------------------------


def test_the_patched_method_has_the_signature_it_was_written_for():
    original = inspect.unwrap(LoraModel.__dict__["_create_new_module"].__func__)
    assert isinstance(LoraModel.__dict__["_create_new_module"], staticmethod)
    assert list(inspect.signature(original).parameters) == ["lora_config", "adapter_name", "target", "kwargs"]
    assert original.__module__ == "peft.tuners.lora.model"


def test_the_patch_is_reversible_and_idempotent(load):
    patched = LoraModel.__dict__["_create_new_module"]
    original = inspect.unwrap(patched.__func__)
    try:
        bridge.uninstall()
        bridge.uninstall()
        assert LoraModel.__dict__["_create_new_module"].__func__ is original
        model = get_peft_model(load(), lora(target_modules=["q_proj"]))
        assert type(model.base_model.model.model.layers[0].self_attn.q_proj) is LoraLinear
    finally:
        bridge.install()
        once = LoraModel.__dict__["_create_new_module"].__func__
        bridge.install()
    assert LoraModel.__dict__["_create_new_module"].__func__ is once
    assert inspect.unwrap(once) is original


def test_a_changed_signature_is_not_patched(monkeypatch):
    try:
        bridge.uninstall()
        monkeypatch.setattr(LoraModel, "_create_new_module", staticmethod(lambda config, target: None))
        with pytest.warns(RuntimeWarning, match="has changed to .config, target."):
            bridge.install()
        assert bridge._Original.method is None
    finally:
        monkeypatch.undo()
        bridge.install()


def test_custom_modules_of_the_user_come_first_and_dense_layers_are_left_to_peft(load):
    class Mine(LoraLinear):
        pass

    config = lora(target_modules=["q_proj"])
    config._register_custom_module({QuantLinear: Mine})
    model = get_peft_model(load(), config)
    assert type(model.base_model.model.model.layers[0].self_attn.q_proj) is Mine
    config = lora(target_modules=["q_proj"])
    config._register_custom_module({nn.Conv2d: Mine})
    assert len(layers(get_peft_model(load(), config))) == 2
    dense = get_peft_model(load(skip=("q_proj",)), lora(target_modules=["q_proj", "v_proj"]))
    assert type(dense.base_model.model.model.layers[0].self_attn.q_proj) is LoraLinear
    assert len(layers(dense)) == 2


@pytest.mark.parametrize(
    ("config", "change", "fused"),
    [
        ({}, lambda model: model, True),
        ({"lora_dropout": 0.1}, lambda model: model.eval(), True),
        ({"lora_dropout": 0.1}, lambda model: model.train(), True),
        ({"lora_dropout": 0.1}, lambda model: set_dropouts(model, nn.AlphaDropout(0.1)), False),
        ({"lora_dropout": 0.1}, lambda model: set_dropouts(model, hooked(nn.Dropout(0.1))), False),
        ({"use_dora": True}, lambda model: model, False),
        ({"lora_bias": True}, lambda model: model, False),
        ({}, lambda model: model.add_adapter("b", lora()) or model.base_model.set_adapter(["default", "b"]), False),
        ({}, lambda model: [m.base_layer.register_forward_hook(lambda *_: None) for m in layers(model)], False),
        ({}, lambda model: [m.lora_A["default"].register_forward_pre_hook(lambda *_: None) for m in layers(model)], False),
        ({}, lambda model: [setattr(m, "base_layer", CheckpointWrapper(m.base_layer)) for m in layers(model)], True),
    ],
)
def test_one_node_per_layer_only_where_nothing_stands_between(load, tokens, monkeypatch, config, change, fused):
    model = perturbed(get_peft_model(load(), lora(**config)))
    change(model)
    calls = []
    original = quant_linear.lora_linear_by_id
    monkeypatch.setattr(quant_linear, "lora_linear_by_id", lambda *args: calls.append(1) or original(*args))
    torch.manual_seed(3)
    logits = model(input_ids=tokens).logits
    assert len(calls) == (len(layers(model)) if fused else 0)
    monkeypatch.setattr(HalfbyteLoraLinear, "_fusible_adapter", lambda self: None)
    if fused and config:
        set_dropouts(model, DropsTheSame(config["lora_dropout"]))
    torch.manual_seed(3)
    torch.testing.assert_close(model(input_ids=tokens).logits, logits, rtol=1e-4, atol=1e-4)
