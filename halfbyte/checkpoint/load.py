"""load_quantized: a checkpoint into a model, quantized on the way; in one process or by one rank for all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfbyte.checkpoint.cache import Cache
from halfbyte.checkpoint.layout import Layout, Slot, apply_layout, fill_rest, plan_layout, skeleton
from halfbyte.checkpoint.sources import Entry, Found, Source, TensorSource, module_source, open_source
from halfbyte.errors import QuantizationError
from halfbyte.formats import Format
from halfbyte.nn.packed import as_dtype
from halfbyte.nn.report import Report, report
from halfbyte.nn.skip import SkipRules

__all__ = ["load_quantized"]

_CHUNK = 8 << 20


def load_quantized(
    model: nn.Module,
    directory_or_checkpoint: str | os.PathLike[str],
    format: str | Format | None = None,
    *,
    skip: Iterable[str] | None = None,
    compute_dtype: torch.dtype | str | None = None,
    process_group: Any = None,
    source_rank: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    verify: str = "fast",
    lazy: bool = False,
    device: torch.device | str | int | None = None,
    progress: bool = True,
) -> Report:
    """Loads a safetensors checkpoint into a model whose linear layers become (or are) packed.

    Reads dense checkpoints (quantized while they are read, straight into the model's memory), folders of `save_quantized`
    and of `save_pretrained` with `peft_bridge`, and bitsandbytes'. The model may be on meta, dense, or built under
    `init_quantized`; names must be those of the checkpoint.

    With several ranks only one opens the checkpoint. The others receive packed rows: all of them, or under FSDP2
    (`halfbyte.distributed.fully_shard` of a packed model) their own. The result is that of one process, byte for byte. A
    failure on any rank raises on all within 10 s and leaves the training group usable.

    Args:
        model: any module. Its parameters keep their dtypes, `requires_grad` and devices; those on meta are allocated.
        directory_or_checkpoint: a folder, a `.safetensors` file or an index of several.
        format: a `Format` or its name for linear layers that the checkpoint holds dense; None: the model's own, else nf4.
            In a quantized checkpoint what is dense stays so.
        skip: names that stay dense, see `quantize_model`; rows of the checkpoint that it names are decoded.
        compute_dtype: see `QuantLinear`.
        process_group: the ranks that load together; None: the default group if torch.distributed is initialized.
        source_rank: rank within the group that reads.
        cache_dir: a folder that keeps the quantized result, so that the next load of the same files quantizes nothing;
            used by the source only and for every number of ranks.
        verify: how a cached result is matched with its source: "fast" by path, size, time of change and header, "full" by
            all of its content. Checksums are verified in either case.
        lazy: quantize each packed layer when it is first used, from the checkpoint, which must stay in place (one process).
        device: where to put the tensors; None: where they are, "cpu" for meta.
        progress: show a progress bar on the source, in a terminal (needs tqdm).

    Returns:
        The `Report` of the model.

    Raises:
        QuantizationError: a tensor is missing, unexpected, misshapen or damaged; `.names` lists them. Or nothing was packed.
        FileNotFoundError: there is no checkpoint.
        NotImplementedError: it was quantized by something else, or `lazy` with several ranks.
        ValueError: unknown `format` or `verify`; `lazy` with `cache_dir`; ranks that differ in arguments or model; FSDP1
            (load before wrapping).
        RuntimeError: another rank failed; the text is that of the failure.

    Note:
        Deterministic. After an error the model's values are undefined. Linear layers that the checkpoint lacks entirely (new
        heads) stay dense with the values they have. `verify="fast"` trusts times of change.

    Example:
        >>> import torch, halfbyte, tempfile, os
        >>> from safetensors.torch import save_file
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> save_file({"0.weight": torch.randn(64, 128), "0.bias": torch.zeros(64)}, path)
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(128, 64))
        >>> halfbyte.load_quantized(model, path, "nf4", progress=False).quantized
        ('0',)
    """
    if verify not in ("fast", "full"):
        raise ValueError(f"load_quantized: verify must be 'fast' or 'full', got {verify!r}")
    if lazy and cache_dir is not None:
        raise ValueError(
            "load_quantized: cache_dir quantizes every layer at once, lazy=True none before its use; choose one"
        )
    request = _Request(
        model,
        directory_or_checkpoint,
        None if format is None else Format.parse(format),
        None if skip is None else SkipRules(skip).patterns,
        as_dtype("compute_dtype", compute_dtype),
        cache_dir,
        verify,
        None if device is None else torch.device(device),
        progress,
    )
    group = _group_of(process_group)
    with torch.no_grad():
        if group is None:
            request.alone(lazy)
        elif lazy:
            raise NotImplementedError(
                f"load_quantized: lazy=True works in one process, this group has {group.size()} ranks, which would each "
                f"read the checkpoint; use lazy=False (one rank reads)"
            )
        else:
            request.together(group, source_rank)
        fill_rest(model, request.device)
    return report(model)


def _group_of(process_group: Any) -> Any:
    """The group if it has several ranks, else None."""
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        process_group = dist.group.WORLD
    return process_group if process_group.size() > 1 else None


class _Request:
    """The arguments of one load, checked."""

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        format: Format | None,
        skip: tuple[str, ...] | None,
        compute_dtype: torch.dtype | None,
        cache_dir: str | os.PathLike[str] | None,
        verify: str,
        device: torch.device | None,
        progress: bool,
    ) -> None:
        self.model, self.path, self.format, self.skip, self.compute_dtype = model, path, format, skip, compute_dtype
        self.cache_dir, self.verify, self.device, self.progress = cache_dir, verify, device, progress

    def alone(self, lazy: bool) -> None:
        with ExitStack() as stack:
            source: Any = open_source(self.path)
            stack.callback(source.close)
            layout = plan_layout(self.model, source, self.format, self.skip)
            slots = apply_layout(self.model, layout, self.compute_dtype, self.device)
            if lazy:
                from halfbyte.checkpoint.lazy import defer

                slots = defer(slots, source)
                stack.pop_all()  # the deferred layers keep the files open
            total = sum((slot.stop - slot.start) * slot.entry.row_nbytes for slot in slots)
            tick = stack.enter_context(progress_bar(total, self.progress))
            filled = _WithFresh(self.model, layout)
            self.each_source(source, layout, lambda found: fill_slots(slots, filled.over(found), tick))

    def together(self, group: Any, source_rank: int) -> None:
        from halfbyte.distributed.connections import LoaderGroup
        from halfbyte.distributed.loading import BUCKET_BYTES, plan_buckets, receive, send

        with ExitStack() as stack, LoaderGroup(group, source_rank, "load_quantized") as ranks:
            source: Any = None

            def plan() -> tuple[dict[str, Any], Any]:
                nonlocal source
                layout = None
                if ranks.is_source:
                    source = open_source(self.path)
                    stack.callback(source.close)
                    layout = plan_layout(self.model, source, self.format, self.skip)
                return self.settings(), layout

            found = ranks.agree(plan)
            check_settings([settings for settings, _ in found], source_rank)
            layout: Layout = found[source_rank][1]

            slots: list[Slot] = []

            def ready() -> list[tuple[int, int]]:
                slots.extend(apply_layout(self.model, layout, self.compute_dtype, self.device))
                return [(slot.start, slot.stop) for slot in slots]

            spans = ranks.agree(ready)
            buckets = plan_buckets(layout.entries, spans, BUCKET_BYTES)
            if not ranks.is_source:
                receive(ranks, slots, buckets)
                return
            total = sum(bucket.nbytes * (ranks.world if bucket.scatter else 1) for bucket in buckets)
            tick = stack.enter_context(progress_bar(total, self.progress))
            filled = _WithFresh(self.model, layout)
            send(
                ranks,
                slots,
                spans,
                buckets,
                lambda run, wanted: self.each_source(source, layout, lambda found: run(filled.over(found)), wanted),
                tick,
            )

    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        from halfbyte.checkpoint.files import VERSION

        return {
            "format": None if self.format is None else str(self.format),
            "skip": self.skip,
            "compute_dtype": str(self.compute_dtype),
            "version": VERSION,
            "model": skeleton(self.model),
        }

    def each_source(
        self, source: Any, layout: Layout, run: Callable[[Source], None], still_wanted: Callable[[], None] = lambda: None
    ) -> None:
        """Runs with the cache's rows if there is one, else with the checkpoint; a cache that is damaged is made anew.

        `still_wanted` raises when the load was given up: making a cache takes long.
        """
        if self.cache_dir is None:
            run(source)
            source.checkpoint.check_unchanged()
            return
        stored = [entry for entry in layout.entries if entry.name not in layout.fresh]
        keeper = Cache(self.cache_dir, source, stored, self.verify, lambda nbytes: still_wanted())
        if self._ran(keeper, run):
            return
        try:
            keeper.rebuild()
        except OSError as error:
            warnings.warn(f"load_quantized: the cache could not be written ({error}); loaded without it", stacklevel=2)
        else:
            if self._ran(keeper, run):
                return
        run(source)
        source.checkpoint.check_unchanged()

    def _ran(self, keeper: Cache, run: Callable[[Source], None]) -> bool:
        """Whether the cache held everything, undamaged."""
        opened = keeper.open()
        if opened is None:
            return False
        with closing(opened):
            try:
                run(opened)
            except (QuantizationError, OSError) as error:
                keeper.warn(error)
                return False
        return True


def check_settings(found: Sequence[dict[str, Any]], source_rank: int) -> None:
    """Raises ValueError on every rank if one rank's settings are not the source's."""
    wanted = found[source_rank]
    for rank, settings in enumerate(found):
        for name, value in wanted.items():
            if settings[name] == value:
                continue
            ours, theirs = value, settings[name]
            if name == "model":
                pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
                ours, theirs = pairs[0] if pairs else (f"{len(ours)} tensors", f"{len(theirs)} tensors")
            raise ValueError(
                f"load_quantized: ranks differ in {name}: rank {source_rank} (the source) has {ours}, rank {rank} has "
                f"{theirs}"
            )


class _WithFresh:
    """A source over which the model's own values take precedence for what the checkpoint doesn't hold."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._fresh = layout.fresh
        self._own: TensorSource | None = module_source(model) if layout.fresh else None
        self._source: Any = None
        self.quantized = False

    def over(self, source: Source) -> Source:
        """The same with another source."""
        self._source = source
        return self if self._fresh else source

    def names(self) -> Iterator[str]:
        return iter(self._source.names())

    def find(self, name: str, dense_shape: tuple[int, ...] | None, embedding: bool = False) -> Found:
        found: Found = self._source.find(name, dense_shape, embedding)
        return found

    def fill(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        owner: Any = self._own if entry.name in self._fresh else self._source
        owner.fill(entry, start, stop, out)

    def close(self) -> None:
        self._source.close()


def fill_slots(slots: Sequence[Slot], source: Source, tick: Callable[[int], None]) -> None:
    """Fills this process's part of every slot, in place where its memory allows."""
    scratch = torch.empty(0, dtype=torch.uint8)
    for slot in slots:
        entry, memory = slot.entry, slot.memory()
        step = slot.stop - slot.start if memory is not None else max(1, _CHUNK // max(1, entry.row_nbytes))
        for first in range(slot.start, slot.stop, max(1, step)):
            last = min(first + step, slot.stop)
            size = (last - first) * entry.row_nbytes
            if memory is not None:
                source.fill(entry, first, last, memory)
            elif size:
                if scratch.numel() < size:
                    scratch = torch.empty(size, dtype=torch.uint8)
                source.fill(entry, first, last, scratch[:size])
                slot.write(first - slot.start, scratch[:size])
            tick(size)


@contextmanager
def progress_bar(total: int, shown: bool, what: str = "loading") -> Iterator[Callable[[int], None]]:
    """A bar over bytes if asked for, tqdm is installed and stderr is a terminal."""
    bar: Any = None
    if shown:
        try:
            from tqdm.auto import tqdm

            bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None)
        except ImportError:  # the default is to show one: a missing extra must not fail a load
            bar = None
    try:
        yield (lambda nbytes: None) if bar is None else (lambda nbytes: bar.update(nbytes) and None)
    finally:
        if bar is not None:
            bar.close()
