"""The README's commands and code run as written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import halfbyte

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)


def test_commands_are_make_targets_that_exist() -> None:
    targets = re.findall(r"^make ([\w-]+)", "\n".join(COMMANDS), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "pip install" in planned.stdout or "setup.py" in planned.stdout
    assert "examples/finetune.py" in subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_code_without_a_host_runs() -> None:
    names: dict[str, object] = {}
    exec(CODE[1], names)
    assert names["dense"].shape == (8, 4096)


def test_code_with_lightning_trains(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    names: dict[str, object] = {"path": str(tmp_path)}
    limits = "max_steps=2, logger=False, enable_checkpointing=False, accelerator='cpu', "
    limited = CODE[0].replace("L.Trainer(", f"L.Trainer({limits}")
    assert limited != CODE[0]
    exec(limited, names)
    module = names["Module"]()
    ids = torch.randint(0, 96, (4, 1, 12))
    batches = [{"input_ids": x, "labels": x} for x in ids]
    names["trainer"].fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    packed = [m for m in module.modules() if isinstance(m, nn.Linear) and m.weight.dtype == torch.uint8]
    assert len(packed) == 14


def test_code_that_loads_any_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8))

    dense = Model()
    (tmp_path / "checkpoint-folder").mkdir()
    save_file(dense.state_dict(), tmp_path / "checkpoint-folder" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in CODE if "load_quantized" in block]
    names: dict[str, object] = {"Model": Model}
    exec(code, names)
    assert torch.equal(names["model"][0].weight, halfbyte.quantize(dense[0].weight.detach(), "nf4"))
    assert (tmp_path / "packed-folder").is_dir()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_code_with_bitsandbytes_folders_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from peft_bridge import export_bitsandbytes, load_model

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(tmp_path / "dense")
    monkeypatch.chdir(tmp_path)
    export_bitsandbytes(load_model("dense", "nf4"), "folder-saved-by-bitsandbytes")
    names: dict[str, object] = {}
    exec(CODE[2], names)
    first = (tmp_path / "folder-saved-by-bitsandbytes/model.safetensors").read_bytes()
    assert (tmp_path / "theirs/model.safetensors").read_bytes() == first
    assert (tmp_path / "ours/config.json").is_file()
