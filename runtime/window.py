"""The accumulation window: what micro-batches have added up since the last update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import warn_user
from ..errors import ConfigError, some_of


@dataclass(frozen=True)
class Part:
    """Which part of a window a graph is for; graphs of other parts have other inputs.

    Attributes:
        held: parameters that have an accumulator before it.
        weighted: whether its micro-batch has a weight.
        has_batch: False for a flush, which takes the window as it is.
    """

    held: frozenset[str] = frozenset()
    weighted: bool = False
    has_batch: bool = True


class Window:
    """Sums over the micro-batches of one update.

    Attributes:
        size: micro-batches of a full window.
        count: micro-batches so far, those of weight 0 included.
        gradients: sums by parameter key, on the scale of the losses, float32 where gradients are in 16 bit.
        numbers: 0-dim float64 inputs of the graph: ``loss_sum``, ``weight`` of this micro-batch, ``weight_sum``.
        weight_sum: of the micro-batches so far.
        is_weighted: whether they had weights; None before the first.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.count = 0
        self.gradients: dict[str, Tensor] = {}
        self.numbers = {
            name: torch.zeros((), dtype=torch.float64, device=device) for name in ("loss_sum", "weight", "weight_sum")
        }
        self.weight_sum = 0.0
        self.is_weighted: bool | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a run of the graph changes."""
        return [*self.gradients.values(), self.numbers["loss_sum"]]

    def part(self, *, weighted: bool, has_batch: bool = True) -> Part:
        """The part that comes next."""
        return Part(frozenset(self.gradients), weighted, has_batch)

    def check(self, weight: float | None) -> None:
        """Raises :class:`ConfigError` where a micro-batch with this weight cannot follow those before it."""
        if self.is_weighted is not None and self.is_weighted != (weight is not None):
            raise ConfigError(
                f"this micro-batch comes {'without' if weight is None else 'with'} a weight, unlike those before it in the "
                "same window; give weights to all of a window or to none"
            )

    def expect(self, weight: float) -> None:
        """Puts a micro-batch's weight, and the sum with it, where the graph reads them."""
        self.numbers["weight"].fill_(weight)
        self.numbers["weight_sum"].fill_(self.weight_sum + weight)

    def take(self, weight: float | None, gradients: dict[str, Tensor | None]) -> None:
        """Counts a micro-batch that has run, and keeps the sums with it.

        A sum is None where the backward was spared, since the loss is not finite; then the sum of losses is not either.
        """
        self.count += 1
        self.is_weighted = weight is not None
        self.weight_sum += 1.0 if weight is None else weight
        self.gradients.update({key: value for key, value in gradients.items() if value is not None})

    def clear(self) -> None:
        """Begins a new window."""
        self.count, self.weight_sum, self.is_weighted = 0, 0.0, None
        self.gradients.clear()
        self.numbers["loss_sum"].zero_()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within the context the window is empty; afterwards it is as before."""
        before = self.state_dict()
        self.clear()
        try:
            yield
        finally:
            self.load_state_dict(before)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs. Gradients are the tensors themselves."""
        return {
            "count": self.count,
            "weight_sum": self.weight_sum,
            "is_weighted": self.is_weighted,
            "loss_sum": self.numbers["loss_sum"].item(),
            "gradients": dict(self.gradients),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.clear()
        self.count, self.weight_sum, self.is_weighted = state["count"], state["weight_sum"], state["is_weighted"]
        self.numbers["loss_sum"].fill_(state["loss_sum"])
        self.gradients.update(state["gradients"])


def warn_of_batch_norm(model: nn.Module, size: int) -> None:
    """Says that a window is not one large batch where BatchNorm normalises each micro-batch by itself."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if names:
        warn_user(
            f"{some_of(names)} normalises each micro-batch by its own statistics, and "
            f"updates its running ones {size} times per update: accumulate={size} is not one large batch. LayerNorm, RMSNorm "
            "and GroupNorm do not differ."
        )


def check_weight(weight: Any) -> None:
    """Raises :class:`ConfigError` for what is no weight of a batch."""
    if weight is None:
        return
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(
            f"weight must be a Python number, got {type(weight).__name__}; read a tensor with item(), and pass a batch of "
            "several tensors as one: step((x, y))"
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(f"weight must be finite and 0 or more, got {weight!r}")
