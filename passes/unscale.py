"""Divides every gradient by the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..graph import InputRole, OutputRole, Phase, StepGraph
from .base import Pass, PassResult
from .grad_norm import add_norm_call, grad_groups
from .loss_scale import add_scale_input

aten = torch.ops.aten


@dataclass(frozen=True)
class Unscale(Pass):
    """Multiplies every gradient by the reciprocal of the loss scale, in place, once, before norm and clip.

    Bitwise what ``GradScaler.unscale_`` does: the reciprocal is taken in float64 and rounded to float32, and torch's own kernel
    multiplies. What that kernel says of non-finite gradients is not read: the norm, which is taken anyway, says it too. With
    ``separate`` (fast tier) each gradient is multiplied on its own.
    """

    name: ClassVar[str] = "unscale"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM})

    separate: bool = False

    def run(self, graph: StepGraph) -> PassResult:
        grads = list(graph.output_nodes(OutputRole.GRAD).values())
        scale = graph.input_nodes(InputRole.SCALER).get("scale")
        if scale is None:  # the gradients come from a window: its backwards started from the scale
            scale = add_scale_input(graph, grads[0].meta["val"].device)
        touched = 0
        with graph.graph.inserting_before(graph.output_node):
            precise = add_norm_call(graph, aten._to_copy.default, (scale,), {"dtype": torch.float64})
            reciprocal = add_norm_call(graph, aten.reciprocal.default, (precise,))
            inverse = add_norm_call(graph, aten._to_copy.default, (reciprocal,), {"dtype": torch.float32})
            for group in grad_groups(grads):
                touched += len(group)
                if self.separate:
                    for grad in group:
                        add_norm_call(graph, aten.mul_.Tensor, (grad, inverse))
                    continue
                device = group[0].meta["val"].device
                found = add_norm_call(graph, aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": device})
                kernel = aten._amp_foreach_non_finite_check_and_unscale_.default
                add_norm_call(graph, kernel, (group, found, inverse))
        return PassResult(True, intended={"gradients": len(grads)}, touched={"gradients": touched})
