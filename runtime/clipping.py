"""Clipping for hand-written loops, and for the eager side of a comparison."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_ as torch_clip_grad_value_
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..errors import ConfigError, NonFiniteError
from ..torch_compat import WeakTensorKeyDictionary

_clipping_steps: Any = WeakTensorKeyDictionary()  # parameter -> weak reference to the step that clips its gradient


def register_clipping(step: Any, params: Iterable[Tensor]) -> None:
    """Notes that ``step`` clips the gradients of ``params``, so that nobody clips them again by hand."""
    reference = weakref.ref(step)
    for param in params:
        _clipping_steps[param] = reference


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips the norm of all gradients, taken as one vector, in place; for loops that do not compile their step.

    Bitwise ``torch.nn.utils.clip_grad_norm_``, and right where that is not: gradients without elements are left out of the
    norm, and an error names the parameter.

    Args:
        parameters: parameters with gradients of any shapes; those without a gradient are left alone.
        max_norm: largest norm allowed, 0 or more.
        norm_type: p of the norm, 1 or more, or infinity (the largest absolute element).
        error_if_nonfinite: whether a norm that is not finite raises; nothing is clipped then.
        foreach: as in torch: whether to use batched kernels; None takes them where the device has them.

    Returns:
        The norm before clipping, 0-dim, in the dtype of the gradients.

    Raises:
        ConfigError: a compiled step clips these gradients already, or an argument is out of range.
        NonFiniteError: see ``error_if_nonfinite``.
    """
    params = _parameters(parameters)
    norm_type = float(norm_type)
    if not norm_type >= 1:
        raise ConfigError(f"norm_type must be 1 or more, or infinity, got {norm_type!r}")
    if not (max_norm >= 0 and math.isfinite(max_norm)):
        raise ConfigError(f"max_norm must be a finite number >= 0, got {max_norm!r}")
    norm = total_norm(params, norm_type, foreach)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteError(
            f"the norm of the gradients is {norm.item()}: {_first_nonfinite(params)}. Nothing was clipped."
        )
    clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamps every element of every gradient to [-clip_value, clip_value], in place; for loops that do not compile their step.

    This changes the direction of the update, which clipping by norm does not.

    Args:
        parameters: parameters with gradients of any shapes; those without a gradient are left alone.
        clip_value: largest absolute value allowed, above 0.
        foreach: as in torch.

    Raises:
        ConfigError: a compiled step clips these gradients already, or ``clip_value`` is out of range.
    """
    params = _parameters(parameters)
    if not clip_value > 0:
        raise ConfigError(f"clip_value must be above 0, got {clip_value!r}")
    torch_clip_grad_value_(params, clip_value, foreach)


def total_norm(params: list[Tensor], norm_type: float, foreach: bool | None = None) -> Tensor:
    """The norm of all gradients of ``params`` as one vector; torch's, which has no infinity norm of empty tensors."""
    grads = [p.grad for p in params if p.grad is not None]
    if math.isinf(norm_type) and any(g.numel() for g in grads):
        grads = [g for g in grads if g.numel()]
    elif math.isinf(norm_type) and grads:
        return grads[0].new_zeros(())
    return get_total_norm(grads, norm_type, foreach=foreach)


def _parameters(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for param in params:
        reference = _clipping_steps.get(param)
        if reference is not None and reference() is not None:
            raise ConfigError(
                f"these gradients are clipped twice: a parameter of shape {list(param.shape)} belongs to a compiled step that "
                "clips. Leave this call out, or compile the step without max_norm and clip_value."
            )
    return params


def _first_nonfinite(params: list[Tensor]) -> str:
    for position, param in enumerate(params):
        if param.grad is not None and not bool(torch.isfinite(param.grad).all()):
            return f"the gradient of parameter {position} ({list(param.shape)}) is not finite"
    return "every gradient is finite but their norm overflows"
