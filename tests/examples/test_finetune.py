"""examples/finetune.py, the demo, on a model of a few thousand weights: all of its stages, and its own checks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def tiny_model(folder: Path) -> None:
    vocabulary = {word: i for i, word in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(vocabulary)}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)


def test_the_demo_learns_saves_and_reloads(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "text").write_text(" ".join(WORDS * 200))
    options = ["--steps", "30", "--length", "16", "--held-out", "8", "--rank", "4", "--lr", "1e-2"]
    files = ["--model", tmp_path / "model", "--text", tmp_path / "text", "--output", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "examples/finetune.py", "--gradient-checkpointing", *files, *options],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(float, re.search(r"held-out loss: ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert after < 0.9 * before  # eleven words in a fixed order
    assert "reloaded adapter: held-out loss" in done.stdout
    assert "(difference 0.0e+00)" in done.stdout
    assert re.search(r"\*\.self_attn\.q_proj\.base_layer +2 +nf4", done.stdout + done.stderr)  # the report is logged
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()
