"""Tiny checkpoints built here, with widths that are no multiple of a block; nothing is ever fetched."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfbyte.nn.settings import paused

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def _config(**changes: Any) -> Any:
    sizes = {
        "hidden_size": 96,  # 1.5 blocks
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "pad_token_id": 0,
        "attention_bias": True,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(tie_word_embeddings=True, ...) -> folder of a dense bfloat16 Llama in several shards."""
    made: dict[str, Path] = {}

    def make(**changes: Any) -> Path:
        key = repr(sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("dense")
            torch.manual_seed(0)
            with paused():  # a test may ask for it inside init_quantized
                model = transformers.LlamaForCausalLM(_config(**changes))
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases that differ from their initial value
                    parameter.data += 0.1 * torch.randn_like(parameter)
            model.to(torch.bfloat16).save_pretrained(made[key], max_shard_size="100KB")
        return made[key]

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
