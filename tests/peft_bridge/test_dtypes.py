"""The user's three dtypes, never confused: what every parameter, activation, query, key, value and gradient is.

The rule: a packed layer multiplies in the compute dtype and returns the dtype it was built with (or its input's, if that is
the compute dtype); attention around packed projections runs in the compute dtype as a whole. Autocast decides where active.
"""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import halfbyte
from halfbyte.nn import QuantLinear
from peft_bridge import HalfbyteConfig, HalfbyteLoraLinear, prepare_model

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}
FP32, BF16 = torch.float32, torch.bfloat16


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=24, use_cache=False))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for dtype in (FP32, BF16):
        made[dtype] = tmp_path_factory.mktemp("qwen3")
        torch.manual_seed(0)
        qwen3().to(dtype).save_pretrained(made[dtype])
    return made


@pytest.fixture
def attention_inputs(monkeypatch):
    """Dtypes of the queries, keys and values that reach `scaled_dot_product_attention`'s wrapper."""
    seen, original = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module, query, key, value, *args, **kwargs):
        seen.append((query.dtype, key.dtype, value.dtype))
        return original(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("sdpa", spy)
    yield seen
    AttentionInterface.register("sdpa", original)


def make(how, folder, module_dtype, compute_dtype):
    if how == "cast":  # loaded in the other dtype; the packed layers have to follow the dense ones
        other = FP32 if module_dtype == BF16 else BF16
        return make("loaded", folder, other, compute_dtype).to(module_dtype)
    if how == "loaded":
        config = HalfbyteConfig("nf4", compute_dtype=compute_dtype)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=module_dtype, quantization_config=config)
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(module_dtype)
        with halfbyte.init_quantized("nf4", compute_dtype=compute_dtype):
            return qwen3()
    finally:
        torch.set_default_dtype(default)


GRID = list(itertools.product((None, FP32, BF16), (FP32, BF16), (FP32, BF16), (False, True)))


@pytest.mark.parametrize("how", ["loaded", "born", "cast"])
@pytest.mark.parametrize("norms", ["as the model", "float32"])
@pytest.mark.parametrize(("compute", "trainable", "module", "autocast"), GRID, ids=str)
def test_every_dtype(folders, tokens, attention_inputs, how, norms, compute, trainable, module, autocast):
    model = make(how, folders[module], module, compute)
    if norms == "float32":
        for name, part in model.named_modules():
            if name.endswith(("q_norm", "k_norm")):
                part.float()
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    settings = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(prepare_model(model), settings, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(trainable)
    outputs = {}
    for name, part in model.named_modules():
        if isinstance(part, (QuantLinear, HalfbyteLoraLinear)) or name.endswith(("lm_head", "layers.1")):
            part.register_forward_hook(lambda _, args, out, name=name: outputs.update({name: (args[0].dtype, out.dtype)}))
    with torch.autocast("cpu", BF16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    # parameters: storage is uint8, the rest as the model was built
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.dtype == parameter.grad.dtype == trainable, name
            assert bool(torch.isfinite(parameter.grad).all())
            continue
        original = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert parameter.dtype == before[original], name
        packed = "_proj" in name and name.endswith("weight")
        upcast = norms == "float32" and name.endswith(("q_norm.weight", "k_norm.weight"))
        assert parameter.dtype == (torch.uint8 if packed else FP32 if upcast else module), name
        assert parameter.grad is None
    # queries, keys and values: the compute dtype, whatever rotary tables and norms are
    wanted = BF16 if autocast else compute or module
    assert set(attention_inputs) == {(wanted,) * 3}
    assert len(attention_inputs) == 4  # two layers, once more in backward: recomputed alike
    # activations: a packed layer returns what a dense one would; the residual stream stays the module's
    assert len(outputs) == 14 + 4 + 2
    for name, (entered, returned) in outputs.items():
        if name.endswith("layers.1"):
            assert entered == returned == module
        elif name.endswith("lm_head"):
            assert returned == (BF16 if autocast else module)
        else:
            assert returned == (BF16 if autocast else entered), name
            if not autocast:
                assert entered == (wanted if "self_attn" in name else module), name


def test_the_product_itself_runs_in_the_compute_dtype(monkeypatch):
    import halfbyte.nn.linear as linear

    seen, original = [], linear.linear_by_id
    monkeypatch.setattr(linear, "linear_by_id", lambda input, *rest: (seen.append(input.dtype), original(input, *rest))[1])
    layer = QuantLinear(64, 64, compute_dtype="bfloat16")
    assert layer(torch.randn(2, 64)).dtype == FP32
    layer.compute_dtype = FP32
    assert layer(torch.randn(2, 64, dtype=BF16)).dtype == FP32  # it was built in it
    with torch.autocast("cpu", BF16):
        assert layer(torch.randn(2, 64)).dtype == BF16  # as nn.Linear returns it
    layer.compute_dtype = None
    assert layer(torch.randn(2, 64, dtype=BF16)).dtype == BF16
    assert seen == [BF16, FP32, FP32, BF16]


def test_float32_storage_is_nobodys_default(folders):
    """The complaint that started this: 4-bit models whose dense parts silently became float32."""
    model = AutoModelForCausalLM.from_pretrained(folders[BF16], quantization_config=HalfbyteConfig("nf4"))
    assert {p.dtype for p in model.parameters()} == {torch.uint8, BF16}
    assert {p.dtype for p in prepare_model(model).parameters()} == {torch.uint8, BF16}


def test_a_cache_holds_the_compute_dtype_too(tokens):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    halfbyte.quantize_model(model, compute_dtype="bfloat16")
    layer = model(tokens).past_key_values.layers[0]
    assert layer.keys.dtype == layer.values.dtype == BF16
    assert model.generate(tokens, max_new_tokens=4, do_sample=False).shape == (2, 13)
