"""Cuts a step graph into regions that a compiler takes, and calls that run as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ..graph import (
    UNINITIALISED,
    Phase,
    StepGraph,
    effects_of,
    family_of,
    freeze,
    layout_of,
    storages_of,
    tensors_in,
)

_NEED_GRAD_MODE = frozenset({"mkldnn_rnn_layer"})  # a compiled region runs without grad mode, which these depend on


@dataclass(frozen=True)
class Region:
    """Calls that are compiled together.

    Attributes:
        nodes: the calls, in order.
        inputs: values from outside that they read or write.
        outputs: values that something outside reads.
        spent: inputs whose memory nobody looks at afterwards: what the region writes there need not be stored.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    spent: frozenset[fx.Node]

    def identity(self, is_written: Callable[[fx.Node], bool]) -> Hashable:
        """Equal for regions that compute the same from inputs of the same layout: operators, arguments, and who reads what.

        Args:
            is_written: whether anything writes a value in place, on which depends what a compiler may copy.
        """
        numbers = {node: number for number, node in enumerate((*self.inputs, *self.nodes))}
        calls = [
            (node.target, freeze(node.args, numbers.__getitem__), freeze(node.kwargs, numbers.__getitem__))
            for node in self.nodes
        ]
        layouts = [tuple(map(layout_of, tensors_in(n.meta["val"]))) for n in (*self.inputs, *self.nodes)]
        spent = sorted(numbers[n] for n in self.spent)
        written = [is_written(n) for n in self.nodes]
        return (tuple(calls), tuple(layouts), tuple(numbers[n] for n in self.outputs), tuple(spent), tuple(written))


def regions_of(graph: StepGraph, *, compiles_update: bool) -> list[fx.Node | Region]:
    """Everything that ``graph`` runs, in an order that gives the same results.

    What comes before the first write to a gradient, a parameter or optimizer state is one region, unless calls that cannot
    be compiled part it. After that, calls run as they are, or with ``compiles_update`` in regions of their own.

    Random numbers are drawn outside of regions, in the graph's order: a compiler that moves draws swaps their numbers. Draws
    into fresh memory, as dropout masks are on the CPU, need nothing that a region computes, and go ahead of it.
    """
    before, after = _at_first_commitment(graph)
    parts = list(_parted(before, _is_draw))
    parts += _parted(after, lambda node: not effects_of(node).control) if compiles_update else after
    return [_region(graph, part) if isinstance(part, list) else part for part in parts]


def _at_first_commitment(graph: StepGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    calls = graph.calls
    for position, node in enumerate(calls):
        phase, effects = node.meta["phase"], effects_of(node)
        if phase is Phase.UPDATE or effects.control or (phase is Phase.NORM and effects.writes):
            return calls[:position], calls[position:]
    return calls, []


def is_compilable(node: fx.Node) -> bool:
    """Whether a call takes and gives tensors only, and has no effect but declared writes."""
    if node.target is operator.getitem:
        return is_compilable(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in ("aten", "prims") or family_of(node.target) in _NEED_GRAD_MODE:
        return False
    effects = effects_of(node)
    if effects.opaque or effects.control or effects.collective or _is_draw(node):
        return False
    return all(map(_is_tensors, (node, *node.all_input_nodes)))


def _is_tensors(node: fx.Node) -> bool:
    value = node.meta["val"]
    items = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, (torch.Tensor, type(None))) for item in items)


def allocates_for_a_draw(node: fx.Node) -> bool:
    """Whether a call makes the memory that a draw then fills."""
    return family_of(node.target) in UNINITIALISED and any(effects_of(user).random for user in node.users)


def _is_draw(node: fx.Node) -> bool:
    return effects_of(node).random or allocates_for_a_draw(node)


def _parted(calls: list[fx.Node], may_go_ahead: Callable[[fx.Node], bool]) -> Iterator[fx.Node | list[fx.Node]]:
    """Runs of compilable calls as lists, others one by one.

    A call that is not compilable goes ahead of the run before it where it may and has nothing to do with it.
    """
    run: list[fx.Node] = []
    for node in calls:
        if is_compilable(node):
            run.append(node)
        elif may_go_ahead(node) and _are_independent(node, run):
            yield node
        else:
            if run:
                yield run
            run = []
            yield node
    if run:
        yield run


def _are_independent(node: fx.Node, others: list[fx.Node]) -> bool:
    if allocates_for_a_draw(node):
        return True  # of its operand it takes the shape only
    return _touched([node]).isdisjoint(_touched(others)) and not set(node.all_input_nodes) & set(others)


def _touched(nodes: list[fx.Node]) -> set[int]:
    return {key for n in nodes for value in (n, *n.all_input_nodes) for key in storages_of(value)}


def _region(graph: StepGraph, nodes: list[fx.Node]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(operand for n in nodes for operand in n.all_input_nodes if operand not in inside)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    later = graph.calls[graph.calls.index(nodes[-1]) + 1 :]
    needed = {key for n in (*graph.placeholders, *graph.output_node.all_input_nodes) for key in storages_of(n)}
    needed |= _touched([n for n in later if n not in inside])
    spent = frozenset(n for n in inputs if needed.isdisjoint(storages_of(n)))
    return Region(tuple(nodes), tuple(inputs), tuple(outputs), spent)
