"""A model of a few thousand weights, with a tokenizer, for every example."""

from __future__ import annotations

from pathlib import Path

import pytest

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def save_tiny_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(vocabulary)}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The words in a fixed order, again and again."""
    file = tmp_path_factory.mktemp("texts") / "text"
    file.write_text(" ".join(WORDS * 200))
    return file
