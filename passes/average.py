"""Divides the gradients that a window summed by the sum of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..device import norm_uses_foreach
from ..graph import InputRole, InputSpec, OutputRole, Phase, StepGraph
from .base import Pass, PassResult
from .grad_norm import add_norm_call, grad_groups

aten = torch.ops.aten


@dataclass(frozen=True)
class Average(Pass):
    """Divides every gradient by the input ``weight_sum``, in place, once, after it was unscaled and before norm and clip.

    With ``separate`` (fast tier) each gradient is divided on its own.
    """

    name: ClassVar[str] = "average"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM})

    separate: bool = False

    def run(self, graph: StepGraph) -> PassResult:
        grads = list(graph.output_nodes(OutputRole.GRAD).values())
        device = grads[0].meta["val"].device
        with graph.fake_mode:
            fake = torch.empty((), dtype=torch.float64, device=device)
        total = graph.add_input(InputSpec(InputRole.WINDOW, "weight_sum"), fake, "weight_sum")
        touched = 0
        with graph.graph.inserting_before(graph.output_node):
            for group in grad_groups(grads):
                touched += len(group)
                dtype = (
                    group[0].meta["val"].dtype
                )  # of a tensor without dimensions, float64 would make the result float64
                divisor = add_norm_call(graph, aten._to_copy.default, (total,), {"dtype": dtype})
                if not self.separate and norm_uses_foreach(group[0].meta["val"].device):
                    add_norm_call(graph, aten._foreach_div_.Tensor, (group, divisor))
                else:
                    for grad in group:
                        add_norm_call(graph, aten.div_.Tensor, (grad, divisor))
        return PassResult(True, intended={"gradients": len(grads)}, touched={"gradients": touched})
