"""What a step keeps beside the model and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..graph import InputRole, InputSpec
from .loss_scale import Scaler
from .masters import Masters


@dataclass
class StepState:
    """State of the step itself.

    Attributes:
        scaler: the loss scale; None where losses are not scaled.
        masters: float32 copies of parameters held in 16 bit.
    """

    scaler: Scaler | None = None
    masters: Masters = field(default_factory=lambda: Masters([]))

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it that a run of the graph changes."""
        return list(self.masters.tensors.values())

    def tensor(self, spec: InputSpec) -> Tensor | None:
        """The tensor behind an input of the graph, the same at every call; None where ``spec`` is none of the step's own."""
        if spec.role is InputRole.SCALER and self.scaler is not None:
            return self.scaler.scale
        if spec.role is InputRole.MASTER:
            return self.masters.tensors[spec.key]
        return None
