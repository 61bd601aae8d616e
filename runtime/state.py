"""What a step keeps beside the model and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..graph import InputRole, InputSpec
from .loss_scale import Scaler
from .masters import Masters
from .rollback import rolled_back
from .window import Window


@dataclass
class StepState:
    """State of the step itself.

    Attributes:
        scaler: the loss scale; None where losses are not scaled.
        masters: float32 copies of parameters held in 16 bit.
        window: what micro-batches have added up; None where each batch is an update.
    """

    scaler: Scaler | None = None
    masters: Masters = field(default_factory=lambda: Masters([]))
    window: Window | None = None

    @contextmanager
    def rolled_back(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """As :func:`rolled_back`, with the step's own tensors. Undoing writes parameters; their masters stay theirs."""
        try:
            with rolled_back(model, optimizer, self.tensors):
                yield
        finally:
            self.masters.note()

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it that a run of the graph changes."""
        own: list[Tensor] = list(self.masters.tensors.values())
        if self.window is not None:
            own += self.window.tensors
        if self.scaler is not None:
            own += [self.scaler.scale, *([] if self.scaler.trackers is None else [self.scaler.trackers])]
        return own

    def tensor(self, spec: InputSpec) -> Tensor | None:
        """The tensor behind an input of the graph, the same at every call; None where ``spec`` is none of the step's own."""
        if spec.role is InputRole.SCALER and self.scaler is not None:
            return self.scaler.for_graphs(spec.key)
        if spec.role is InputRole.MASTER:
            return self.masters.tensors[spec.key]
        if spec.role is InputRole.WINDOW and self.window is not None:
            return self.window.numbers[spec.key]
        return None
