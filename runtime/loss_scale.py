"""The loss scale of fp16 training: how it moves, and where it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

SMALLEST_FP16 = 2.0**-24


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale: torch's ``GradScaler``, with a floor.

    After an update that is skipped, since the loss or a gradient was not finite, the scale is multiplied by
    ``backoff_factor``; after ``growth_interval`` good ones in a row by ``growth_factor``, unless that is not finite.

    Args:
        init_scale: where it starts.
        growth_factor: more than 1.
        backoff_factor: between 0 and 1.
        growth_interval: updates.
        hysteresis: how many skipped updates, in a row or not, it takes to back off; counted anew after each growth, as
            Megatron-LM and Colossal-AI do. With 1, as in torch, each backs off.
        min_scale: the scale never falls below. The default is the smallest positive float16, below which every loss
            would start its backward from 0.
        max_scale: the scale never grows beyond; None is no limit.

    Raises:
        ConfigError: a value makes no sense.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = SMALLEST_FP16
    max_scale: float | None = None

    def __post_init__(self) -> None:
        largest = math.inf if self.max_scale is None else self.max_scale
        for name in ("init_scale", "min_scale", "max_scale"):
            value = getattr(self, name)
            if value is not None:
                check_scale(f"LossScale: {name}", value)
        for name, holds, needed in (
            ("growth_factor", self.growth_factor > 1, "more than 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", _is_count(self.growth_interval), "a whole number, 1 or more"),
            ("hysteresis", _is_count(self.hysteresis), "a whole number, 1 or more"),
            ("min_scale", self.min_scale <= self.init_scale, f"at most init_scale={self.init_scale}"),
            ("max_scale", self.init_scale <= largest, f"at least init_scale={self.init_scale}"),
        ):
            if not holds:
                raise ConfigError(f"LossScale: {name} must be {needed}, got {getattr(self, name)!r}")

    @property
    def numbers(self) -> tuple[float, float, int, int, float, float]:
        """As ``stepgraph::move_scale_`` takes them."""
        largest = math.inf if self.max_scale is None else self.max_scale
        return (
            self.growth_factor, self.backoff_factor, self.growth_interval, self.hysteresis, self.min_scale, largest
        )  # fmt: skip


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_scale(name: str, value: Any) -> None:
    """Raises :class:`ConfigError` for what is no loss scale: a float32 above zero whose reciprocal is one too."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 2.0**-126 <= value <= 2.0**126):
        raise ConfigError(f"{name} must be a number between 2**-126 and 2**126, got {value!r}")


class Scaler:
    """A loss scale in use.

    Attributes:
        scale: 0-dim float32 on ``device``; an input of the graph, changed in place.
        trackers: int32 on ``device``, the two below, for graphs that move the scale themselves; None where there are none.
        policy: how it moves; None for a static one.
        growth_tracker: good updates since the last change or skip.
        hysteresis_tracker: skips that are left before it backs off.
    """

    def __init__(self, policy: LossScale | float, device: torch.device) -> None:
        self.policy = policy if isinstance(policy, LossScale) else None
        initial = policy.init_scale if isinstance(policy, LossScale) else float(policy)
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._value = self._published = float(self.scale)
        self.growth_tracker = 0
        self.hysteresis_tracker = self.policy.hysteresis if self.policy else 1
        self.trackers: Tensor | None = None

    @property
    def value(self) -> float:
        """The scale that the next step uses."""
        return self._value

    def problem_with(self, scale: Any) -> str:
        """Why a saved scale cannot be gone on with here; empty where it can."""
        try:
            check_scale("scale", scale)
        except ConfigError as error:
            return str(error)
        if self.policy is None:
            return "" if scale == self._value else f"{scale}, here {self._value}, which never changes"
        largest = math.inf if self.policy.max_scale is None else self.policy.max_scale
        if not self.policy.min_scale <= scale <= largest:
            return f"{scale}, here between {self.policy.min_scale} and {largest}"
        return ""

    def update(self, *, skipped: bool, is_moved: bool = False) -> None:
        """Moves the scale after an update that was, or was not, skipped.

        The arithmetic is that of ``torch._amp_update_scale_``: a product in float64, rounded to float32.

        Args:
            is_moved: whether the graph has moved the tensors already, by the same rules.
        """
        if self.policy is None:
            return
        self._move(self.policy, skipped)
        if is_moved:
            self._published = self._value
        else:
            self._publish()

    def _move(self, policy: LossScale, skipped: bool) -> None:
        if skipped:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self._value = max(_rounded(self._value * policy.backoff_factor), _rounded(policy.min_scale))
            return
        self.growth_tracker += 1
        if self.growth_tracker < policy.growth_interval:
            return
        self.growth_tracker = 0
        self.hysteresis_tracker = policy.hysteresis
        grown = _rounded(self._value * policy.growth_factor)
        if policy.max_scale is not None:
            grown = min(grown, _rounded(policy.max_scale))
        if math.isfinite(grown):
            self._value = grown

    def _publish(self) -> None:
        if self._value != self._published:
            self.scale.fill_(self._value)
            self._published = self._value
        if self.trackers is not None:
            self.trackers.copy_(torch.tensor([self.growth_tracker, self.hysteresis_tracker], dtype=torch.int32))

    def for_graphs(self, name: str) -> Tensor:
        """``scale``, or ``trackers``, which are kept from then on."""
        if name == "scale":
            return self.scale
        if self.trackers is None:
            self.trackers = torch.zeros(2, dtype=torch.int32, device=self.scale.device)
            self._publish()
        return self.trackers

    def state_dict(self) -> dict[str, float | int]:
        """Scale and counters, all that a resumed run needs."""
        return {
            "scale": self._value,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        check_scale("the saved loss scale", state["scale"])
        self.growth_tracker = int(state["growth_tracker"])
        self.hysteresis_tracker = int(state["hysteresis_tracker"])
        self._value = float(state["scale"])
        self._publish()


def _rounded(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))
