"""FSDP1 through accelerate: the policy it wraps by, on one process; trainer_ranks.py trains with it on two."""

import accelerate.accelerator
import peft
import peft.peft_model
import pytest
import torch
import transformers.trainer
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import halfbyte
from halfbyte.nn import QuantLinear
from peft_bridge import HalfbyteConfig, fsdp1


def plugin(**settings):
    return FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, **settings)


def adapted(path, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=HalfbyteConfig("nf4"))
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))


def units(policy, model):
    return policy._run_policy(model, set(), {"ignored_states": set(), "mixed_precision": "bf16"})


@pytest.mark.parametrize("asked", ["TRANSFORMER_BASED_WRAP", None])
def test_packed_layers_get_units_of_their_own(checkpoint, asked):
    made = plugin(auto_wrap_policy=asked)
    for _ in range(2):  # the same plugin wraps a second model
        model = adapted(checkpoint())
        made.set_auto_wrap_policy(model)
        found = units(made.auto_wrap_policy, model)
        packed = [m for m in model.modules() if isinstance(m, QuantLinear)]
        assert len(packed) == 14
        assert all(found[m]["mixed_precision"] is None and m.weight.dtype == torch.float32 for m in packed)
        blocks = [m for m in found if isinstance(m, LlamaDecoderLayer)]
        assert len(blocks) == 2
        assert all(found[m]["mixed_precision"] == "bf16" for m in blocks)
        # accelerate applies activation checkpointing by the same policy
        assert made.auto_wrap_policy._run_policy(model, set(), {}) == {m: {} for m in blocks}


def test_what_fits_no_unit_is_left_whole(checkpoint):
    model, made = adapted(checkpoint(), torch.bfloat16), plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    made.set_auto_wrap_policy(model)
    arguments = {"ignored_states": set(), "mixed_precision": None}
    made.auto_wrap_policy._run_policy(model, set(), arguments)
    whole = {n for n, p in model.named_parameters() if p in arguments["ignored_states"]}
    # bfloat16 norms beside float32 adapters, bfloat16 biases beside float32 containers
    assert len(whole) == 2 * (2 + 4)
    assert all("norm" in name or name.endswith("bias") for name in whole)


def test_dense_models_and_fsdp2_are_left_alone(checkpoint):
    dense, made = AutoModelForCausalLM.from_pretrained(checkpoint()), plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    made.set_auto_wrap_policy(dense)
    assert not isinstance(made.auto_wrap_policy, fsdp1.PackedPolicy)
    two = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    model = adapted(checkpoint())
    two.set_auto_wrap_policy(model)
    assert not isinstance(two.auto_wrap_policy, fsdp1.PackedPolicy)
    assert {m.weight.dtype for m in model.modules() if isinstance(m, QuantLinear)} == {torch.uint8}


def test_packed_experts_are_refused_by_name():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    config = transformers.MixtralConfig(**sizes, intermediate_size=64, num_local_experts=2)
    model = transformers.MixtralForCausalLM(config)
    halfbyte.quantize_model(model)
    with pytest.raises(NotImplementedError, match=r"mlp\.experts are packed experts, which FSDP1 can't shard; use FSDP2"):
        plugin().set_auto_wrap_policy(model)


def test_every_patch_is_of_a_name_that_the_callers_use_and_goes_again(checkpoint):
    """If one of these fails, the library has moved what peft_bridge.fsdp1 wraps."""
    names = [
        (FullyShardedDataParallelPlugin, "set_auto_wrap_policy"),
        (peft, "get_peft_model_state_dict"),
        (peft, "set_peft_model_state_dict"),
        (peft.peft_model, "get_peft_model_state_dict"),
        (peft.peft_model, "set_peft_model_state_dict"),
        (accelerate.accelerator, "load_fsdp_optimizer"),
        (transformers.trainer, "load_fsdp_optimizer"),
    ]
    plugin().set_auto_wrap_policy(adapted(checkpoint()))  # PEFT's are wrapped with the first model
    before = [getattr(*each) for each in names]
    assert all(hasattr(function, "__wrapped__") for function in before)
    fsdp1.uninstall()
    try:
        assert [getattr(*each) for each in names] == [function.__wrapped__ for function in before]
    finally:
        fsdp1.install()
    assert hasattr(FullyShardedDataParallelPlugin.set_auto_wrap_policy, "__wrapped__")
