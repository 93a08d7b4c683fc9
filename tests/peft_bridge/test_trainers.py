"""HF Trainer, TRL's SFTTrainer and accelerate on packed models: one process here, two FSDP ranks in trainer_ranks.py."""

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from halfbyte.nn import QuantLinear
from peft_bridge import HalfbyteConfig, HalfbyteLoraLinear

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import run_ranks

TRAINER = ["hf", "sft"]


def words(count=48):
    generator = torch.Generator().manual_seed(0)
    return [[f"w{i}" for i in torch.randint(1, 60, (12,), generator=generator).tolist()] for _ in range(count)]


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(60)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = tokenizer()([" ".join(line) for line in words()], return_tensors="pt").input_ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index], "attention_mask": torch.ones_like(self.ids[index])}


def common(folder, **settings):
    base = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    return {**base, **settings}


def lora(modules_to_save=None):
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=modules_to_save)


def load(path, dtype, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=HalfbyteConfig("nf4", **kwargs))


def run(kind, path, folder, dtype=torch.float32, adapters=None, modules_to_save=None, resume=None, **settings):
    """Trains 3 steps; returns the trainer. `adapters`: dtype that the user made them, before the trainer saw them."""
    model = load(path, dtype)
    torch.manual_seed(7 if resume else 0)  # the adapters are drawn here, and must be the same on every rank
    if kind == "hf":
        model = get_peft_model(model, lora(modules_to_save), autocast_adapter_dtype=adapters != torch.bfloat16)
        trainer = Trainer(model=model, args=TrainingArguments(**common(folder, **settings)), train_dataset=Rows())
    else:
        trl = pytest.importorskip("trl")
        from datasets import Dataset

        if adapters is not None:
            model = get_peft_model(model, lora(), autocast_adapter_dtype=adapters != torch.bfloat16)
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(max_length=16, **common(folder, **settings)),
            train_dataset=Dataset.from_dict({"text": [" ".join(line) for line in words()]}),
            processing_class=tokenizer(),
            peft_config=lora() if adapters is None else None,
        )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check(trainer, dtype, adapters):
    layers = [module for module in trainer.model.modules() if isinstance(module, HalfbyteLoraLinear)]
    assert len(layers) == 14
    assert all(isinstance(layer.base_layer, QuantLinear) for layer in layers)
    assert {layer.base_layer.weight.dtype for layer in layers} == {torch.uint8}
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 28
    assert {p.dtype for p in trained.values()} == {adapters}
    frozen = {p.dtype for p in trainer.model.parameters() if not p.requires_grad}
    assert frozen == {torch.uint8, dtype}
    assert any(float(p.detach().abs().max()) > 0 for name, p in trained.items() if "lora_B" in name)


@pytest.mark.parametrize("kind", TRAINER)
def test_a_plain_call_trains_and_leaves_dtypes_alone(checkpoint, tmp_path, kind):
    check(run(kind, checkpoint(), tmp_path), torch.float32, torch.float32)


@pytest.mark.parametrize("kind", TRAINER)
def test_checkpointing_changes_no_loss(checkpoint, tmp_path, kind):
    runs = []
    for settings in (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ):
        trainer = run(kind, checkpoint(), tmp_path, **settings)
        check(trainer, torch.float32, torch.float32)
        runs.append(losses(trainer))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("kind", TRAINER)
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_bf16_and_the_adapters_dtype_is_the_users(checkpoint, tmp_path, kind, adapters):
    settings = {"dtype": torch.bfloat16, "adapters": adapters, "bf16": True, "gradient_checkpointing": True}
    trainer = run(kind, checkpoint(), tmp_path, **settings)
    check(trainer, torch.bfloat16, adapters)


@pytest.mark.slow
def test_packing_and_a_model_id(checkpoint, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    trainer = run("sft", checkpoint(), tmp_path, packing=True, gradient_checkpointing=True)
    check(trainer, torch.float32, torch.float32)
    trainer = trl.SFTTrainer(
        model=str(checkpoint()),
        args=trl.SFTConfig(
            max_length=16,
            model_init_kwargs={"dtype": torch.float32, "quantization_config": HalfbyteConfig("nf4")},
            **common(tmp_path),
        ),
        train_dataset=Dataset.from_dict({"text": [" ".join(line) for line in words()]}),
        processing_class=tokenizer(),
        peft_config=lora(),
    )
    trainer.train()
    check(trainer, torch.float32, torch.float32)


@pytest.mark.slow
def test_resume_is_exact(checkpoint, tmp_path):
    whole = run("hf", checkpoint(), tmp_path / "whole", max_steps=4)
    run("hf", checkpoint(), tmp_path / "parts", max_steps=2, save_strategy="steps", save_steps=2)
    again = run("hf", checkpoint(), tmp_path / "parts", max_steps=4, resume=str(tmp_path / "parts/checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    states = [{n: p for n, p in trainer.model.named_parameters() if p.requires_grad} for trainer in (whole, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_two_fsdp_ranks_train_like_one_process(checkpoint, tmp_path):
    """Both versions, both forms of checkpoints, through accelerate; trainer_ranks.py checks shards, resuming and saving."""
    outputs = run_ranks(Path(__file__).with_name("trainer_ranks.py"), str(checkpoint()), str(tmp_path / "two"))
    lines = [[line for line in text.splitlines() if line.startswith("CASE ")] for text in outputs]
    assert lines[0] == lines[1]
    found = {name: eval(values) for name, _, values in (line.removeprefix("CASE ").partition(": ") for line in lines[0])}
    assert len(found) == 2 * 12 + 4 + 3 + 2
    head = ["lm_head"]

    def one(kind, **settings):  # one process sees the batches of both ranks: 2 x 2 rows a step
        return losses(run(kind, checkpoint(), tmp_path / "one", **settings))

    expected = {
        "hf": one("hf", max_steps=4),
        "sft": one("sft"),
        "packing": one("sft", packing=True),
        "clipped": one("hf", max_grad_norm=0.05),
        "bf16": one("hf", dtype=torch.bfloat16, bf16=True),
        "head": one("hf", max_steps=4, modules_to_save=head),
    }
    for name, values in found.items():
        kind = name.split("-")[0]
        like = next((word for word in ("packing", "clipped", "bf16", "head") if word in name), kind)
        if kind == "raw":
            continue
        part = expected[like][2:] if "resumed" in name else expected[like]
        bound = 0.02 if like == "bf16" else 1e-4
        assert values[-len(part) :] == pytest.approx(part[: len(values)], abs=bound), name
