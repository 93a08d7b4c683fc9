"""8-bit optimizer steps: every parameter of a list, in place, in one parallel region (one launch on CUDA).

The rules are those of `torch.optim` in float32, with the moments coded in 8 bits per block of 256 elements of a row;
`halfbyte.reference_optimizer` writes them out. Results do not depend on the instruction set or the number of threads.
Subnormal numbers count as zero. A NaN or an Inf in a gradient reaches the parameter as in `torch.optim` and stays in that
element: the moments of an element that are not all finite are stored as 0, so its neighbours keep their scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfbyte._library import overload, register_fake

_adamw = overload("adamw8bit_step_")
_adam = overload("adam8bit_step_")
_lion = overload("lion8bit_step_")
_sgd = overload("sgd8bit_step_")

Tensors = Sequence[Tensor]


def adamw8bit_step_(
    params: Tensors,
    grads: Tensors,
    exp_avg_codes: Tensors,
    exp_avg_scales: Tensors,
    exp_avg_sq_codes: Tensors,
    exp_avg_sq_scales: Tensors,
    steps: Tensors,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    element_offsets: Sequence[int] = (),
    seed: int | None = None,
) -> None:
    r"""AdamW: :math:`p \leftarrow (1 - \gamma \lambda) p - \gamma \hat m / (\sqrt{\hat v} + \epsilon)`.

    Args:
        params: parameters, float32, bfloat16 or float16, contiguous, shape (N, ...): N rows of K; 1-D: one row.
        grads: gradients of the same shapes, any of the three dtypes each.
        exp_avg_codes: first moments, uint8 of the parameters' shapes.
        exp_avg_scales: float32, shape (N, ceil(K / 256)) each.
        exp_avg_sq_codes: second moments, as above.
        exp_avg_sq_scales: as above.
        steps: float32 scalars on the parameters' device, the count of this step (1 first), one for all or each.
        lr: learning rate; a float32 scalar tensor on the parameters' device is read there, without a sync.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        maximize: steps along the gradient instead of against it.
        grad_scale: float32 scalar that gradients are divided by (GradScaler), or None.
        found_inf: float32 scalar; if it isn't 0 nothing is written (GradScaler), or None.
        element_offsets: index of each parameter's first element among all of the optimizer's elements; for `seed`.
        seed: rounds 16-bit parameters stochastically by (seed, step, element index); None rounds to nearest even.

    Raises:
        TypeError: an entry of a list is not a tensor.
        ValueError: shapes, dtypes, strides, devices or hyper-parameters do not fit; the text names argument and entry.

    Note:
        Deterministic. Moments carry up to 0.7 % rounding error relative to themselves in the largest decade of a block.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101); Dettmers et al. 2022 (arXiv:2110.02861).
    """
    lists = (params, grads, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales, steps)
    hyper = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "maximize": maximize,
        "grad_scale": grad_scale,
        "found_inf": found_inf,
        "element_offsets": element_offsets,
        "seed": seed,
    }
    _call(_adamw, "adamw8bit_step_", lists, lr, hyper)


def adam8bit_step_(
    params: Tensors,
    grads: Tensors,
    exp_avg_codes: Tensors,
    exp_avg_scales: Tensors,
    exp_avg_sq_codes: Tensors,
    exp_avg_sq_scales: Tensors,
    steps: Tensors,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    element_offsets: Sequence[int] = (),
    seed: int | None = None,
) -> None:
    r"""Adam: as `adamw8bit_step_`, with :math:`g \leftarrow g + \lambda p` instead of decoupled weight decay.

    Args:
        params: as in `adamw8bit_step_`, like every other argument; float32, bfloat16 or float16, shape (N, ...).
        grads: same shapes.
        exp_avg_codes: uint8, same shapes.
        exp_avg_scales: float32, shape (N, ceil(K / 256)).
        exp_avg_sq_codes: uint8, same shapes.
        exp_avg_sq_scales: float32, shape (N, ceil(K / 256)).
        steps: float32 scalars.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        maximize: steps along the gradient.
        grad_scale: float32 scalar or None.
        found_inf: float32 scalar or None.
        element_offsets: for `seed`.
        seed: of stochastic rounding, or None.

    Raises:
        TypeError: an entry of a list is not a tensor.
        ValueError: arguments do not fit together.

    Source: Kingma and Ba 2015 (arXiv:1412.6980).
    """
    lists = (params, grads, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales, steps)
    hyper = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "maximize": maximize,
        "grad_scale": grad_scale,
        "found_inf": found_inf,
        "element_offsets": element_offsets,
        "seed": seed,
    }
    _call(_adam, "adam8bit_step_", lists, lr, hyper)


def lion8bit_step_(
    params: Tensors,
    grads: Tensors,
    exp_avg_codes: Tensors,
    exp_avg_scales: Tensors,
    steps: Tensors,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    element_offsets: Sequence[int] = (),
    seed: int | None = None,
) -> None:
    r"""Lion: :math:`p \leftarrow (1 - \gamma \lambda) p - \gamma\,\mathrm{sign}(\beta_1 m + (1 - \beta_1) g)`.

    Args:
        params: as in `adamw8bit_step_`, like every other argument; float32, bfloat16 or float16, shape (N, ...).
        grads: same shapes.
        exp_avg_codes: uint8, same shapes.
        exp_avg_scales: float32, shape (N, ceil(K / 256)).
        steps: float32 scalars; used by stochastic rounding only.
        lr: learning rate.
        beta1: weight of the moment in the sign.
        beta2: decay of the moment.
        weight_decay: decoupled.
        maximize: steps along the gradient.
        grad_scale: float32 scalar or None.
        found_inf: float32 scalar or None.
        element_offsets: for `seed`.
        seed: of stochastic rounding, or None.

    Raises:
        TypeError: an entry of a list is not a tensor.
        ValueError: arguments do not fit together.

    Note:
        A non-finite gradient makes its parameter NaN at once: its sign alone would hide it.

    Source: Chen et al. 2023 (arXiv:2302.06675).
    """
    lists = (params, grads, exp_avg_codes, exp_avg_scales, steps)
    hyper = {
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "maximize": maximize,
        "grad_scale": grad_scale,
        "found_inf": found_inf,
        "element_offsets": element_offsets,
        "seed": seed,
    }
    _call(_lion, "lion8bit_step_", lists, lr, hyper)


def sgd8bit_step_(
    params: Tensors,
    grads: Tensors,
    momentum_codes: Tensors,
    momentum_scales: Tensors,
    steps: Tensors,
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    element_offsets: Sequence[int] = (),
    seed: int | None = None,
) -> None:
    r"""SGD with momentum, dampening and nesterov in torch's order: :math:`b \leftarrow \mu b + (1 - \tau) g`.

    Args:
        params: as in `adamw8bit_step_`, like every other argument; float32, bfloat16 or float16, shape (N, ...).
        grads: same shapes.
        momentum_codes: uint8, same shapes.
        momentum_scales: float32, shape (N, ceil(K / 256)).
        steps: float32 scalars; at step 1 the buffer becomes the gradient, without dampening.
        lr: learning rate.
        momentum: decay of the buffer.
        dampening: of the gradient in the buffer.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: uses :math:`g + \mu b` instead of b.
        maximize: steps along the gradient.
        grad_scale: float32 scalar or None.
        found_inf: float32 scalar or None.
        element_offsets: for `seed`.
        seed: of stochastic rounding, or None.

    Raises:
        TypeError: an entry of a list is not a tensor.
        ValueError: arguments do not fit together.

    Source: Sutskever et al. 2013 for nesterov; `torch.optim.SGD` for the order of operations.
    """
    lists = (params, grads, momentum_codes, momentum_scales, steps)
    hyper = {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
        "grad_scale": grad_scale,
        "found_inf": found_inf,
        "element_offsets": element_offsets,
        "seed": seed,
    }
    _call(_sgd, "sgd8bit_step_", lists, lr, hyper)


def _call(op: Any, name: str, lists: tuple[Tensors, ...], lr: float | Tensor, hyper: dict[str, Any]) -> None:
    if not any(lists):
        return  # nothing tells the dispatcher a device
    rate: dict[str, Any] = {"lr": 0.0, "lr_tensor": lr} if isinstance(lr, Tensor) else {"lr": float(lr)}
    try:
        with torch._C._AutoDispatchBelowAutograd():  # nothing to record: asking every tensor takes 0.3 ms for 448 parameters
            op(*lists, **rate, **hyper)
    except Exception as error:
        for tensors in lists:  # looked for only here: it would cost as much as the call
            if not all(isinstance(t, Tensor) for t in tensors):
                kinds = ", ".join(sorted({type(t).__name__ for t in tensors}))
                raise TypeError(f"halfbyte.{name}: every list must hold tensors only, got {kinds}") from error
        raise
    # The stable ABI does not bump the version counters of mutated arguments. List by list: joining them is a pass more.
    for mutated in (lists[0], *lists[2:-1]):
        increment_version(mutated)


def _fake(*_: Any, **__: Any) -> None:
    return None


for _name in ("adamw8bit_step_", "adam8bit_step_", "lion8bit_step_", "sgd8bit_step_"):
    register_fake(_name)(_fake)
