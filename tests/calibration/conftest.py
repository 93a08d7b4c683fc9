"""Models small enough to calibrate in a second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


class ToyBlock(nn.Module):
    """Four experts, of which the token's number picks one, and a projection. Channel 5 of its input can be dead."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)]) for _ in range(4))
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states: Tensor, expert: Tensor) -> Tensor:
        """Adds the chosen expert's product of two layers, then the projection."""
        output = torch.zeros_like(hidden_states)
        for index, pair in enumerate(self.experts):
            chosen = expert == index
            if bool(chosen.any()):
                picked = hidden_states[chosen]
                output[chosen] = pair[0](picked) * pair[1](picked)
        return hidden_states + self.project(output)


class ToyModel(nn.Module):
    """What calibrate asks of a model, without transformers."""

    _no_split_modules = ("ToyBlock",)

    def __init__(self, width: int = 40, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(2))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """As transformers' models name it."""
        return self.embed

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        """Logits."""
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, expert=input_ids % 4)
        return self.lm_head(hidden)


@pytest.fixture
def toy() -> ToyModel:
    torch.manual_seed(0)
    return ToyModel().eval()


@pytest.fixture
def tiny_llama() -> Any:
    """A function that makes the same dense Llama each time it is called."""
    transformers = pytest.importorskip("transformers")

    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        return transformers.LlamaForCausalLM(config).eval()

    return make


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 300, (12, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tiny_model() -> Any:
    """A function that makes the dense model of an architecture by its name, the same each time."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    moe = {"num_local_experts": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4),  # Conv1D
        "gpt_neox": lambda: transformers.GPTNeoXConfig(intermediate_size=160, **sizes),
        "opt": lambda: transformers.OPTConfig(ffn_dim=160, word_embed_proj_dim=32, **sizes),  # layers outside the blocks
        "gemma2": lambda: transformers.Gemma2Config(head_dim=16, intermediate_size=96, num_key_value_heads=2, **sizes),
        "mixtral": lambda: transformers.MixtralConfig(**moe, **sizes),
        "gpt_oss": lambda: transformers.GptOssConfig(head_dim=16, **moe, **sizes),  # experts stored transposed
    }

    def make(name: str) -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(configs[name]()).eval()

    return make
