"""The optimizer all 8-bit optimizers are built on: which parameters, what state, one op call per group and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import is_
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, ParamsT

from halfbyte.optim import backward, checkpoint, dense, foreign
from halfbyte.optim.dynamic_map import row_blocks, zero_code
from halfbyte.optim.offload import step_streamed, to_host
from halfbyte.optim.owners import SecondOwners
from halfbyte.optim.sharding import first_element, global_shape, is_dtensor, is_eligible, like_param, local, local_grad
from halfbyte.optim.work import Group, Members, Moment, State, Work


class Optimizer8bit(Optimizer):
    """Base of the 8-bit optimizers.

    State of an eligible parameter of shape (N, ...), K elements a row: `step` (float32 scalar) and per moment
    `<moment>_codes` (uint8 of the parameter's shape) and `<moment>_scales` (float32 (N, ceil(K / 256))). Every other
    parameter keeps torch.optim's keys in float32. For DTensor parameters the state is DTensors with their placements.

    A parameter group may set `quantize_state`: None (the rule: two dimensions and 4096 elements or more, globally),
    True (8 bits whatever the size) or False (float32).

    Args:
        params: as for torch.optim.
        defaults: hyper-parameters of groups that do not set them.
        offload: see `AdamW8bit`.
        fused_backward: see `AdamW8bit`.

    Raises:
        NotImplementedError: a complex parameter.
    """

    moments: ClassVar[tuple[Moment, ...]]
    torch_defaults: ClassVar[dict[str, Any]]  # group keys of torch.optim's class of the rule, and their defaults
    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf instead of syncing

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, offload: bool = False, fused_backward: bool = False
    ) -> None:
        self.offload = offload
        self.fused_backward = fused_backward
        self._owners = SecondOwners()
        super().__init__(params, defaults)

    # -- what a rule defines

    def update_quantized(self, group: Group, work: Work) -> None:
        """One op call on parameters with 8-bit state."""
        raise NotImplementedError

    def update_dense(self, group: Group, work: Work) -> None:
        """One step of float32 parameters with float32 state; `work.steps` are the counts *before* this step."""
        raise NotImplementedError

    def has_state(self, group: Group) -> bool:
        """False where the rule keeps no moment (SGD without momentum): such groups are stepped as dense."""
        return True

    # -- torch.optim's interface

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; see the class for its keys.

        Raises:
            NotImplementedError: a complex parameter, named by its position (or name, if the group has names).
            ValueError: packed rows alone; among parameters that train they are passed over, as frozen ones are.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["params"] and all(p.dtype == torch.uint8 for p in group["params"]):
            raise ValueError(
                f"{type(self).__name__}: {self._describe(group, 0)} and all others of its group are packed rows (uint8), "
                "which can't train: pass the adapters' parameters, or make layers dense first "
                "(lightning_plugin.GradualUnfreezing)"
            )
        for i, p in enumerate(group["params"]):
            if p.is_complex():
                raise NotImplementedError(
                    f"{type(self).__name__}: {self._describe(group, i)} is complex ({p.dtype}); supported are real "
                    "float parameters: pass torch.view_as_real of it"
                )
        if self.fused_backward:
            backward.attach(self, len(self.param_groups) - 1, group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            NotImplementedError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.fused_backward:
            if getattr(self, "found_inf", None) is not None:
                raise NotImplementedError(
                    f"{type(self).__name__}: fused_backward cannot be used with GradScaler, which looks at all "
                    "gradients before the first step; use bfloat16 or fused_backward=False"
                )
            return loss
        self._owners.follow(self.state)
        for group in self.param_groups:
            self._step_group(group, group["params"])
        return loss

    @torch.no_grad()
    def step_parameter(self, group_index: int, param: Tensor) -> None:
        """Steps one parameter that has its gradient; called by the hooks of `fused_backward`.

        Args:
            group_index: index of its group.
            param: the parameter.
        """
        self._step_group(self.param_groups[group_index], [param])

    def attach_ddp(self, ddp: torch.nn.Module) -> None:
        """With `fused_backward`: steps the parameters of a DDP module when their averaged gradients arrive.

        Call it once, before the first backward; gradients accumulated under `no_sync` are part of the next step.

        Args:
            ddp: a `torch.nn.parallel.DistributedDataParallel` module.

        Raises:
            ValueError: the optimizer was built without fused_backward, or has none of the module's parameters.
        """
        if not self.fused_backward:
            raise ValueError(f"{type(self).__name__}.attach_ddp: build the optimizer with fused_backward=True")
        backward.attach_ddp(self, ddp)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class; every tensor keeps its own dtype.

        (torch.optim's own method casts state to the parameter's dtype: codes would become floats.)

        Args:
            state_dict: from `state_dict()` of the same optimizer class.

        Raises:
            ValueError: groups do not match, or a parameter's state has other keys, dtypes or shapes.
        """
        captured: dict[str, Any] = {}

        def take_state(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            captured.update(loaded)
            return {**loaded, "state": {}}

        def put_state(_: Optimizer) -> None:
            checkpoint.put_state(self, captured["state"], captured["param_groups"])

        before = self.register_load_state_dict_pre_hook(take_state)  # runs last: sees what the others made of it
        after = self.register_load_state_dict_post_hook(put_state, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "offload": self.offload, "fused_backward": self.fused_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._owners = SecondOwners()
        if state.get("fused_backward", False):  # a copy or an unpickled optimizer: its parameters have no hooks yet
            for index, group in enumerate(self.param_groups):
                backward.attach(self, index, group["params"])
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    # -- state of other libraries

    def torch_state_dict(self) -> dict[str, Any]:
        """This optimizer's state dict as `torch.optim` writes it, for its class of the same rule.

        Moments become float32 of the parameter's shape. `load_torch_state_dict` of it restores codes and scales bit for
        bit (scales of at least 2**-100).

        Returns:
            A state dict for torch.optim.AdamW, Adam or SGD; DTensor parameters give DTensor moments. torch has no Lion:
            its moment goes under Adam's name.
        """
        return foreign.to_torch(self)

    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of `torch.optim` (the class of the same rule): moments are coded in 8 bits.

        Hyper-parameters of the groups come along, as with `load_state_dict`.

        Args:
            state_dict: of torch.optim.AdamW, Adam or SGD, or of `torch_state_dict`; tensors may be DTensors, whole, or
                this rank's part.

        Raises:
            ValueError: groups do not match, amsgrad state, or a moment is missing or has another shape.
        """
        foreign.from_torch(self, state_dict)

    def load_bitsandbytes_state_dict(self, state_dict: dict[str, Any], *, block_size: int | None = None) -> None:
        """Takes over the state of bitsandbytes' optimizer of the same rule, flat or wrapped for FSDP.

        Byte for byte where its blocks are ours (K % 256 == 0 and its block size 256), coded anew otherwise.

        Args:
            state_dict: of `bitsandbytes.optim` (8-bit block-wise or 32-bit), from `state_dict()`.
            block_size: its elements per scale, where the number of scales does not tell.

        Raises:
            ValueError: groups do not match, an entry is missing or does not fit, or the block size is ambiguous.
            NotImplementedError: sharded parameters: its flat blocks straddle the shards.
        """
        foreign.from_bitsandbytes(self, state_dict, block_size)

    # -- one group

    def _step_group(self, group: Group, params: Iterable[Tensor]) -> None:
        # Whole lists at a time: a loop over 448 adapters that asks each a few questions costs more than their kernel.
        params = list(params)
        grads = [p.grad for p in params]
        idle: list[Tensor] = []
        if [None for grad in grads if grad is None]:
            idle = [p for p, grad in zip(params, grads, strict=True) if grad is None]
            params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [p.grad for p in params]
        states = self._states(params)
        if not self._all_begun(group, states):
            self._init_states(group, params, states)
        for (quantized, device), members in self._alike(params, cast(list[Tensor], grads), states).items():
            work = self._gather(group, *members, device)
            if not quantized:
                self._run_dense(group, work)
                continue
            self._advance(work, idle)
            self._run_quantized(group, work)
            if work.found_inf is not None:  # an overflow is no step; decided on the device
                for step in {id(step): step for step in work.steps}.values():
                    step.sub_(work.found_inf)

    def _all_begun(self, group: Group, states: list[State]) -> bool:
        """Whether the states hold what the group's rule needs."""
        return all(states)

    def _states(self, params: list[Tensor]) -> list[State]:
        # Looking a tensor up calls Python (Tensor.__hash__). Often the states are those of these parameters, in their order.
        if len(params) == len(self.state) and all(map(is_, params, self.state)):
            return list(self.state.values())
        return list(map(self.state.__getitem__, params))

    def _alike(
        self, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> dict[tuple[bool, torch.device], Members]:
        """Parameters, gradients, states and step counts by (whether in 8 bits, device), those in 8 bits first."""
        if not params:
            return {}
        codes = self.moments[0].codes
        steps = [state["step"] for state in states if codes in state]
        quantized = len(steps) == len(states)
        # One count fits one device only, which the op asks of every tensor: asking here as well takes longer than this.
        if quantized and all(map(is_, steps, repeat(steps[0]))):
            return {(True, params[0].device): (params, grads, states, steps[:1])}
        if (quantized or not steps) and len(set(map(Tensor.get_device, params))) == 1:
            return {(quantized, params[0].device): (params, grads, states, steps or [state["step"] for state in states])}
        found: dict[tuple[bool, torch.device], Members] = {}
        for wanted in (True, False):
            for p, grad, state in zip(params, grads, states, strict=True):
                if (codes in state) == wanted:
                    members = found.setdefault((wanted, p.device), ([], [], [], []))
                    members[0].append(p)
                    members[1].append(grad)
                    members[2].append(state)
                    members[3].append(state["step"])
        return found

    def _init_states(self, group: Group, params: list[Tensor], states: list[State]) -> None:
        new_steps: dict[torch.device, Tensor] = {}
        for p, state in zip(params, states, strict=True):
            if self._all_begun(group, [state]):
                continue
            grad = cast(Tensor, p.grad)
            if grad.is_sparse or grad.layout is not torch.strided:
                index = next(i for i, q in enumerate(group["params"]) if q is p)
                raise NotImplementedError(
                    f"{type(self).__name__}: {self._describe(group, index)} has a sparse gradient; supported are dense ones"
                )
            self._init_state(group, p, state, new_steps)

    def _init_state(self, group: Group, p: Tensor, state: State, new_steps: dict[torch.device, Tensor]) -> None:
        piece = local(p)
        if not (self.has_state(group) and is_eligible(p, group["quantize_state"])):
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            dtype = p.dtype if p.dtype == torch.float64 else torch.float32
            for moment in self.moments if self.has_state(group) else ():
                zeros = torch.zeros(piece.shape, dtype=dtype, device=p.device)
                state[moment.name] = like_param(p, zeros, tuple(p.shape))
            return
        # Parameters that start together share one count: one scalar to increase and to hand to the op.
        if p.device not in new_steps:
            new_steps[p.device] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["step"] = new_steps[p.device]
        rows, _, blocks = row_blocks(piece.shape)
        for moment in self.moments:
            codes = torch.full(piece.shape, zero_code(moment.signed), dtype=torch.uint8, device=p.device)
            self.set_moment(p, state, moment, codes, torch.zeros((rows, blocks), dtype=torch.float32, device=p.device))

    def set_moment(self, param: Tensor, state: State, moment: Moment, codes: Tensor, scales: Tensor) -> None:
        """Writes one moment of this rank's part into a parameter's state, in host memory if the state is offloaded.

        Args:
            param: the parameter.
            state: its state.
            moment: which moment.
            codes: uint8 of the local parameter's shape.
            scales: float32 (N, ceil(K / 256)) of the local rows.
        """
        if self.offload:
            codes, scales = to_host(codes, param.device), to_host(scales, param.device)
        rows = param.shape[0] if param.dim() > 1 else 1
        self._owners.drop()
        state[moment.codes] = like_param(param, codes, tuple(param.shape))
        state[moment.scales] = like_param(param, scales, (rows, scales.shape[1]))

    def _gather(
        self,
        group: Group,
        members: list[Tensor],
        grads: list[Tensor],
        states: list[State],
        steps: list[Tensor],
        device: torch.device,
    ) -> Work:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        sharded = any(is_dtensor(p) for p in members if type(p) is not Parameter)
        return Work(
            params=[local(p) for p in members] if sharded else list(members),
            grads=[cast(Tensor, local_grad(p)) for p in members] if sharded else grads,
            states=states,
            steps=steps,
            offsets=self._offsets(members) if group["stochastic_rounding"] else [],
            grad_scale=None if scale is None else scale.to(device),
            found_inf=None if found is None else found.to(device),
            sharded=sharded,
        )

    def _advance(self, work: Work, idle: list[Tensor]) -> None:
        """Increases the step counts; a count shared with parameters that have no gradient now is split off first."""
        idle_steps = {id(self.state[p]["step"]) for p in idle if p in self.state and "step" in self.state[p]}
        if idle_steps:
            fresh: dict[int, Tensor] = {}
            for state in work.states:
                step = state["step"]
                if id(step) in idle_steps:
                    state["step"] = fresh.setdefault(id(step), step.clone())
            work.steps = [state["step"] for state in work.states]
        if len(work.steps) > 1 and all(map(is_, work.steps, repeat(work.steps[0]))):
            work.steps = work.steps[:1]
        for step in {id(step): step for step in work.steps}.values():
            step.add_(1)

    def _run_quantized(self, group: Group, work: Work) -> None:
        streamed = self.offload and work.params[0].device.type != "cpu"
        if not (streamed or torch.compiler.is_compiling()):
            # The op looks at every stride before it writes anything; asking here as well costs as much again.
            try:
                self.update_quantized(group, work)
                return
            except ValueError:
                if all(t.is_contiguous() for t in chain(work.params, work.grads)):
                    raise
        work.grads = [grad.contiguous() for grad in work.grads]
        originals, work.params = work.params, [p.contiguous() for p in work.params]
        if streamed:
            device = work.params[0].device
            step_streamed(work, self.moments, device, lambda part: self.update_quantized(group, part))
        else:
            self.update_quantized(group, work)
        for p, original in zip(work.params, originals, strict=True):
            if p is not original:
                original.copy_(p)

    def _run_dense(self, group: Group, work: Work) -> None:
        """Small parameters (biases, norms) go through torch's own fused steps where it has one.

        Those want one dtype and read memory as it lies, whatever the strides: copies of the others are stepped.
        """
        originals = work.params
        work.params = [dense.steppable(p) for p in originals]
        work.grads = [grad.to(p.dtype).contiguous() for p, grad in zip(work.params, work.grads, strict=True)]
        self.update_dense(group, work)
        dense.write_back(work, originals, group["seed"] if group["stochastic_rounding"] else None)

    # -- details

    def _offsets(self, members: list[Tensor]) -> list[int]:
        starts, total = {}, 0
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            starts[p] = total
            total += global_shape(p).numel()
        return [starts[p] + first_element(p) for p in members]

    def _describe(self, group: Group, index: int) -> str:
        names = group.get("param_names")
        position = next(i for i, g in enumerate(self.param_groups) if g is group)
        return f"parameter {names[index]!r}" if names else f"parameter {index} of group {position}"
