"""Runs a graph node by node, for tools that look at every value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ..device import autocast_off
from ..graph import StepGraph, effects_of
from ..torch_compat import grad_mode_below_autograd

Values = dict[fx.Node, Any]


def run_nodes(
    graph: StepGraph, inputs: list[Any], before: Callable[[fx.Node, Values], None] = lambda node, values: None
) -> Iterator[tuple[fx.Node, Values]]:
    """Yields each call that has just run, and the values that are alive, its result and its operands among them.

    Stops after a gate that is not 0. The graph's outputs stay alive. ``before`` sees each call before it runs.
    """
    values: Values = dict(zip(graph.placeholders, inputs, strict=True))
    remaining = {node: len(node.users) for node in graph.graph.nodes}
    for node in graph.calls:
        before(node, values)
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with autocast_off(), grad_mode_below_autograd() if node.meta["grad_mode"] else torch.no_grad():
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        yield node, values
        if effects_of(node).control and int(values[node]):
            return
        for operand in node.all_input_nodes:
            remaining[operand] -= 1
            if not remaining[operand]:
                del values[operand]
