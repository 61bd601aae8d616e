"""How long values live: a value is freed after the last call that reads it, outputs never."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from .step_graph import StepGraph


def last_uses(graph: StepGraph) -> dict[fx.Node, list[fx.Node]]:
    """For each call, the values, inputs included, that nothing reads after it.

    This is both what the executor frees and what the memory simulator counts.
    """
    kept = {v for v in graph.output_values if isinstance(v, fx.Node)}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.calls:
        last[node] = node
        for operand in node.all_input_nodes:
            last[operand] = node
    freed: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value, user in last.items():
        if value not in kept:
            freed[user].append(value)
    return freed
