"""Random GGUF files of any architecture that transformers maps: names and shapes from its own mapping, values in Q8_0."""

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import modeling_gguf_pytorch_utils as mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported

LETTERS = ["<eos>", *"abcdefghijklmnopqrstuvwxyz", "ab", "abc", "d e", "f"]
_COMMON = {"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128}
_ATTENTION = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
FIELDS = {
    "llama": {**_COMMON, **_ATTENTION, "rope.freq_base": 10000.0, "vocab_size": len(LETTERS)},
    "gemma2": {**_COMMON, **_ATTENTION, "attention.key_length": 16, "attention.value_length": 16},
    "gpt2": {**_COMMON, "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 256},
    "qwen3moe": {
        **_COMMON,
        **_ATTENTION,
        "rope.freq_base": 10000.0,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "attention.key_length": 16,
    },
    "qwen35moe": {
        **_COMMON,
        **_ATTENTION,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
        "attention.key_length": 16,
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "expert_shared_feed_forward_length": 64,
    },
}
_QWEN35 = (
    *(f"attn_{name}.weight" for name in ("norm", "qkv", "gate", "q", "k", "v", "output", "q_norm", "k_norm")),
    *(f"ffn_{name}.weight" for name in ("gate_inp", "gate_exps", "up_exps", "down_exps")),
    *(f"ffn_{name}_shexp.weight" for name in ("gate_inp", "gate", "up", "down")),
    *(
        f"ssm_{name}"
        for name in ("alpha.weight", "beta.weight", "conv1d.weight", "norm.weight", "out.weight", "a", "dt.bias")
    ),
    "post_attention_norm.weight",
)


def write_gguf(path, architecture="llama"):
    """A file whose tensors are what transformers looks for."""
    _write(path, architecture, {})
    _write(path, architecture, _tensors(path, architecture))


def _tensors(path, architecture):
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state, random, found = model.state_dict(), np.random.default_rng(0), {}
    if is_gguf_arch_supported(architecture):  # transformers' newer way
        conversions = get_gguf_conversion_mapping(architecture, config)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        layers = [f"blk.{layer}.{name}" for layer in range(FIELDS[architecture]["block_count"]) for name in _QWEN35]
        names = {
            name: rename_source_key(name, renamings, converters)[0]
            for name in ("token_embd.weight", "output.weight", "output_norm.weight", *layers)
        }
        names = {name: target for name, target in names.items() if target in state}
    else:
        processor = mapping.TENSOR_PROCESSORS.get(architecture, mapping.TensorProcessor)(config=config.to_dict())
        names = mapping.get_gguf_hf_weights_map(model, processor)
    for name, target in names.items():
        shape = list(state[target].shape)
        if name == "output.weight" and architecture in ("gemma2", "gpt2"):
            continue  # tied
        if "_exps" in name and target.endswith("gate_up_proj"):
            shape[1] //= 2
        if architecture == "gpt2" and any(
            part in name for part in ("qkv.weight", "ffn_up.w", "ffn_down.w", "output.weight")
        ):
            shape = shape[::-1]
        if "ssm_conv1d" in name:
            shape = [shape[0], shape[2]]
        if "gate_inp_shexp" in name:
            shape = [shape[1]]
        found[name if "_exps" not in name or name.endswith(".weight") else f"{name}.weight"] = shape
    tensors = {name: (0.1 * random.standard_normal(shape)).astype(np.float32) for name, shape in found.items()}
    return {name: -np.exp(values) if name.endswith("ssm_a") else values for name, values in tensors.items()}


def _write(path, architecture, tensors):
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in FIELDS[architecture].items():
        add = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(LETTERS) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, values in tensors.items():
        blocks = values.ndim > 1 and values.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if blocks else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
