"""init_quantized and its hosts: from_pretrained inside it streams packed, adapters built inside it stay dense."""

import subprocess
import sys

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import halfbyte
from halfbyte.nn import QuantLinear
from halfbyte.nn.init import entered
from halfbyte.nn.settings import InitSettings
from peft_bridge import HalfbyteConfig


def packed(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def lora(**kwargs):
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **kwargs)


@pytest.mark.parametrize("cls", [AutoModelForCausalLM, LlamaForCausalLM])
def test_from_pretrained_inside_is_from_pretrained_with_a_config(checkpoint, tokens, cls):
    path = checkpoint()
    expected = cls.from_pretrained(path, quantization_config=HalfbyteConfig("int8", compute_dtype="bfloat16"))
    with halfbyte.init_quantized("int8", compute_dtype="bfloat16"):
        model = cls.from_pretrained(path)
    assert {m.compute_dtype for m in packed(model).values()} == {torch.bfloat16}
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert model.config.quantization_config == expected.config.quantization_config


def test_built_counts_what_the_host_built(checkpoint):
    settings = InitSettings("nf4", None, None)
    with entered(settings):
        AutoModelForCausalLM.from_pretrained(checkpoint())
        _, _ = AutoModelForCausalLM.from_pretrained(checkpoint(), output_loading_info=True)
    assert settings.built == 28


def test_skip_is_handed_on(checkpoint):
    with halfbyte.init_quantized(skip=("mlp",)):
        model = AutoModelForCausalLM.from_pretrained(checkpoint())
    assert len(packed(model)) == 9  # 2 x qkvo and the head


def test_the_call_and_the_checkpoint_have_the_last_word(checkpoint, tmp_path):
    with halfbyte.init_quantized("nf4"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=HalfbyteConfig("fp8"))
    assert {str(m.format) for m in packed(model).values()} == {"fp8"}
    model.save_pretrained(tmp_path)
    for config in (None, model.config):
        with halfbyte.init_quantized("nf4"):
            again = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
        assert {str(m.format) for m in packed(again).values()} == {"fp8"}


def test_only_from_pretrained_is_wrapped_and_only_inside(checkpoint):
    before = PreTrainedModel.__dict__["from_pretrained"]
    names = set(PreTrainedModel.__dict__)
    with entered(InitSettings("nf4", None, None)), halfbyte.init_quantized("int8"):
        changed = {n for n in names if PreTrainedModel.__dict__[n] is not before and n == "from_pretrained"}
        assert changed == {"from_pretrained"}
        assert set(PreTrainedModel.__dict__) == names
        AutoModelForCausalLM.from_pretrained(checkpoint())
        nn.Linear(8, 8)
    assert PreTrainedModel.__dict__["from_pretrained"] is before
    assert not packed(AutoModelForCausalLM.from_pretrained(checkpoint()))


def test_the_innermost_context_rules(checkpoint):
    outer, inner = InitSettings("nf4", None, None), InitSettings("int8", None, None)
    with entered(outer):
        with entered(inner):
            first = AutoModelForCausalLM.from_pretrained(checkpoint())
        second = AutoModelForCausalLM.from_pretrained(checkpoint())
    assert {str(m.format) for m in packed(first).values()} == {"int8"}
    assert {str(m.format) for m in packed(second).values()} == {"nf4"}
    assert (inner.built, outer.built) == (14, 14)


def test_a_failing_load_leaves_nothing_behind(checkpoint, tmp_path):
    before = PreTrainedModel.__dict__["from_pretrained"]
    with pytest.raises((OSError, ValueError), match=str(tmp_path)), halfbyte.init_quantized():
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert PreTrainedModel.__dict__["from_pretrained"] is before
    assert type(nn.Linear(4, 4)) is nn.Linear


def test_gguf_is_refused_with_a_way_out(checkpoint):
    with pytest.raises(NotImplementedError, match="GgufConfig"), halfbyte.init_quantized():
        LlamaForCausalLM.from_pretrained(checkpoint(), gguf_file="model.gguf")


def test_adapters_built_inside_stay_dense(checkpoint, tokens, tmp_path):
    with halfbyte.init_quantized():
        model = AutoModelForCausalLM.from_pretrained(checkpoint())
        adapted = get_peft_model(model, lora(modules_to_save=["lm_head"]))
        adapted.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
        adapted.save_pretrained(tmp_path)
        adapted.load_adapter(str(tmp_path), "third")
        hand_built = LlamaForCausalLM(model.config)  # the context is on again
        peft.inject_adapter_in_model(lora(), other := LlamaForCausalLM(model.config))
        reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint()), str(tmp_path))
    assert len(packed(adapted)) == len(packed(hand_built)) == len(packed(other)) == len(packed(reloaded)) == 14
    for each in (adapted, other, reloaded):
        adapters = [m for n, m in each.named_modules() if ".lora_" in n and isinstance(m, nn.Linear)]
        assert len(adapters) >= 28
        assert {type(m) for m in adapters} == {nn.Linear}
    assert all(p.is_floating_point() for p in adapted.parameters() if p.requires_grad)
    assert torch.equal(reloaded(tokens).logits, adapted(tokens).logits)


def test_peft_is_put_back_after_the_context():
    before = [(c, n, c.__dict__[n]) for c, n in ((PeftModel, "add_adapter"), (BaseTuner, "inject_adapter"))]
    with halfbyte.init_quantized():
        nn.Linear(4, 4)
        assert all(c.__dict__[n] is not f for c, n, f in before)
    assert all(c.__dict__[n] is f for c, n, f in before)


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_hosts_that_are_imported_inside_the_context(checkpoint):
    """As users write it: neither transformers nor PEFT nor the bridge is imported when the context is entered."""
    out = run(
        f"""
import sys, torch, halfbyte
assert "transformers" not in sys.modules and "peft_bridge" not in sys.modules
with halfbyte.init_quantized():
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained({str(checkpoint())!r})
    assert "peft_bridge" in sys.modules and "peft" not in sys.modules
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
layers = [m for n, m in model.named_modules() if n.endswith("up_proj")]
names = lambda modules: {{type(m).__name__ for m in modules}}
print(names(layers), names(m.base_layer for m in layers), names(m.lora_A.default for m in layers))
"""
    )
    assert out.strip().splitlines()[-1] == "{'HalfbyteLoraLinear'} {'QuantLinear'} {'Linear'}"


def test_importing_the_bridge_prints_nothing_and_leaves_peft_alone():
    out = run(
        """
import os, sys
import transformers.quantizers.auto  # what this prints is its own
before = dict(os.environ)
import io, contextlib
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
    import peft_bridge
assert out.getvalue() == "" and err.getvalue() == "", (out.getvalue(), err.getvalue())
assert dict(os.environ) == before and "peft.peft_model" not in sys.modules
import torch
assert not torch.cuda.is_initialized()
import peft
from peft.tuners.lora.model import LoraModel
assert LoraModel._create_new_module.__wrapped__ is not None
print("fine")
"""
    )
    assert out.strip() == "fine"
