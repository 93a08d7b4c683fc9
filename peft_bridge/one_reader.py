"""One rank reads and quantizes a checkpoint for all of them: plain `from_pretrained` in accelerate's distributed runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from transformers.modeling_utils import PreTrainedModel

from halfbyte.distributed.replicate import replicate, replicating
from peft_bridge.config import HalfbyteConfig, own_quantization

T = TypeVar("T")

ARRIVAL_S = 300.0
"""How long a rank waits for the others to ask for the same model."""

_RUNS = {"MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU", "FSDP"}


class _Calls:
    done = 0  # at which all ranks met: the same number on each


def read_once(read: Callable[[], T], *, what: str, asked: str) -> T:
    """`replicate`, once every rank of the default group has come here with the same request.

    Whoever is missing is known before anything is sent: the ranks meet in the process group's store, so what the missing
    ones do instead (a barrier, say) is not disturbed.

    Args:
        read: reads the model; called on rank 0 alone.
        what: names the operation in errors.
        asked: what is to be read, equal on every rank.

    Raises:
        RuntimeError: some ranks did not come within `ARRIVAL_S`, or came with another request; or one failed.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1 or replicating():
        return read()
    torch_dist: Any = dist
    store = torch_dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    keys = [f"halfbyte/one_reader/{_Calls.done}/{each}" for each in ranks]
    store.set(keys[rank], asked)
    try:
        store.wait(keys, timedelta(seconds=ARRIVAL_S))
    except RuntimeError as error:
        store.delete_key(keys[rank])  # whoever comes later must not find this rank here
        missing = [str(each) for each in ranks if each != rank and not store.check([keys[each]])]
        raise RuntimeError(
            f"{what}: rank {rank} waited {ARRIVAL_S:.0f} s for rank {', '.join(missing)} to load {asked}: in a distributed "
            f"run one rank reads for all, so every rank has to call it, and not inside main_process_first(); "
            f"HalfbyteConfig(one_reader=False) lets every rank read for itself"
        ) from error
    _Calls.done += 1
    requests = [store.get(key).decode() for key in keys]
    if len(set(requests)) > 1:
        listed = ", ".join(f"rank {each} {request}" for each, request in enumerate(requests))
        raise RuntimeError(
            f"{what}: the ranks load different models: {listed}; give HalfbyteConfig(one_reader=False) if they are to"
        )
    return replicate(read, what=what)


def accelerate_runs() -> bool:
    """Whether accelerate (a `TrainingArguments`, an `Accelerator`) has set this process up as one of several like it."""
    module = sys.modules.get("accelerate.state")
    state: dict[str, Any] = {} if module is None else module.PartialState._shared_state
    return getattr(state.get("distributed_type"), "value", None) in _RUNS and state.get("num_processes", 1) > 1


class _Original:
    method: Any = None  # transformers' own, while ours stands in its place


def install() -> None:
    """Lets `from_pretrained` read once where it can; called on import, undone by `uninstall`."""
    if _Original.method is None:
        _Original.method = PreTrainedModel.__dict__["from_pretrained"]
        PreTrainedModel.from_pretrained = _reading_once(_Original.method)  # type: ignore[method-assign]


def uninstall() -> None:
    """Gives transformers its own method back."""
    if _Original.method is not None:
        PreTrainedModel.from_pretrained = _Original.method  # type: ignore[method-assign]
        _Original.method = None


def _reading_once(method: Any) -> Any:
    original = method.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        def read() -> Any:
            return original(cls, path, *args, config=config, **kwargs)

        wish = kwargs.get("quantization_config")
        if not (isinstance(wish, HalfbyteConfig) and wish.one_reader and accelerate_runs() and _alike(kwargs)):
            return read()
        if own_quantization(path, config, kwargs) is not None:  # rows that are packed already are mapped from the file
            return read()
        result = read_once(read, what=f"{cls.__name__}.from_pretrained", asked=f"{cls.__name__} in {wish.format}")
        model, place = result[0] if isinstance(result, tuple) else result, kwargs.get("device_map")
        if isinstance(place, dict):
            model.hf_device_map = dict(place)  # the source's names its own device
        return result

    return classmethod(from_pretrained)  # type: ignore[arg-type]


def _alike(kwargs: dict[str, Any]) -> bool:
    """Whether the whole model goes to one device, and each rank has the same: else its tensors are not a copy's."""
    place = kwargs.get("device_map")
    whole = place is None or (isinstance(place, dict) and list(place) == [""]) or place == "cpu"
    return whole and not any(kwargs.get(name) for name in ("tp_plan", "tp_size", "device_mesh", "distributed_config"))


install()
