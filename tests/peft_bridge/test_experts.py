"""Fused mixture-of-experts weights: packed, saved, reloaded, trained around, and never dense more than one at a time."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import halfbyte
from halfbyte.checkpoint.bitsandbytes import export_state_dict
from halfbyte.distributed import wrap_policy
from halfbyte.nn import QuantExperts, linear
from peft_bridge import HalfbyteConfig, load_model, prepare_model

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import run_ranks

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}


def build(kind):
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=136, num_local_experts=4))
    if kind == "qwen3":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "decoder_sparse_step": 1}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, intermediate_size=136, head_dim=24))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 136}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **experts, head_dim=24, layer_types=["full_attention"] * 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            model = build(kind)
            for parameter in model.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
            model.to(torch.bfloat16).save_pretrained(made[kind])
        return made[kind]

    return make


def load(path, format="nf4", **kwargs):
    config = HalfbyteConfig(format, **{k: kwargs.pop(k) for k in ("skip", "compute_dtype") if k in kwargs})
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **kwargs)


def experts(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}


both = pytest.mark.parametrize("kind", ["mixtral", "qwen3"])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_are_packed_exactly_and_compute_what_their_dense_form_does(folder, tokens, kind, implementation):
    path = folder(kind)
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model, info = load(path, dtype=torch.float32, experts_implementation=implementation, output_loading_info=True)
    assert not any(info.values())
    assert len(experts(model)) == 2
    for name, module in experts(model).items():
        for leaf, shape in module.weight_shapes.items():
            weight = source.get_submodule(name).get_parameter(leaf).detach()
            weight = weight.transpose(1, 2).contiguous() if kind == "gpt_oss" else weight
            assert tuple(weight.shape) == shape
            assert torch.equal(module.get_parameter(leaf), halfbyte.quantize(weight, "nf4")), (name, leaf)
    halfbyte.verify(model, source)
    logits = model(tokens).logits
    converted = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    report = halfbyte.quantize_model(converted)
    assert set(experts(model)) < set(report.quantized)
    assert torch.equal(converted(tokens).logits, logits)
    dense = load(path, dtype=torch.float32).dequantize()
    assert not experts(dense)
    torch.testing.assert_close(dense(tokens).logits, logits, rtol=1e-4, atol=1e-4)


@both
def test_save_and_reload(folder, tokens, tmp_path, kind):
    model = load(folder(kind))
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.layers.*.mlp.experts" in config["modules"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {key: file.get_slice(key) for key in file.keys() if "experts" in key}  # noqa: SIM118 - no mapping
        assert len(stored) == 2 * 4 * 3  # under the names of the dense checkpoint: one tensor per expert and matrix
        assert {each.get_dtype() for each in stored.values()} == {"U8"}
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(again(tokens).logits, expected)

    def damaged(change):
        tensors = load_file(tmp_path / "model.safetensors")
        changed = {key: change(key, tensor) for key, tensor in tensors.items()}
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad/config.json").write_bytes((tmp_path / "config.json").read_bytes())
        kept = {key: tensor for key, tensor in changed.items() if tensor is not None}
        save_file(kept, tmp_path / "bad/model.safetensors", {"format": "pt"})
        return tmp_path / "bad"

    def is_down(key):
        return "layers.1" in key and "experts" in key and (".w2." in key or "down_proj" in key)

    path = damaged(lambda key, tensor: None if is_down(key) else tensor)
    with pytest.raises(halfbyte.QuantizationError, match="layers.1.mlp.experts: the packed rows of down_proj are missing"):
        AutoModelForCausalLM.from_pretrained(path)
    path = damaged(lambda key, tensor: None if is_down(key) and "experts.2" in key else tensor)
    with pytest.raises(halfbyte.QuantizationError, match="down_proj must be uint8 rows of nf4 with shape .4, 96, "):
        AutoModelForCausalLM.from_pretrained(path)
    path = damaged(lambda key, tensor: tensor[..., :-16].contiguous() if is_down(key) else tensor)
    with pytest.raises(halfbyte.QuantizationError, match="down_proj must be uint8 rows of nf4 with shape .4, 96, "):
        AutoModelForCausalLM.from_pretrained(path)
    path = damaged(lambda key, tensor: tensor.float() if "layers.1" in key and "experts" in key else tensor)
    with pytest.raises(halfbyte.QuantizationError, match="layers.1.mlp.experts: .*missing|must be"):
        AutoModelForCausalLM.from_pretrained(path)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has, by dtype."""

    def __init__(self, ignore):
        super().__init__()
        self.floats, self.ignore = 0, ignore

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and func not in self.ignore:
                self.floats = max(self.floats, tensor.numel())
        return result


@both
def test_no_dense_expert_weight_exists_in_forward_or_backward(folder, kind):
    model = load(folder(kind), dtype=torch.float32)
    for name, module in experts(model).items():
        hidden = torch.randn(6, 96, requires_grad=True)
        index = torch.tensor([[0, 1], [2, 3], [1, 2], [0, 3], [1, 3], [2, 0]])
        weights = torch.rand(6, 2)
        _, N, K = module.weight_shapes["down_proj"]
        with Largest(ignore=()) as seen:
            module(hidden, index, weights).square().sum().backward()
        assert seen.floats < N * K, name  # not one of 4 experts, let alone all: activations only
        assert hidden.grad is not None
        assert not any(parameter.requires_grad for parameter in module.parameters())


@both
def test_gradients_reach_adapters_around_the_experts(folder, tokens, tmp_path, kind):
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    models = [load(folder(kind), dtype=torch.float32), load(folder(kind), dtype=torch.float32).dequantize()]
    gradients = []
    for base in models:
        torch.manual_seed(0)
        model = get_peft_model(prepare_model(base) if experts(base) else base, settings).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(len(name))
                parameter.data.normal_(0, 0.05)
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert len(gradients[0]) == 12
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-6, msg=name)
        assert float(gradient.abs().max()) > 0, name
    model = get_peft_model(load(folder(kind), dtype=torch.float32), settings).eval()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(folder(kind), dtype=torch.float32), tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    merged = model.merge_and_unload()
    assert len(experts(merged)) == 2  # LoRA was on the attention only


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("autocast", [False, True])
def test_products_run_in_the_compute_dtype(folder, compute_dtype, autocast, monkeypatch):
    model = load(folder("mixtral"), dtype=torch.float32, compute_dtype=compute_dtype)
    (module, *_) = experts(model).values()
    seen, original = set(), linear.linear_by_id
    monkeypatch.setattr(linear, "linear_by_id", lambda x, *rest: (seen.add(x.dtype), original(x, *rest))[1])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(torch.randn(3, 96), torch.tensor([[0, 1]] * 3), torch.rand(3, 2))
    assert seen == {torch.bfloat16 if compute_dtype or autocast else torch.float32}
    assert out.dtype == torch.float32


def test_skip_keeps_experts_dense_and_says_so(folder):
    model = load(folder("mixtral"), skip=("layers.1.mlp", "lm_head"))
    assert list(experts(model)) == ["model.layers.0.mlp.experts"]
    reasons = {row.name: row.reason for row in halfbyte.report(model).rows}
    assert reasons["model.layers.1.mlp.experts"] == "skip='layers.1.mlp'"
    only = load(folder("mixtral"), "int8", skip=("self_attn", "lm_head"))
    assert len(halfbyte.report(only).quantized) == 2


def test_peft_takes_experts_in_for_some_models():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    config = Glm4MoeConfig(**SIZES, **experts, intermediate_size=136, moe_intermediate_size=72, head_dim=24)
    model, other = Glm4MoeForCausalLM(config), Glm4MoeForCausalLM(config)
    halfbyte.quantize_model(model)
    halfbyte.quantize_model(other)
    with pytest.raises(NotImplementedError, match="gate_up_proj is a QuantExperts in nf4.*'all-linear' took in experts"):
        get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    around = get_peft_model(other, LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    assert len([name for name, p in around.named_parameters() if p.requires_grad]) == 2 * 2 * 2


def test_what_cannot_hold_packed_experts_says_so(folder):
    model = load(folder("mixtral"))
    with pytest.raises(NotImplementedError, match=r"mlp.experts are packed experts, which FSDP1 can't shard; use FSDP2"):
        wrap_policy(model)
    with pytest.raises(NotImplementedError, match="experts is a QuantExperts"):
        export_state_dict(model.model.layers[0].mlp)
    with pytest.raises(NotImplementedError, match="target_parameters='experts.down_proj': .*mlp.experts is packed"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"]))
    model = load_model(folder("mixtral"), lora={"r": 2})  # all-linear: around the experts
    assert len(experts(model)) == 2
    assert len([name for name, p in model.named_parameters() if p.requires_grad]) == 2 * 4 * 2


def test_two_ranks_shard_the_experts_and_train_like_one_process():
    output = run_ranks(Path(__file__).with_name("experts_ranks.py"))
    assert all("SAME" in each for each in output)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "gpt_oss"])
def test_built_in_a_context_they_are_the_quantization_of_their_dense_twins(tokens, kind):
    torch.manual_seed(0)
    dense = build(kind)
    torch.manual_seed(0)
    with halfbyte.init_quantized("nf4", skip=()):  # a skipped layer draws once more
        model = build(kind)
    assert len(experts(model)) == 2
    for name, module in experts(model).items():
        for leaf in module.weight_shapes:
            weight = dense.get_submodule(name).get_parameter(leaf).detach()
            weight = weight.transpose(1, 2).contiguous() if module.is_transposed else weight
            assert float(weight.std()) == pytest.approx(0.02, rel=0.1)  # initialized: the constructor leaves it empty
            assert torch.equal(module.get_parameter(leaf), halfbyte.quantize(weight, "nf4")), (name, leaf)
    halfbyte.quantize_model(dense, skip=())
    assert torch.equal(model(tokens).logits, dense(tokens).logits)
    assert set(halfbyte.report(model).quantized) == set(halfbyte.report(dense).quantized)


def test_in_a_context_skip_and_meta_hold_for_experts():
    with halfbyte.init_quantized("nf4", skip=("layers.1", "lm_head")):
        model = build("mixtral")
    assert list(experts(model)) == ["model.layers.0.mlp.experts"]
    left = model.model.layers[1].mlp.experts
    assert left.gate_up_proj.dtype == torch.float32
    assert float(left.gate_up_proj.detach().std()) == pytest.approx(0.02, rel=0.1)
    reasons = {row.name: row.reason for row in halfbyte.report(model).rows}
    assert "layers.1" in reasons["model.layers.1.mlp.experts"]
    with torch.device("meta"), halfbyte.init_quantized("int8"):
        model = build("qwen3")
    for module in experts(model).values():
        assert {p.dtype for p in module.parameters()} == {torch.uint8}
        assert all(p.is_meta for p in module.parameters())


def test_a_dense_model_of_experts_never_exists():
    with halfbyte.init_quantized("nf4"):
        seen, original = [], torch.Tensor.normal_

        def normal_(self, *args, **kwargs):
            alive = [m for m in made if any(p.is_floating_point() for p in m.parameters(recurse=False))]
            seen.append(len(alive))
            return original(self, *args, **kwargs)

        made = []
        hook = torch.nn.modules.module.register_module_module_registration_hook(
            lambda parent, name, child: made.append(child) if isinstance(child, QuantExperts) else None
        )
        try:
            torch.Tensor.normal_ = normal_
            build("mixtral")
        finally:
            torch.Tensor.normal_ = original
            hook.remove()
    assert len(made) == 2
    assert seen
    assert not any(seen)


WRONG = {
    "another format": ("fp4", {}, r"holds fp4 rows, the module is nf4; build it with format='fp4'"),
    "rows of another size": ("nf4", {"moe_intermediate_size": 136}, r"must have shape \(4, 144, 64\), got \(4, 272, 64\)"),
    "too few experts": ("nf4", {"num_experts": 3}, r"must have shape \(4, .* got \(3, "),
}


def qwen(**changes):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes, **changes}, intermediate_size=136, head_dim=24))


@pytest.mark.parametrize("case", WRONG)
def test_a_state_dict_that_does_not_fit_is_refused_by_name(case):
    format, changes, message = WRONG[case]
    target, other = qwen(), qwen(**changes)
    halfbyte.quantize_model(target, "nf4")
    halfbyte.quantize_model(other, format)
    key = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(RuntimeError, match=rf"(?s){key}: .*{message}"):
        target.load_state_dict(other.state_dict())


def test_state_dicts_of_experts_load_packed_dense_and_assigned(tokens):
    dense, source = qwen(), qwen()
    halfbyte.quantize_model(source)
    for state, assign in ((source.state_dict(), False), (source.state_dict(), True), (dense.state_dict(), False)):
        target = qwen()
        halfbyte.quantize_model(target)
        target.load_state_dict(state, assign=assign)
        assert len(experts(target)) == 2
        for name, module in experts(target).items():
            for leaf in module.weight_shapes:
                value = state[f"{name}.{leaf}"]
                rows = value if value.dtype == torch.uint8 else halfbyte.quantize(value, "nf4")
                assert torch.equal(module.get_parameter(leaf), rows)
    state = source.state_dict()
    state["model.layers.0.mlp.experts.down_proj"] = state["model.layers.0.mlp.experts.down_proj"].float()
    with pytest.raises(RuntimeError, match=r"down_proj: a dense weight must have shape \(4, 96, 72\), got \(4, 96, "):
        target.load_state_dict(state)


def test_the_dtype_that_experts_return_follows_the_module(folder, tokens):
    model = load(folder("qwen3"), dtype=torch.float32, compute_dtype=torch.float32).to(torch.bfloat16)
    assert {module.dense_dtype for module in experts(model).values()} == {torch.bfloat16}
    assert model(tokens).logits.dtype == torch.bfloat16
