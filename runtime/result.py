"""What one call of a compiled step returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..graph.ops import NONFINITE_GRAD, NONFINITE_LOSS, NONFINITE_NORM
from .outcome import Outcome


@dataclass(frozen=True)
class StepResult:
    """Outcome of one training step.

    Where reading a value waits for the device, ``skipped``, ``skip_reason``, ``applied`` and ``loss_scale`` are read when they
    are asked for.

    Attributes:
        loss: 0-dim (or one element, as the model returned it), detached, on the parameters' device. From ``flush``, the
            window's mean, or None where that has no weight.
        aux: what ``loss_fn`` returned beside the loss, detached; None where there is none.
        grad_norm: 0-dim, the norm of all gradients before clipping, unscaled, in eager's dtype. None from a micro-batch that is
            not the last of its window.
        clip_factor: 0-dim in [0, 1], what the gradients were multiplied by; None without clipping.
        mean_loss: from the last micro-batch of a window and from ``flush``, the weighted mean of the window's losses.
        step: counts updates, applied and skipped, from 1; a micro-batch has the number of the update that it is for.
    """

    loss: Tensor | None
    aux: Any
    grad_norm: Tensor | None
    clip_factor: Tensor | None
    step: int
    outcome: Outcome
    mean_loss: Tensor | None = None
    norm_after_clip_value: Tensor | None = None

    @property
    def skipped(self) -> bool:
        """Whether the update was left out because something was not finite."""
        return self.outcome.ask().reason is not None

    @property
    def skip_reason(self) -> str | None:
        """What was not finite, or None."""
        return self.outcome.ask().reason

    @property
    def applied(self) -> bool:
        """Whether this call changed the weights; gate a scheduler on it."""
        return self.outcome.ask().applied

    @property
    def loss_scale(self) -> float | None:
        """The loss scale after this step, which the next one uses; None where losses are not scaled."""
        return self.outcome.ask().loss_scale

    @property
    def clipped_norm(self) -> Tensor | None:
        """0-dim, the norm of the gradients that the optimizer saw: ``grad_norm`` where nothing is clipped."""
        if self.norm_after_clip_value is not None or self.grad_norm is None:
            return self.norm_after_clip_value
        return self.grad_norm if self.clip_factor is None else self.grad_norm * self.clip_factor

    def __repr__(self) -> str:
        names = ("loss", "aux", "grad_norm", "clip_factor", "skipped", "skip_reason", "applied", "step", "loss_scale")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in (*names, "mean_loss"))
        return f"StepResult({shown})"


def describe_nonfinite(code: int, grad_keys: list[str], loss: Tensor) -> tuple[str, str | None]:
    """Text and offending parameter for a code of ``stepgraph::nonfinite_code`` that is not 0."""
    if code == NONFINITE_LOSS:
        return "the loss is not finite", None
    if code == NONFINITE_NORM:
        return "every gradient is finite but their norm overflows", None
    key = grad_keys[code - NONFINITE_GRAD]
    if not bool(loss.isfinite().all()):
        return f"the loss is not finite, nor is the gradient of {key}", key
    return f"the gradient of {key} is not finite", key
