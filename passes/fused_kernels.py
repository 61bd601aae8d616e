"""Fused optimizer kernels in a graph, and what they take from a gradient scaler. No pass of its own."""

from __future__ import annotations

from torch import fx

from ..graph import Phase, StepGraph
from ..graph.ops import SCALED_TWINS

_SCALED = frozenset(SCALED_TWINS.values())


def is_fused_kernel(node: fx.Node) -> bool:
    """Whether a call is one of torch's fused optimizers."""
    return node.target in SCALED_TWINS or node.target in _SCALED


def with_scaler_arguments(
    graph: StepGraph, node: fx.Node, *, grad_scale: fx.Node | None = None, found_inf: fx.Node | None = None
) -> fx.Node:
    """Replaces a fused kernel by one that takes these, 0-dim float32, beside what it has. Returns the new call."""
    given: tuple[fx.Node | None, ...] = (None, None)
    args = node.args
    if node.target in _SCALED:
        args, given = args[:-2], args[-2:]  # type: ignore[assignment]
    target = SCALED_TWINS.get(node.target, node.target)
    with graph.graph.inserting_before(node):
        replaced = graph.add_call(
            target,
            (*args, grad_scale or given[0], found_inf or given[1]),
            module=node.meta["key"].module,
            phase=Phase.UPDATE,
        )
    replaced.meta["trace_index"] = node.meta["trace_index"]
    graph.graph.erase_node(node)
    return replaced
