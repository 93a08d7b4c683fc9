"""transformers and PEFT under the plugin: plain calls in `configure_model` and `init_module` come out quantized."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning_models import LR, RESUME_AT, STEPS, Module, trainer
from torch import nn

import halfbyte
from halfbyte.nn import QuantLinear
from lightning_plugin import HalfbytePrecision, QuantizationReport, load_from_checkpoint

pytest.importorskip("peft_bridge")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
TOKENS = torch.randint(0, 64, (STEPS, 2, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of a tiny Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def with_lora(model: nn.Module, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    return model.train()


class Language(L.LightningModule):
    """A LightningModule that knows nothing of halfbyte."""

    def __init__(self, path: str, where: str = "configure", seed: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.model = self.build() if where == "init" else None

    def build(self) -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.hparams["path"], dtype=torch.float32)
        return with_lora(model, self.hparams["seed"])

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def training_step(self, _, index):
        tokens = TOKENS[self.global_step]
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    configure_optimizers = Module.configure_optimizers
    train_dataloader = Module.train_dataloader


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """Losses of the loop written by hand: dense load, layers packed one by one, PEFT, AdamW."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantLinear.from_linear(layer, "nf4"))
    model = with_lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = []
    for tokens in TOKENS:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_layout(module: nn.Module) -> None:
    rows = halfbyte.verify(module).rows
    packed = [row.name for row in rows if row.format]
    assert len(packed) == 14
    assert all(name.endswith("base_layer") for name in packed)
    assert not any("lora_" in name or "lm_head" in name for name in packed)
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trainable) == 28
    assert all("lora_" in name for name in trainable)


@pytest.mark.parametrize("where", ["configure", "init"])
def test_from_pretrained_and_get_peft_model(folder: Path, expected: list[float], where: str) -> None:
    module = Language(str(folder), where)
    trainer(HalfbytePrecision("nf4")).fit(module)
    assert_layout(module)
    assert module.losses == pytest.approx(expected, rel=5e-6)


def test_inside_init_module(folder: Path, expected: list[float]) -> None:
    run = trainer(HalfbytePrecision("nf4"))
    with run.init_module():
        module = Language(str(folder), "init")
        assert_layout(module)
    run.fit(module)
    assert_layout(module)
    assert module.losses == pytest.approx(expected, rel=5e-6)


@pytest.mark.parametrize("where", ["configure", "init"])
def test_resume_and_load_from_checkpoint(folder: Path, tmp_path: Path, where: str) -> None:
    whole = Language(str(folder), where)
    trainer(HalfbytePrecision("nf4")).fit(whole)
    first, run = Language(str(folder), where), trainer(HalfbytePrecision("nf4"), max_steps=RESUME_AT)
    run.fit(first)
    run.save_checkpoint(tmp_path / "llama.ckpt")
    second = Language(str(folder), where, seed=9)
    trainer(HalfbytePrecision("nf4")).fit(second, ckpt_path=tmp_path / "llama.ckpt")
    assert first.losses + second.losses == whole.losses
    loaded = load_from_checkpoint(Language, tmp_path / "llama.ckpt")
    assert_layout(loaded)
    mine, theirs = first.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)


def test_a_model_left_in_eval_mode_by_from_pretrained_is_warned_about(folder: Path) -> None:
    class Forgetful(Language):
        def build(self) -> nn.Module:
            return super().build().eval()

    with pytest.warns(UserWarning, match=r"modules in eval mode: model\. Their dropout and gradient checkpointing"):
        trainer(HalfbytePrecision(), max_steps=1, callbacks=[QuantizationReport()]).fit(Forgetful(str(folder)))
