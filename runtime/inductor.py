"""Compiles the regions of a step graph with TorchInductor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..graph import StepGraph, StorageMap, family_of, written_nodes
from ..torch_compat import compile_with_inductor
from .norm_lowering import add_norm, is_large_in_memory, norm_operands
from .progress import waiting
from .regions import Region, allocates_for_a_draw, regions_of


class CompiledRegion:
    """A compiled region as an operator of a lowered graph."""

    __name__ = "region"

    def __init__(self, region: Region, storages: StorageMap) -> None:
        try:
            self._run = _compile(region, storages)
        except Exception as error:
            raise CaptureError(
                f"Inductor could not compile {len(region.nodes)} operators of the step, {region.nodes[0].meta['key'].name} to "
                f"{region.nodes[-1].meta['key'].name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}",
                remedy='lowering="eager" runs every operator as it is; the original error is chained below',
            ) from error

    def __call__(self, *inputs: Any) -> Any:
        """The region's outputs, as a tuple or list."""
        return self._run(*inputs)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
CompiledRegions = dict[Any, CompiledRegion]


def lowered(graph: StepGraph, compiled: CompiledRegions, *, compiles_update: bool) -> StepGraph:
    """A copy of ``graph`` in which each region is a single call; only executors understand it.

    Args:
        compiled: regions that were compiled before, by identity; new ones are added.
        compiles_update: whether clip and update are compiled too (fast tier).
    """
    parts = regions_of(graph, compiles_update=compiles_update)
    storages = StorageMap(graph.graph)
    found = [part for part in parts if isinstance(part, Region)]
    identities = {id(region): region.identity(storages.is_written) for region in found}
    fresh = {identities[id(region)]: region for region in found if identities[id(region)] not in compiled}
    for number, (identity, region) in enumerate(fresh.items(), 1):
        with waiting(f"compiling region {number} of {len(fresh)} ({len(region.nodes)} operators)"):
            compiled[identity] = CompiledRegion(region, storages)
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.placeholders:
        values[node] = result.node_copy(node)
    regions = []
    for part in parts:
        if isinstance(part, fx.Node):
            values[part] = _copied(result, part, values)
            continue
        call = result.call_function(compiled[identities[id(part)]], tuple(values[n] for n in part.inputs))
        call.meta.update(val=None, grad_mode=False)
        regions.append((call, part))
        for position, output in enumerate(part.outputs):
            values[output] = result.call_function(operator.getitem, (call, position))
            values[output].meta.update(output.meta, grad_mode=False)
    result.output(fx.map_arg(graph.output_node.args[0], values.__getitem__))
    lowered_graph = StepGraph(result, graph.inputs, graph.outputs, fake_mode=graph.fake_mode, constants=graph.constants)
    for call, region in regions:
        lowered_graph.assign_key(call, "", family_of(call.target), region.nodes[0].meta["phase"])
    return lowered_graph


def _copied(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node]) -> fx.Node:
    if not allocates_for_a_draw(node):
        return graph.node_copy(node, values.__getitem__)
    value = node.meta["val"]  # its operand may be inside of a region that comes later
    shape_and_strides = (list(value.shape), list(value.stride()))
    kwargs = {"dtype": value.dtype, "device": value.device}
    copied = graph.call_function(torch.ops.aten.empty_strided.default, shape_and_strides, kwargs)
    copied.meta.update(node.meta)
    return copied


def _compile(region: Region, storages: StorageMap) -> Callable[..., Any]:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(region.inputs):
        values[node] = graph.placeholder(f"input_{number}")
        values[node].meta["val"] = _detached(node.meta["val"])
    inputs = list(graph.find_nodes(op="placeholder"))
    for node in region.inputs:
        if node in region.spent and any(node in written_nodes(n) for n in region.nodes):
            fresh = graph.call_function(torch.ops.aten.clone.default, (values[node],))  # fused away
            fresh.meta["val"] = values[node].meta["val"]
            values[node] = fresh
    inside = frozenset(region.nodes)
    norms: dict[fx.Node, list[fx.Node]] = {}
    for node in region.nodes:
        if node.target is operator.getitem and node.args[0] in norms:
            values[node] = norms[node.args[0]][node.args[1]]  # type: ignore[index]
        elif operands := norm_operands(node):
            norms[node] = [add_norm(graph, values[n], in_streams=is_large_in_memory(n, inside)) for n in operands]
            if isinstance(node.meta["val"], torch.Tensor):
                values[node] = norms[node][0]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node].meta = {"val": node.meta["val"]}
            if node.target in _VIEWS and not storages.is_written(node):
                # a compiler lays out what it computes as it likes, so that a view may have to copy; nobody writes it
                values[node].target = torch.ops.aten.reshape.default
    graph.output(tuple(values[n] for n in region.outputs))
    return compile_with_inductor(fx.GraphModule(torch.nn.Module(), graph), [n.meta["val"] for n in inputs])


def _detached(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return value.detach()
