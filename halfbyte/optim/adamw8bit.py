"""AdamW8bit and Adam8bit."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from halfbyte.ops.optimizer import adam8bit_step_, adamw8bit_step_
from halfbyte.optim.base import Optimizer8bit
from halfbyte.optim.checks import check_betas, check_extras, check_nonnegative
from halfbyte.optim.work import Group, Moment, Work


class _Adam(Optimizer8bit):
    moments = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
    torch_defaults: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
    }
    _decoupled: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        extras: dict[str, Any],
        offload: bool,
        fused_backward: bool,
    ) -> None:
        name = type(self).__name__
        check_nonnegative(name, lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(name, betas)
        check_extras(name, extras)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **extras}
        super().__init__(params, defaults, offload=offload, fused_backward=fused_backward)

    def update_quantized(self, group: Group, work: Work) -> None:
        """One op call on parameters with 8-bit state."""
        op = adamw8bit_step_ if self._decoupled else adam8bit_step_
        beta1, beta2 = group["betas"]
        op(
            work.params,
            work.grads,
            work.state("exp_avg_codes"),
            work.state("exp_avg_scales"),
            work.state("exp_avg_sq_codes"),
            work.state("exp_avg_sq_scales"),
            work.steps,
            lr=group["lr"],
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            grad_scale=work.grad_scale,
            found_inf=work.found_inf,
            element_offsets=work.offsets,
            seed=group["seed"] if group["stochastic_rounding"] else None,
        )

    def update_dense(self, group: Group, work: Work) -> None:
        """One step of parameters with float32 state."""
        beta1, beta2 = group["betas"]
        adam(
            work.params,
            work.grads,
            work.state("exp_avg"),
            work.state("exp_avg_sq"),
            [],
            work.steps,
            fused=True,
            grad_scale=work.grad_scale,
            found_inf=work.found_inf,
            decoupled_weight_decay=self._decoupled,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class AdamW8bit(_Adam):
    r"""AdamW with both moments in 8 bits: 2.03 bytes of state per parameter instead of 8.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) g,\quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2,\quad
              p \leftarrow (1 - \gamma \lambda) p - \gamma \hat m / (\sqrt{\hat v} + \epsilon)

    Parameters with fewer than two dimensions or fewer than 4096 elements (of the whole parameter, when it is sharded)
    keep float32 moments and torch's own fused step.

    Args:
        params: parameters or groups as for `torch.optim.AdamW`; float32, bfloat16, float16, mixed at will.
        lr: learning rate; a float32 scalar tensor on the parameters' device is read there without a sync.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        maximize: steps along the gradient.
        quantize_state: None: the rule above; True or False: 8-bit or float32 state for every parameter (of a group).
        stochastic_rounding: rounds bfloat16 and float16 parameters up or down with the probability of the distance,
            reproducibly from (seed, step, element): small updates are not lost, and the result does not depend on the
            world size or the number of threads.
        seed: of the stochastic rounding; the same on every rank.
        offload: keeps the state in host memory and streams it through the device during the step.
        fused_backward: steps each parameter as soon as its gradient is ready and frees it; `step()` then does nothing.
            What looks at all gradients after backward (norm clipping, accumulation over several backwards) finds none.

    Raises:
        ValueError: a hyper-parameter out of its range.
        NotImplementedError: complex parameters or sparse gradients.

    Example:
        >>> import torch, halfbyte
        >>> layer = torch.nn.Linear(128, 64)
        >>> optimizer = halfbyte.optim.AdamW8bit(layer.parameters(), lr=1e-2)
        >>> layer(torch.ones(1, 128)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg_codes"].dtype
        torch.uint8

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101); Dettmers et al. 2022 (arXiv:2110.02861).
    """

    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        quantize_state: bool | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        offload: bool = False,
        fused_backward: bool = False,
    ) -> None:
        extras = {
            "maximize": maximize,
            "quantize_state": quantize_state,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, lr, betas, eps, weight_decay, extras, offload, fused_backward)


class Adam8bit(_Adam):
    r"""Adam with both moments in 8 bits; weight decay is an L2 penalty added to the gradient.

    Args:
        params: parameters or groups as for `torch.optim.Adam`; float32, bfloat16, float16, mixed at will.
        lr: learning rate; a float32 scalar tensor on the parameters' device is read there without a sync.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: L2 penalty.
        maximize: as in `AdamW8bit`, like every argument below.
        quantize_state: None, True or False.
        stochastic_rounding: of 16-bit parameters.
        seed: of the stochastic rounding.
        offload: keeps the state in host memory.
        fused_backward: steps during backward.

    Raises:
        ValueError: a hyper-parameter out of its range.
        NotImplementedError: complex parameters or sparse gradients.

    Source: Kingma and Ba 2015 (arXiv:1412.6980); Dettmers et al. 2022 (arXiv:2110.02861).
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        quantize_state: bool | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        offload: bool = False,
        fused_backward: bool = False,
    ) -> None:
        extras = {
            "maximize": maximize,
            "quantize_state": quantize_state,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, lr, betas, eps, weight_decay, extras, offload, fused_backward)
