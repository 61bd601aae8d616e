"""How close two results are that may be rounded differently, and how close they have to be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor


@dataclass(frozen=True)
class Allowance:
    """What rounding may do in a step.

    Attributes:
        tolerance: largest allowed relative deviation in the 2-norm.
        noise: elements whose gradient is smaller than this, relative to the root mean square of all, may be rounding of sums
            that cancel to zero.
    """

    tolerance: float
    noise: float


_ALLOWANCES = {
    torch.float64: Allowance(1e-9, 1e-3),
    torch.float32: Allowance(1e-4, 1e-3),
    torch.bfloat16: Allowance(0.15, 0.1),
    torch.float16: Allowance(0.05, 0.02),
}
_INSIGNIFICANT = 1e-3  # of a kind's norm: values this small in all are held against that, not against themselves


@dataclass(frozen=True)
class Deviation:
    """How far one value is off.

    Attributes:
        name: of the value.
        relative: norm of the difference, relative to the norm of the value, or to a thousandth of that of its kind.
    """

    name: str
    relative: float


def allowance_for(params: list[Tensor], autocast_dtype: torch.dtype | None) -> Allowance:
    """What goes with the coarsest dtype among the parameters and the autocast, if any.

    A step in single precision deviates by some 1e-6 from rounding alone; a term that is missing shows at 1e-3 or more.
    """
    dtypes = {p.dtype for p in params} | ({autocast_dtype} if autocast_dtype is not None else set())
    allowances = [_ALLOWANCES.get(dtype, _ALLOWANCES[torch.float32]) for dtype in dtypes]
    return max(allowances, key=lambda allowance: allowance.tolerance)


def deviations(
    eager: dict[str, Any], other: dict[str, Any], before: dict[str, Tensor], grads: dict[str, Tensor], noise: float
) -> Iterator[Deviation]:
    """The deviation of every floating-point tensor that both have.

    Of a parameter it is that of its change since ``before``, less what storing it rounds. Optimizers such as Adam move an
    element whose gradient is zero up to rounding as far as any other, so elements count by their squared gradient, up to a
    thousandth of the gradients' root mean square (a tenth in bfloat16, a fiftieth in half). Non-finite elements have to be
    the same, or the deviation is infinite.

    Args:
        eager: values by name; ``parameter NAME`` for parameters.
        other: what is held against them.
        before: the parameters before the step, by those names.
        grads: eager's gradients, by those names.
        noise: as in :class:`Allowance`.
    """
    elements = sum(g.numel() for g in grads.values())
    mean_square = sum(float(g.double().square().sum()) for g in grads.values()) / max(1, elements)
    errors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, mine in eager.items():
        theirs = other.get(name)
        if not (_is_floating(mine) and _is_floating(theirs) and mine.shape == theirs.shape):
            continue
        if not torch.equal(mine.isfinite(), theirs.isfinite()):
            yield Deviation(name, float("inf"))
            continue
        value, error = mine.double(), (mine.double() - theirs.double()).abs()
        if name in before:
            error = (error - 2 * torch.finfo(mine.dtype).eps * value.abs()).clamp_min(0.0)
            value = value - before[name].double()
        if name in grads and mean_square:
            weight = (grads[name].double().abs() / (noise * mean_square**0.5)).clamp_max(1.0).square()
            value, error = value * weight, error * weight
        errors[name] = (value[mine.isfinite()], error[mine.isfinite()])
    squares: dict[str, float] = defaultdict(float)
    for name, (value, _) in errors.items():
        squares[_kind(name)] += float(value.square().sum())
    for name, (value, error) in errors.items():
        scale = max(float(value.norm()), _INSIGNIFICANT * squares[_kind(name)] ** 0.5)
        off = float(error.norm())
        yield Deviation(name, off / scale if scale else (float("inf") if off else 0.0))


def _kind(name: str) -> str:
    """Parameters, buffers, and each entry of the optimizer state are kinds of their own; so are loss and norm."""
    first, _, rest = name.partition(" ")
    return f"state {rest.rpartition('/')[2]}" if first == "state" else first


def _is_floating(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()
