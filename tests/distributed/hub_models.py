"""Tiny transformers models that are renamed, merged, tied or transposed on their way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=16),
}


def saved(name: str, path: Path) -> None:
    """Writes a random model, the same for the same name."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(path)
