"""The rule about what runs again: it computes what ran before, from the same values, and does nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from ..torch_compat import has_symbolic_shape
from .effects import arguments_without_writes, effects_of, picks_indices, written_nodes
from .operands import freeze, nodes_in
from .spec import CAPTURED_PHASES, Phase
from .step_graph import StepGraph, name_of
from .storage import is_view, storages_of, tensors_in


def repeats_compute_what_ran_before(graph: StepGraph) -> Iterator[str]:
    """A call that repeats one of forward has its operator and its arguments, draws and writes nothing, and runs in backward."""
    repeats = [n for n in graph.calls if n.meta.get("recomputes") is not None]
    if not repeats:
        return
    written = written_before_update(graph)
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
        elif not is_view(node) and not can_repeat(original, written):
            yield f"{name} repeats {of}, whose memory is written, or which draws or picks indices"
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


def can_repeat(node: fx.Node, written: frozenset[int]) -> bool:
    """Whether a forward call, run again in backward, gives the same bits and changes nothing.

    Random draws, writes, and indices that are picked by comparing values are never made twice; nor is what reads memory that
    is written before the update, since it would read it at another time. A batch norm is made again without its statistics.

    Args:
        written: storages that a call of forward or backward writes in place.
    """
    arguments = arguments_without_writes(node)
    effects = effects_of(node)
    writes_statistics = arguments != (node.args, node.kwargs) and replace(effects, writes=()).pure
    if not (effects.pure or writes_statistics) or picks_indices(node):
        return False
    values = (node, *nodes_in(arguments[0]), *nodes_in(list(arguments[1].values())))
    if any(has_symbolic_shape(t) for v in values for t in tensors_in(v.meta["val"])):
        return False  # sizes that depend on data would be symbols of their own
    return not any(key in written for value in values for key in storages_of(value))


def written_before_update(graph: StepGraph) -> frozenset[int]:
    """Storages that a call of forward or backward writes in place."""
    calls = [n for n in graph.calls if n.meta["phase"] in CAPTURED_PHASES]
    return frozenset(key for node in calls for operand in written_nodes(node) for key in storages_of(operand))
