"""Random GGUF files of any architecture that transformers maps: names and shapes from its own mapping, values in Q8_0."""

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers import modeling_gguf_pytorch_utils as mapping

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
}


def write_gguf(path, architecture="llama"):
    """A file whose tensors are what transformers looks for."""
    _write(path, architecture, {})
    _write(path, architecture, _tensors(path, architecture))


def _tensors(path, architecture):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = mapping.TENSOR_PROCESSORS.get(architecture, mapping.TensorProcessor)(config=config.to_dict())
    state, random, found = model.state_dict(), np.random.default_rng(0), {}
    for name, target in mapping.get_gguf_hf_weights_map(model, processor).items():
        shape = list(state[target].shape)
        if name == "output.weight" and architecture in ("gemma2", "gpt2"):
            continue  # tied
        if "_exps" in name and target.endswith("gate_up_proj"):
            shape[1] //= 2
        if architecture == "gpt2" and any(
            part in name for part in ("attn_qkv.w", "ffn_up.w", "ffn_down.w", "attn_output.w")
        ):
            shape = shape[::-1]
        found[name if "_exps" not in name or name.endswith(".weight") else f"{name}.weight"] = shape
    return {name: (0.1 * random.standard_normal(shape)).astype(np.float32) for name, shape in found.items()}


def _write(path, architecture, tensors):
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in FIELDS[architecture].items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(LETTERS) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
