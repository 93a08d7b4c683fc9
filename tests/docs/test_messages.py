"""Every message that docs/troubleshooting.md quotes is one that the source can raise; code in the docs runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.nn import QuantLinear
from halfbyte.optim import AdamW8bit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OURS = (DOCS / "troubleshooting.md").read_text().partition("## Messages of torch")[0]
HEADINGS = re.findall(r"^### `(.+)`$", OURS, re.MULTILINE)
GAP = "\0"


def strings_of(file: Path) -> list[str]:
    """All string literals of a Python file; adjacent ones joined, f-string fields as gaps."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def messages() -> list[str]:
    packages = ("halfbyte", "lightning_plugin", "peft_bridge")
    return [text for package in packages for file in (ROOT / package).rglob("*.py") for text in strings_of(file)]


def test_there_are_entries() -> None:
    assert len(HEADINGS) >= 25


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_message_occurs_in_the_source(heading: str, messages: list[str]) -> None:
    parts = [part for part in heading.split("…") if part.strip(" :.,;()`")]
    assert max(map(len, parts)) >= 20, "too little of the message to find it by"
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(message) for message in messages), heading


def model_of_one_packed_layer() -> torch.nn.Module:
    return torch.nn.Sequential(QuantLinear(64, 64), torch.nn.LayerNorm(64))


@pytest.mark.parametrize(
    "attempt",
    [
        lambda model: model.requires_grad_(True),
        lambda model: model[0].weight.requires_grad_(True),
        lambda model: setattr(model[0].weight, "requires_grad", True),
        lambda model: torch.nn.Parameter(model[0].weight),
    ],
    ids=["whole model", "tensor", "attribute", "parameter"],
)
def test_messages_of_torch_are_what_a_user_sees(attempt: Any) -> None:
    with pytest.raises(RuntimeError) as raised:
        attempt(model_of_one_packed_layer())
    messages = (DOCS / "troubleshooting.md").read_text().partition("## Messages of torch")[2]
    headings = re.findall(r"^### `(.+)`$", messages, re.MULTILINE)
    assert any(heading.lower() in str(raised.value).lower() for heading in headings), raised.value


def test_the_way_out_of_them_works() -> None:
    model = model_of_one_packed_layer()
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())
    model(torch.ones(1, 64)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [False, True, True, True]


def test_a_packed_layer_says_what_to_do_instead() -> None:
    layer = QuantLinear(64, 32)
    message = r"packed rows of QuantLinear\(in_features=64, out_features=32.*PEFT's LoRA.*GradualUnfreezing"
    with pytest.raises(RuntimeError, match=message):
        layer.requires_grad_(True)
    assert not layer.requires_grad_(False).bias.requires_grad
    layer.bias.requires_grad_(True)


def test_an_optimizer_of_packed_rows_alone_is_refused() -> None:
    layer = QuantLinear(64, 32)
    with pytest.raises(ValueError, match="AdamW8bit: parameter 0 of group 0 and all others of its group are packed rows"):
        AdamW8bit([layer.weight])
    assert len(AdamW8bit(layer.parameters()).param_groups[0]["params"]) == 2  # beside what trains they are passed over


@pytest.mark.parametrize("page", ["callbacks.md", "migrating-from-bitsandbytes.md", "migrating-from-quanto-torchao.md"])
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {"path": "model", "torch": torch}
    for block in blocks:
        exec(block, names)
