"""The total norm of all gradients."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..device import norm_uses_foreach
from ..graph import OutputRole, OutputSpec, Phase, StepGraph
from ..torch_compat import device_and_dtype_groups
from .base import Pass, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class GradNorm(Pass):
    """Adds the norm of the concatenation of all gradients, as the output ``norm``.

    Bitwise what ``torch.nn.utils.get_total_norm`` returns for the gradients of ``model.parameters()``: a norm for each
    gradient, grouped by device and dtype in the same order and with the same kernels, then the norm of those. Gradients
    without elements do not take part in an infinity norm, for which torch raises.
    """

    name: ClassVar[str] = "grad_norm"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD,)
    guarantees: ClassVar[tuple[OutputRole, ...]] = (OutputRole.NORM,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM})

    norm_type: float = 2.0

    def run(self, graph: StepGraph) -> PassResult:
        grads = list(graph.output_nodes(OutputRole.GRAD).values())
        if math.isinf(self.norm_type):  # eager has no largest element of nothing
            grads = [g for g in grads if g.meta["val"].numel()]
        total, counted = add_total_norm(graph, self.norm_type)
        graph.set_outputs([*graph.output_values, total], [*graph.outputs, OutputSpec(OutputRole.NORM)])
        return PassResult(True, intended={"gradients": len(grads)}, touched={"gradients": counted})


def add_total_norm(graph: StepGraph, norm_type: float) -> tuple[fx.Node, int]:
    """Adds the norm of all gradients as they are at the end of the graph. Returns it, and how many gradients are in it."""
    all_grads = list(graph.output_nodes(OutputRole.GRAD).values())
    grads = [g for g in all_grads if g.meta["val"].numel()] if math.isinf(norm_type) else all_grads
    norms: list[fx.Node] = []
    with graph.graph.inserting_before(graph.output_node):
        for group in grad_groups(grads):
            norms += _norms_of(graph, group, norm_type)
        if not norms:
            return add_norm_call(graph, aten.new_zeros.default, (all_grads[0], [])), 0
        stacked = add_norm_call(graph, aten.stack.default, (norms,))
        return add_norm_call(graph, aten.linalg_vector_norm.default, (stacked, norm_type)), len(norms)


def _norms_of(graph: StepGraph, group: list[fx.Node], norm_type: float) -> list[fx.Node]:
    if not norm_uses_foreach(group[0].meta["val"].device):
        return [add_norm_call(graph, aten.linalg_vector_norm.default, (g, norm_type)) for g in group]
    all_norms = add_norm_call(graph, aten._foreach_norm.Scalar, (group, norm_type))
    return [add_norm_call(graph, operator.getitem, (all_norms, i)) for i in range(len(group))]


def add_norm_call(
    graph: StepGraph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """Adds a call of the norm phase; its module is the stage, ``norm``."""
    return graph.add_call(target, args, kwargs, module="norm", phase=Phase.NORM)


def change_gradients(
    graph: StepGraph, *, separate: bool, together: Callable[[list[fx.Node]], object], alone: Callable[[fx.Node], object]
) -> PassResult:
    """Adds calls, at the end of the graph, that change every gradient in place.

    Args:
        separate: whether each gradient is changed on its own; otherwise as eager's kernels do on the gradients' device.
        together: adds the calls for gradients of one device and dtype.
        alone: adds the call for one gradient.
    """
    grads = list(graph.output_nodes(OutputRole.GRAD).values())
    touched = 0
    with graph.graph.inserting_before(graph.output_node):
        for group in grad_groups(grads):
            touched += len(group)
            if not separate and norm_uses_foreach(group[0].meta["val"].device):
                together(group)
            else:
                for grad in group:
                    alone(grad)
    return PassResult(True, intended={"gradients": len(grads)}, touched={"gradients": touched})


def grad_groups(grads: list[fx.Node]) -> list[list[fx.Node]]:
    """Gradients by device and dtype, in the order in which eager visits them."""
    if not grads:
        return []
    values = [g.meta["val"] for g in grads]
    return [[grads[i] for i in group] for group in device_and_dtype_groups([(v.device, v.dtype) for v in values])]
