"""Lion8bit."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from halfbyte.ops.optimizer import lion8bit_step_
from halfbyte.optim import dense
from halfbyte.optim.base import Optimizer8bit
from halfbyte.optim.checks import check_betas, check_extras, check_nonnegative
from halfbyte.optim.work import Group, Moment, Work


class Lion8bit(Optimizer8bit):
    r"""Lion with its moment in 8 bits: 1.02 bytes of state per parameter.

    .. math:: p \leftarrow (1 - \gamma \lambda) p - \gamma\,\mathrm{sign}(\beta_1 m + (1 - \beta_1) g),\quad
              m \leftarrow \beta_2 m + (1 - \beta_2) g

    Args:
        params: parameters or groups as for torch.optim; float32, bfloat16, float16, mixed at will.
        lr: learning rate, usually 3 to 10 times smaller than AdamW's.
        betas: weight of the moment in the sign, and its decay, each in [0, 1).
        weight_decay: decoupled, usually 3 to 10 times larger than AdamW's.
        maximize: as in `AdamW8bit`, like every argument below.
        quantize_state: None, True or False.
        stochastic_rounding: of 16-bit parameters.
        seed: of the stochastic rounding.
        offload: keeps the state in host memory.
        fused_backward: steps during backward.

    Raises:
        ValueError: a hyper-parameter out of its range.
        NotImplementedError: complex parameters or sparse gradients.

    Note:
        A non-finite gradient makes its parameter NaN at once: a sign alone would hide it.

    Source: Chen et al. 2023 (arXiv:2302.06675); Dettmers et al. 2022 (arXiv:2110.02861).
    """

    moments = (Moment("exp_avg", signed=True),)
    torch_defaults: ClassVar[dict[str, Any]] = {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "maximize": False,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        quantize_state: bool | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        offload: bool = False,
        fused_backward: bool = False,
    ) -> None:
        check_nonnegative("Lion8bit", lr=lr, weight_decay=weight_decay)
        check_betas("Lion8bit", betas)
        extras = {
            "maximize": maximize,
            "quantize_state": quantize_state,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        check_extras("Lion8bit", extras)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, **extras}
        super().__init__(params, defaults, offload=offload, fused_backward=fused_backward)

    def update_quantized(self, group: Group, work: Work) -> None:
        """One op call on parameters with 8-bit state."""
        beta1, beta2 = group["betas"]
        lion8bit_step_(
            work.params,
            work.grads,
            work.state("exp_avg_codes"),
            work.state("exp_avg_scales"),
            work.steps,
            lr=group["lr"],
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            grad_scale=work.grad_scale,
            found_inf=work.found_inf,
            element_offsets=work.offsets,
            seed=group["seed"] if group["stochastic_rounding"] else None,
        )

    def update_dense(self, group: Group, work: Work) -> None:
        """One step of parameters with float32 state, all elements of a dtype together: torch has no fused Lion."""
        beta1, beta2 = group["betas"]
        all_grads, all_averages = dense.gradients(work, group["maximize"]), work.state("exp_avg")
        dense.count_step(work)
        for members in dense.by_dtype(work.params):
            params, averages = [work.params[i] for i in members], [all_averages[i] for i in members]
            param, average = dense.in_one(params), dense.in_one(averages)
            grad = dense.in_one([all_grads[i] for i in members])
            mixed = torch.lerp(average, grad, 1 - beta1)
            # 0 * mixed: NaN where the gradient is not finite, as in the 8-bit rule.
            sign = torch.sign(mixed) + 0.0 * mixed
            value = param * (1 - group["lr"] * group["weight_decay"]) - sign * group["lr"]
            updated = torch.lerp(average, grad, 1 - beta2)
            dense.commit(work, averages + params, [*dense.apart(updated, averages), *dense.apart(value, params)])
