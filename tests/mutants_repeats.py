"""Graphs in which something runs again that should not, or not like this."""

from __future__ import annotations

import torch
from torch import fx

from stepgraph.graph import Phase, StepGraph

from .mutants import call, key_of, mutant, rekey

aten = torch.ops.aten
RULE = "repeats_compute_what_ran_before"


def _repeat(graph: StepGraph, family: str) -> fx.Node:
    """The first run again of an operator family."""
    return next(n for n in graph.calls if n.meta.get("recomputes") and n.meta["key"].family == family)


@mutant(RULE, form="recomputed")
def another_operator(graph: StepGraph) -> str:
    again = _repeat(graph, "tanh")
    again.target = aten.sigmoid.default
    rekey(again, family="sigmoid")
    return f"{key_of(again)} does not compute what {again.meta['recomputes']} computed"


@mutant(RULE, form="recomputed")
def another_operand(graph: StepGraph) -> str:
    again = _repeat(graph, "tanh")
    other = call(graph, "tanh", Phase.FORWARD)
    again.args = (other,)
    return f"{key_of(again)} does not compute what {again.meta['recomputes']} computed"


@mutant(RULE, form="recomputed")
def another_argument(graph: StepGraph) -> str:
    again = _repeat(graph, "addmm")
    again.kwargs = {"alpha": 2}
    return f"{key_of(again)} does not compute what {again.meta['recomputes']} computed"


@mutant(RULE, form="recomputed")
def of_what_is_not_there(graph: StepGraph) -> str:
    again = _repeat(graph, "tanh")
    again.meta["recomputes"] = "nowhere/tanh#0@forward"
    return "nowhere/tanh#0@forward, which does not run"


@mutant(RULE, form="recomputed")
def in_the_norm(graph: StepGraph) -> str:
    norm = call(graph, "_foreach_norm", Phase.NORM)
    norm.meta["recomputes"] = key_of(_repeat(graph, "tanh"))
    return f"{key_of(norm)} repeats"


@mutant(RULE, model="DROP", form="recomputed")
def of_a_draw(graph: StepGraph) -> str:
    draw = call(graph, "bernoulli_", Phase.FORWARD)
    again = next(n for n in graph.calls if n.meta.get("recomputes"))
    with graph.graph.inserting_before(again):
        twice = graph.graph.node_copy(draw, lambda operand: operand)
    graph.assign_key(twice, draw.meta["key"].module, "bernoulli_", Phase.BACKWARD)
    twice.meta["recomputes"] = key_of(draw)
    return f"{key_of(twice)} repeats {key_of(draw)}, which draws, writes or picks indices"
