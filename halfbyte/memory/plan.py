"""plan: what a training step will take, before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import FORMATS, Format
from halfbyte.memory.sharded import STRATEGIES
from halfbyte.memory.simulate import OptimizerLike
from halfbyte.memory.sizes import VARY, Sizes
from halfbyte.memory.subject import make_subject

__all__ = ["MemoryPlan", "PlanComparison", "PlanRow", "parse_bytes", "plan", "plan_formats"]

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)})
_UNITS.update({f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)})


def parse_bytes(text: str | float) -> int:
    """A number of bytes, as a number or as text with a unit: "24GiB", "80 GB".

    Args:
        text: the number; units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (of 1024).

    Returns:
        Bytes.

    Raises:
        ValueError: not such a number.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"memory must be bytes, or a number with a unit such as 24GiB or 80GB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class PlanRow:
    """One kind of memory at the moment of the peak.

    Attributes:
        what: its name, for example "weights, packed" or "activations".
        bytes: bytes on one rank.
    """

    what: str
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank takes at the worst moment of a training step; `str()` is an aligned table.

    Attributes:
        rows: a `PlanRow` per kind, largest first; they add up to `peak_bytes`.
        title: what was planned.
        batch_size: rows of the batch.
        seq_len: tokens per row.
        sizes: plans the same for other sizes; None for a plan made by hand.
    """

    rows: tuple[PlanRow, ...]
    title: str
    batch_size: int
    seq_len: int
    sizes: Sizes | None = field(default=None, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Sum of the rows."""
        return sum(row.bytes for row in self.rows)

    def fits(self, memory: int | str, *, vary: str = "batch_size", limit: int = 1 << 20) -> int:
        """The largest batch (or sequence) whose peak fits.

        A few sizes are simulated and predict the others, moment by moment; the answer and the next size are simulated too.

        Args:
            memory: bytes of one device, or text such as "24GiB".
            vary: "batch_size" or "seq_len"; the other one stays as planned.
            limit: largest answer looked for.

        Returns:
            The size, 0 if not even 1 fits.

        Raises:
            ValueError: another `vary`, or `memory` is not a size.
            RuntimeError: the plan was made by hand and can't be made again.
        """
        if vary not in VARY:
            raise ValueError(f"MemoryPlan.fits: vary must be batch_size or seq_len, got {vary!r}")
        if self.sizes is None:
            raise RuntimeError("MemoryPlan.fits: this plan was not made by halfbyte.plan")
        return self.sizes.largest(parse_bytes(memory), vary, self.batch_size, self.seq_len, limit)

    def __str__(self) -> str:
        whole = max(1, self.peak_bytes)
        table = [(row.what, f"{row.bytes / 1e6:,.2f}", f"{100 * row.bytes / whole:.0f} %") for row in self.rows]
        total = ("peak per rank", f"{self.peak_bytes / 1e6:,.2f}", "")
        return f"{self.title}\n{_aligned([('', 'MB', ''), *table], total)}"

    def plot(self, file: str | Path) -> None:
        """Draws the plan as one stacked bar.

        Args:
            file: where to write; the suffix says the kind of picture.

        Raises:
            ImportError: matplotlib is missing.
        """
        from halfbyte.memory.figure import draw

        draw({self.title: self}, file)


@dataclass(frozen=True)
class PlanComparison:
    """Plans of one model in several formats, side by side; `str()` is an aligned table in MB.

    Attributes:
        plans: format name ("dense" for none) to its `MemoryPlan`.
    """

    plans: Mapping[str, MemoryPlan]

    def __str__(self) -> str:
        kinds = sorted(
            {row.what for plan in self.plans.values() for row in plan.rows},
            key=lambda what: -max(_bytes_of(plan, what) for plan in self.plans.values()),
        )
        head = ("MB", *self.plans)
        lines = [(what, *(f"{_bytes_of(plan, what) / 1e6:,.2f}" for plan in self.plans.values())) for what in kinds]
        total = ("peak per rank", *(f"{plan.peak_bytes / 1e6:,.2f}" for plan in self.plans.values()))
        return _aligned([head, *lines], total)

    def plot(self, file: str | Path) -> None:
        """Draws one stacked bar per format.

        Args:
            file: where to write; the suffix says the kind of picture.

        Raises:
            ImportError: matplotlib is missing.
        """
        from halfbyte.memory.figure import draw

        draw(self.plans, file)


def plan(
    model_or_config: nn.Module | str | Path,
    *,
    batch_size: int,
    seq_len: int,
    optimizer: OptimizerLike = "adamw8bit",
    strategy: str = "single",
    world_size: int = 1,
    checkpointing: bool | None = True,
    format: str | Format | None = None,
    lora_rank: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    batch: Callable[[int, int], Any] | None = None,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
) -> MemoryPlan:
    """Predicts the peak memory of a training step, per rank and by kind, without allocating it.

    A step of the model runs under `FakeTensorMode`: every op really happens, on tensors without data, and the lifetime of
    each storage is followed from the op that makes it to its release, through forward, backward, recomputation and the
    optimizer. Of equal blocks, one in the middle stands for all but the first and the last. Sharding is played out unit by
    unit, with the units of `halfbyte.distributed`; no process group is needed.

    Args:
        model_or_config: a module (its device may be meta), a LightningModule (its `configure_model` runs if it has no
            parameters yet; `from_pretrained` in it reads config.json only), or a folder with a transformers config.json.
        batch_size: rows of the batch of one rank.
        seq_len: tokens of a row.
        optimizer: "adamw8bit", "adam8bit", "lion8bit", "sgd8bit", "adamw", "adam", "sgd", "sgd-momentum"; a callable that
            makes one of a list of parameters; None: the LightningModule's own, or no optimizer step.
        strategy: "single", "ddp", "fsdp1" or "fsdp2".
        world_size: number of ranks.
        checkpointing: recompute each block in backward; None: as the model is set.
        format: plan for these packed weights, or "dense"; None: as the model is.
        lora_rank: wrap with PEFT's LoRA of this rank on all linear layers (a mixture's fused experts are none).
        dtype: of a folder's dense weights; None: what its config says.
        device: "cpu" or "cuda"; None: the model's, else CUDA if there is one.
        batch: makes a batch of (batch_size, seq_len); None: {"input_ids", "labels"}.
        step: computes the loss of (model, batch); None: `training_step` of a LightningModule, else the output's `.loss`.

    Returns:
        A `MemoryPlan`.

    Raises:
        ValueError: unknown optimizer, strategy or format, sizes below 1, or nothing in the model is trainable.
        TypeError: not a module or folder, or parameters of a foreign tensor class.
        FileNotFoundError: the folder has no config.json.
        ImportError: transformers or peft is needed and missing.
        RuntimeError: a plan for CUDA from a torch that is built without it.
        NotImplementedError: what the step does depends on its data in another way than by the routing of fused experts, or
            the strategy can't shard the model, as FSDP1 packed experts.

    Note:
        How a mixture routes its tokens is unknown, so the worst is planned for: all tokens choose the same experts. Any
        other routing takes at most as much, an even one only a little less, since all pairs of token and expert are kept
        for backward in any case.

        Left out: the process itself (Python, libraries, the CUDA context: often 0.3 to 0.8 GB), loading the checkpoint,
        data loading, fragmentation of an allocator, and what BLAS libraries take inside of a call.

    Example:
        >>> import torch, halfbyte
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 4))
        >>> plan = halfbyte.plan(model, batch_size=8, seq_len=1, batch=lambda rows, _: torch.zeros(rows, 1024))
        >>> {row.what: row.bytes for row in plan.rows}["weights, float32, trainable"]
        4214800
    """
    for argument, value in (("batch_size", batch_size), ("seq_len", seq_len), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"plan: {argument} must be at least 1, got {value}")
    if strategy not in STRATEGIES:
        raise ValueError(f"plan: strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy == "single" and world_size != 1:
        raise ValueError(f"plan: strategy 'single' has one rank, got world_size={world_size}")
    sizes = Sizes(
        lambda folded: make_subject(
            model_or_config,
            format=format,
            lora_rank=lora_rank,
            dtype=dtype,
            device=device,
            batch=batch,
            step=step,
            folded=folded,
        ),
        {"optimizer": optimizer, "strategy": strategy, "world_size": world_size, "checkpointing": checkpointing},
    )
    return _plan_of(sizes, batch_size, seq_len)


def _plan_of(sizes: Sizes, batch_size: int, seq_len: int) -> MemoryPlan:
    found = sizes.rows(batch_size, seq_len)
    rows = sorted((PlanRow(what, size) for what, size in found.items()), key=lambda row: -row.bytes)
    optimizer, strategy, world_size, checkpointing = sizes.arguments.values()
    ranks = "" if strategy == "single" else f", {strategy} on {world_size}"
    what = optimizer if isinstance(optimizer, str) else "its own optimizer" if optimizer else "no optimizer"
    recomputed = ", checkpointing" if checkpointing else ""
    title = f"{sizes.subject.name}: {batch_size} x {seq_len}, {what}{ranks}{recomputed}"
    return MemoryPlan(tuple(rows), title, batch_size, seq_len, sizes)


def plan_formats(
    model_or_config: nn.Module | str | Path, formats: Sequence[str | Format] = ("dense", *FORMATS), **arguments: Any
) -> PlanComparison:
    """Plans one model in several formats.

    Args:
        model_or_config: as for `plan`.
        formats: formats, or "dense".
        **arguments: as for `plan`, except `format`.

    Returns:
        A `PlanComparison`.
    """
    return PlanComparison(dict(plans_of(model_or_config, formats, **arguments)))


def plans_of(
    model_or_config: nn.Module | str | Path, formats: Sequence[str | Format], **arguments: Any
) -> Iterator[tuple[str, MemoryPlan]]:
    """The plans of `plan_formats`, one after the other."""
    simulated: MemoryPlan | None = None  # the first packed one: on an unsharded rank the others differ in one row
    for each in formats:
        if simulated is not None and simulated.sizes is not None and each != "dense":
            sizes = simulated.sizes.in_format(Format.parse(each))
            yield str(each), _plan_of(sizes, simulated.batch_size, simulated.seq_len)
            continue
        made = plan(model_or_config, format=each, **arguments)
        if each != "dense" and arguments.get("strategy", "single") in ("single", "ddp"):
            simulated = made
        yield str(each), made


def _bytes_of(plan: MemoryPlan, what: str) -> int:
    return sum(row.bytes for row in plan.rows if row.what == what)


def _aligned(table: list[tuple[str, ...]], total: tuple[str, ...]) -> str:
    widths = [max(len(line[i]) for line in [*table, total]) for i in range(len(total))]

    def text(line: tuple[str, ...]) -> str:
        return "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()

    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return "\n".join([text(table[0]), rule, *map(text, table[1:]), rule, text(total)])
