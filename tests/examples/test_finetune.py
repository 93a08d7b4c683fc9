"""examples/finetune.py, the demo, on a model of a few thousand weights: all of its stages, and its own checks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_learns_saves_and_reloads(tmp_path: Path, tiny_model: Path, text: Path) -> None:
    options = ["--steps", "30", "--length", "16", "--held-out", "8", "--rank", "4", "--lr", "1e-2"]
    files = ["--model", tiny_model, "--text", text, "--output", tmp_path / "out"]
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
