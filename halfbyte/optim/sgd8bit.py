"""SGD8bit."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from halfbyte.ops.optimizer import sgd8bit_step_
from halfbyte.optim import dense
from halfbyte.optim.base import Optimizer8bit
from halfbyte.optim.checks import check_extras, check_nonnegative
from halfbyte.optim.work import Group, Moment, State, Work


class SGD8bit(Optimizer8bit):
    r"""SGD with momentum, dampening and nesterov as in torch, its buffer in 8 bits: 1.02 bytes of state per parameter.

    .. math:: g \leftarrow g + \lambda p,\quad b \leftarrow \mu b + (1 - \tau) g\ (\text{first step: } b \leftarrow g),
              \quad p \leftarrow p - \gamma b\ (\text{nesterov: } p - \gamma (g + \mu b))

    A group with momentum 0 has no buffer. As in torch, it begins with the momentum, and stays as it is while that is 0.

    Args:
        params: parameters or groups as for `torch.optim.SGD`; float32, bfloat16, float16, mixed at will.
        lr: learning rate.
        momentum: decay of the buffer.
        dampening: of the gradient in the buffer.
        weight_decay: L2 penalty.
        nesterov: uses the gradient plus momentum times the buffer.
        maximize: as in `AdamW8bit`, like every argument below.
        quantize_state: None, True or False.
        stochastic_rounding: of 16-bit parameters.
        seed: of the stochastic rounding.
        offload: keeps the state in host memory.
        fused_backward: steps during backward.

    Raises:
        ValueError: a hyper-parameter out of its range; nesterov without momentum or with dampening.
        NotImplementedError: complex parameters or sparse gradients.

    Source: `torch.optim.SGD` for the rule; Dettmers et al. 2022 (arXiv:2110.02861).
    """

    moments = (Moment("momentum_buffer", signed=True),)
    torch_defaults: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        quantize_state: bool | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        offload: bool = False,
        fused_backward: bool = False,
    ) -> None:
        check_nonnegative("SGD8bit", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"SGD8bit: nesterov needs momentum above 0 and no dampening, got momentum={momentum}, dampening={dampening}"
            )
        extras = {
            "maximize": maximize,
            "quantize_state": quantize_state,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        check_extras("SGD8bit", extras)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            **extras,
        }
        super().__init__(params, defaults, offload=offload, fused_backward=fused_backward)

    def has_state(self, group: Group) -> bool:
        """Without momentum there is no buffer."""
        return bool(group["momentum"] != 0)

    def _all_begun(self, group: Group, states: list[State]) -> bool:
        # Momentum may begin later, as in torch: a state without a buffer, which holds the count alone, begins anew.
        return super()._all_begun(group, states) and not (self.has_state(group) and 1 in map(len, states))

    def update_quantized(self, group: Group, work: Work) -> None:
        """One op call on parameters with 8-bit state."""
        codes, scales = work.state("momentum_buffer_codes"), work.state("momentum_buffer_scales")
        if group["momentum"] == 0:  # as in torch, the buffer waits until there is momentum again
            codes, scales = [torch.zeros_like(c) for c in codes], [torch.zeros_like(s) for s in scales]
        sgd8bit_step_(
            work.params,
            work.grads,
            codes,
            scales,
            work.steps,
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"] if group["momentum"] != 0 else 0.0,
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            grad_scale=work.grad_scale,
            found_inf=work.found_inf,
            element_offsets=work.offsets,
            seed=group["seed"] if group["stochastic_rounding"] else None,
        )

    def update_dense(self, group: Group, work: Work) -> None:
        """One step of parameters with float32 state, or with none."""
        buffered = self.has_state(group)
        dense.count_step(work)
        if buffered and group["dampening"] != 0:
            self._step_dampened(group, work)
            return
        sgd(
            work.params,
            work.grads,
            [*work.state("momentum_buffer")] if buffered else [None for _ in work.params],
            fused=True,
            grad_scale=work.grad_scale,
            found_inf=work.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=buffered and group["nesterov"],
            maximize=group["maximize"],
        )

    def _step_dampened(self, group: Group, work: Work) -> None:
        # The first gradient is taken whole. torch's fused step has to be told which is the first, and that of all parameters
        # at once: here each has a count of its own, on the device.
        buffers = work.state("momentum_buffer")
        takes = [torch.where(step <= 1, 1.0, 1.0 - group["dampening"]) for step in work.steps]
        directions = dense.gradients(work, group["maximize"])
        if group["weight_decay"] != 0:
            directions = list(torch._foreach_add(directions, work.params, alpha=group["weight_decay"]))
        taken = [g * take for g, take in zip(directions, takes, strict=True)]
        updated = list(torch._foreach_add(torch._foreach_mul(buffers, group["momentum"]), taken))
        values = torch._foreach_sub(work.params, torch._foreach_mul(updated, group["lr"]))
        dense.commit(work, buffers + work.params, [*updated, *values])
