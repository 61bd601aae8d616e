"""The arguments of ``compile_train_step`` that shape the graph and the step, checked."""

from __future__ import annotations

import math
import numbers
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import ConfigError
from .loss_scale import LossScale, check_scale
from .planning import Planning, planning_of

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepOptions:
    """What a step does besides forward and backward.

    Attributes:
        loss_scale: how losses are scaled: dynamically, by a fixed number, or not at all.
        skips_before_warning: how many updates in a row are skipped before a warning; None is never.
        skips_before_error: and before :class:`NonFiniteError`.
        spare_backward: whether a step whose loss is not finite ends before its backward.
        accumulate: micro-batches of an update.
        is_fast: the fast tier.
        planning: how the plan is found.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    error_if_nonfinite: bool = False
    nonfinite: str = "skip"
    loss_scale: LossScale | float | None = None
    skips_before_warning: int | None = 20
    skips_before_error: int | None = 100
    spare_backward: bool = False
    accumulate: int = 1
    is_fast: bool = False
    uses_inductor: bool = False
    planning: Planning = Planning()


def checked_options(
    *,
    precision: str,
    loss_scale: Any,
    max_norm: Any,
    norm_type: Any,
    clip_value: Any,
    error_if_nonfinite: Any,
    nonfinite: str,
    skips_before_warning: Any,
    skips_before_error: Any,
    spare_backward: Any,
    accumulate: Any,
    numerics: str,
    lowering: str,
    plan: Any,
    memory_budget: Any,
    hardware: Any,
) -> StepOptions:
    """The options, from arguments as a user gave them.

    Raises:
        ConfigError: one of them makes no sense, or two contradict each other.
    """
    check_choice("precision", precision, tuple(AUTOCAST_DTYPES))
    check_choice("nonfinite", nonfinite, ("skip", "raise", "ignore"))
    check_choice("numerics", numerics, ("exact", "fast"))
    check_choice("lowering", lowering, ("auto", "eager", "inductor"))
    if not _is_number(norm_type) or not norm_type >= 1:
        raise ConfigError(f"norm_type must be a number of 1 or more, or infinity, got {norm_type!r}")
    for name, limit in (("max_norm", max_norm), ("clip_value", clip_value)):
        if limit is not None and not (_is_number(limit) and limit >= 0 and math.isfinite(limit)):
            raise ConfigError(f"{name} must be a finite number >= 0 (0 or None: off), got {limit!r}")
    if max_norm and clip_value:
        raise ConfigError("max_norm and clip_value both clip, and their order would matter; give one of them")
    if error_if_nonfinite and nonfinite == "ignore":
        raise ConfigError('error_if_nonfinite=True and nonfinite="ignore" contradict each other; give one of them')
    for name, count in (("skips_before_warning", skips_before_warning), ("skips_before_error", skips_before_error)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"{name} must be a whole number of updates, 1 or more, or None, got {count!r}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate must be a whole number of micro-batches, 1 or more, got {accumulate!r}")
    uses_inductor = lowering == "inductor" or (lowering == "auto" and numerics == "fast")
    for name, flag in (("spare_backward", spare_backward), ("error_if_nonfinite", error_if_nonfinite)):
        check_flag(name, flag)
    if spare_backward and (nonfinite == "ignore" or error_if_nonfinite or uses_inductor):
        other = 'nonfinite="ignore"' if nonfinite == "ignore" else "error_if_nonfinite=True"
        other = 'lowering="inductor", which compiles forward and backward as one' if uses_inductor else other
        raise ConfigError(f"spare_backward=True does not go with {other}; give one of them")
    return StepOptions(
        max_norm=float(max_norm) if max_norm else None,
        norm_type=float(norm_type),
        clip_value=float(clip_value) if clip_value else None,
        error_if_nonfinite=bool(error_if_nonfinite),
        nonfinite=nonfinite,
        loss_scale=_checked_loss_scale(precision, loss_scale, nonfinite),
        skips_before_warning=skips_before_warning,
        skips_before_error=skips_before_error,
        spare_backward=spare_backward,
        accumulate=accumulate,
        is_fast=numerics == "fast",
        uses_inductor=uses_inductor,
        planning=planning_of(plan, memory_budget, hardware),
    )


def _checked_loss_scale(precision: str, loss_scale: Any, nonfinite: str) -> LossScale | float | None:
    if precision != "fp16":
        if loss_scale is not None:
            raise ConfigError(f'loss_scale={loss_scale!r} belongs to precision="fp16"; {precision} needs none')
        return None
    if loss_scale is None or isinstance(loss_scale, LossScale):
        if nonfinite == "ignore":
            raise ConfigError(
                'nonfinite="ignore" updates with what is not finite, and a dynamic loss scale is found by leaving such updates '
                'out; leave nonfinite at "skip", or pass a number as loss_scale'
            )
        return loss_scale or LossScale()
    if isinstance(loss_scale, type) and issubclass(loss_scale, LossScale):
        raise ConfigError("loss_scale is the class LossScale; pass an instance, LossScale()")
    if isinstance(loss_scale, torch.amp.GradScaler):
        raise ConfigError(
            "loss_scale is a GradScaler, whose work the step does itself; pass LossScale(init_scale=..., growth_interval=...) "
            "with the same values"
        )
    check_scale("loss_scale", loss_scale)
    return float(loss_scale)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_call(loss_fn: Any, criterion: Any, *, fp32_outputs: Any, input_dtype: Any) -> None:
    """Raises :class:`ConfigError` where the arguments about how the model is called cannot work."""
    for name, function in (("loss_fn", loss_fn), ("criterion", criterion)):
        if isinstance(function, type):
            raise ConfigError(f"{name} is the class {function.__name__}; pass an instance, {function.__name__}()")
    check_flag("fp32_outputs", fp32_outputs)
    if input_dtype is not None and not (isinstance(input_dtype, torch.dtype) and input_dtype.is_floating_point):
        raise ConfigError(f"input_dtype must be a floating dtype such as torch.bfloat16, or None, got {input_dtype!r}")


def check_flag(name: str, value: Any) -> None:
    """Raises :class:`ConfigError` where ``value`` is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises :class:`ConfigError` where ``value`` is none of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def settings_of(options: StepOptions, precision: str, device: torch.device) -> dict[str, Any]:
    """What the numbers of a run's log were made under."""
    scale = options.loss_scale
    return {
        "precision": precision,
        "autocast_device": None if AUTOCAST_DTYPES[precision] is None else device.type,
        "max_norm": options.max_norm,
        "norm_type": options.norm_type if math.isfinite(options.norm_type) else "inf",
        "clip_value": options.clip_value,
        "nonfinite": options.nonfinite,
        "loss_scale": asdict(scale) if isinstance(scale, LossScale) else scale,
        "accumulate": options.accumulate,
    }
