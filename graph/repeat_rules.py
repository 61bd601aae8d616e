"""The rule about what runs again: it computes what ran before, from the same values, and does nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import fx

from .effects import arguments_without_writes, effects_of, picks_indices
from .operands import freeze
from .spec import Phase
from .step_graph import StepGraph, name_of
from .storage import is_view


def repeats_compute_what_ran_before(graph: StepGraph) -> Iterator[str]:
    """A call that repeats one of forward has its operator and its arguments, draws and writes nothing, and runs in backward."""
    repeats = [n for n in graph.calls if n.meta.get("recomputes") is not None]
    if not repeats:
        return
    originals = {n.meta["key"].name: n for n in graph.calls if n.meta.get("recomputes") is None}
    for node in repeats:
        name, of = name_of(node), node.meta["recomputes"]
        if node.meta["phase"] is not Phase.BACKWARD:
            yield f"{name} repeats {of} in the {node.meta['phase']} phase"
        if not effects_of(node).pure or picks_indices(node):
            yield f"{name} repeats {of}, which draws, writes or picks indices"
        original = originals.get(of)
        if original is None:
            if not is_view(node):
                yield f"{name} repeats {of}, which does not run"
        elif original.meta["phase"] not in (Phase.FORWARD, Phase.BACKWARD) or not _is_same_call(node, original):
            yield f"{name} does not compute what {of} computed"


def _is_same_call(node: fx.Node, original: fx.Node) -> bool:
    return node.target is original.target and _frozen(node.args, node.kwargs) == _frozen(
        *arguments_without_writes(original)
    )


def _frozen(*arguments: Any) -> Hashable:
    """A call's arguments, with each value under the name that it had in forward."""
    return freeze(arguments, _first_name)


def _first_name(node: fx.Node) -> Hashable:
    return node.meta.get("recomputes") or name_of(node)
