"""Everything from YAML: the format, the strategy, the callbacks and the optimizer are lines of config.yaml.

    python examples/lightning_cli/main.py fit --config examples/lightning_cli/config.yaml --model.path FOLDER
    ... --trainer.plugins.init_args.format int8 --trainer.strategy lightning_plugin.HalfbyteFSDP2Strategy
    ... --print_config > mine.yaml
"""

from __future__ import annotations

import pydoc_data.topics

import lightning.pytorch as L
import torch
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


class FineTuning(L.LightningModule):
    """A causal language model with LoRA.

    Args:
        path: a local checkpoint of transformers.
        rank: of the adapters.
        optimizer: makes the optimizer of the trainable parameters.
    """

    def __init__(self, path: str, rank: int = 8, optimizer: OptimizerCallable = torch.optim.AdamW) -> None:
        super().__init__()
        self.path, self.rank, self.optimizer, self.model = path, rank, optimizer, None

    def configure_model(self) -> None:
        if self.model is None:
            model = AutoModelForCausalLM.from_pretrained(self.path)
            lora = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear")
            self.model = get_peft_model(model, lora).train()

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


class Documentation(L.LightningDataModule):
    """Python's documentation in blocks of tokens.

    Args:
        path: the checkpoint whose tokenizer is used.
        length: tokens of a block.
        batch_size: blocks of a batch.
        characters: how much of the text.
    """

    def __init__(self, path: str, length: int = 128, batch_size: int = 4, characters: int = 200_000) -> None:
        super().__init__()
        self.path, self.length, self.batch_size, self.characters = path, length, batch_size, characters

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        text = "\n".join(pydoc_data.topics.topics.values())[: self.characters]
        ids = AutoTokenizer.from_pretrained(self.path)(text, return_tensors="pt").input_ids[0]
        blocks = list(ids[: len(ids) // self.length * self.length].view(-1, self.length))
        return torch.utils.data.DataLoader(blocks, batch_size=self.batch_size, shuffle=True)


class CLI(LightningCLI):
    """One path for the model and its tokenizer."""

    def add_arguments_to_parser(self, parser: object) -> None:
        parser.link_arguments("model.path", "data.path")


def main(arguments: list[str] | None = None) -> None:
    CLI(FineTuning, Documentation, args=arguments, save_config_callback=None)


if __name__ == "__main__":
    main()
