"""Adds a micro-batch's gradients to those of the window before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ..graph import HALF_DTYPES, InputRole, InputSpec, OutputRole, OutputSpec, Phase, StepGraph
from .base import Pass, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class Accumulate(Pass):
    """Sums gradients over micro-batches, each as soon as backward has it, and the losses.

    A gradient is added in place to the accumulator of its parameter, an input, which is the gradient from then on. Bitwise what
    eager's backward does to ``.grad``. Where there is no accumulator yet, the gradient itself becomes it.

    Attributes:
        keys: every parameter that has a gradient after this micro-batch, in the model's order.
        held: those that have an accumulator before it. One that gets no gradient from this micro-batch keeps what it has.
        weighted: whether loss and gradients are multiplied by the input ``weight`` first.
    """

    name: ClassVar[str] = "accumulate"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.LOSS,)
    guarantees: ClassVar[tuple[OutputRole, ...]] = (OutputRole.LOSS_SUM, OutputRole.GRAD)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.FORWARD, Phase.BACKWARD})

    keys: tuple[str, ...]
    held: frozenset[str]
    weighted: bool = False

    def run(self, graph: StepGraph) -> PassResult:
        grads = graph.output_nodes(OutputRole.GRAD)
        outputs = [
            (v, s) for v, s in zip(graph.output_values, graph.outputs, strict=True) if s.role is not OutputRole.GRAD
        ]
        weight = _Weight(graph) if self.weighted else None
        if graph.output_of(OutputRole.LOSS_SUM) is None:
            outputs.append((_add_loss(graph, weight), OutputSpec(OutputRole.LOSS_SUM)))
        params = graph.input_nodes(InputRole.PARAM)
        touched = 0
        for key in self.keys:
            total = grads.get(key)
            if total is not None and weight is not None:
                with graph.graph.inserting_after(total):
                    factor = weight.like(total.meta["val"])
                    total = _call(graph, key, aten.mul.Tensor, total, factor)
            if key in self.held:
                total = _added(graph, key, params[key], total)
                touched += 1
            outputs.append((total, OutputSpec(OutputRole.GRAD, key)))
        values, specs = zip(*outputs, strict=True)
        graph.set_outputs(values, specs)
        return PassResult(True, intended={"accumulators": len(self.held)}, touched={"accumulators": touched})


def flush_graph(captured: StepGraph) -> StepGraph:
    """A step without forward and backward, for gradients that are there: its loss is the sum of the window's losses."""
    graph = StepGraph(_only_output(), [], [], fake_mode=captured.fake_mode)
    for node, spec in zip(captured.placeholders, captured.inputs, strict=True):
        if spec.role is InputRole.PARAM:
            graph.add_input(spec, node.meta["val"], node.name)
    total = add_window_input(graph, "loss_sum")
    graph.set_outputs([total, total], [OutputSpec(OutputRole.LOSS), OutputSpec(OutputRole.LOSS_SUM)])
    return graph


def _only_output() -> fx.Graph:
    graph = fx.Graph()
    graph.output([])
    return graph


def _added(graph: StepGraph, key: str, param: fx.Node, grad: fx.Node | None) -> fx.Node:
    like: Tensor = (param if grad is None else grad).meta["val"]
    with graph.fake_mode, torch.no_grad():
        fake = torch.empty_like(like, dtype=_accumulator_dtype(like.dtype))
    held = graph.add_input(InputSpec(InputRole.ACCUMULATOR, key), fake, "accumulator")
    if grad is None:
        with graph.graph.inserting_before(graph.output_node):
            return _call(graph, key, aten.alias.default, held)
    with graph.graph.inserting_after(grad):
        return _call(graph, key, aten.add_.Tensor, held, grad)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of 16-bit gradients are kept in float32."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def _add_loss(graph: StepGraph, weight: _Weight | None) -> fx.Node:
    loss: fx.Node = graph.output_of(OutputRole.LOSS)
    total = add_window_input(graph, "loss_sum")
    phase = loss.meta["phase"]

    def after(node: fx.Node, target: Any, *args: Any) -> fx.Node:
        with graph.graph.inserting_after(node):
            return graph.add_call(target, args, module="accumulate", phase=phase)

    value = loss
    if loss.meta["val"].ndim:
        value = after(value, aten.view.default, value, [])
    if weight is not None:
        value = after(value, aten.mul.Tensor, value, weight.input)
    return after(value, aten.add_.Tensor, total, value)


class _Weight:
    """The micro-batch's weight, as an input and in the dtypes of gradients, cast where it is first needed."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self.input = add_window_input(graph, "weight")
        self._cast: dict[torch.dtype, fx.Node] = {torch.float64: self.input}

    def like(self, grad: Tensor) -> fx.Node:
        """In the gradient's dtype, so that one without dimensions keeps its own, as it does times a Python number."""
        if grad.dtype not in self._cast:
            first = next(n for n in self._graph.calls if n.meta["phase"] is Phase.BACKWARD)
            with self._graph.graph.inserting_before(first):
                self._cast[grad.dtype] = self._graph.add_call(
                    aten._to_copy.default,
                    (self.input,),
                    {"dtype": grad.dtype},
                    module="accumulate",
                    phase=Phase.BACKWARD,
                )
        return self._cast[grad.dtype]


def add_window_input(graph: StepGraph, key: str) -> fx.Node:
    """The number of the window with this name: 0-dim float64 on the parameters' device."""
    device = next(iter(graph.input_nodes(InputRole.PARAM).values())).meta["val"].device
    return graph.add_number_input(InputSpec(InputRole.WINDOW, key), torch.float64, device, key)


def _call(graph: StepGraph, key: str, target: Any, *args: Any) -> fx.Node:
    return graph.add_call(target, args, module=key, phase=Phase.BACKWARD)
