"""Finds the operator that made the first NaN or infinity of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ..capture import FlatBatch, flatten_batch
from ..graph import (
    UNINITIALISED,
    InputRole,
    OutputRole,
    Phase,
    StepGraph,
    family_of,
    storages_of,
    target_name,
    tensors_in,
    written_nodes,
)
from .interpret import run_nodes
from .rollback import rolled_back

if TYPE_CHECKING:
    from .compiled import CompiledBatch, Variant


@dataclass(frozen=True)
class NonfiniteReport:
    """Where a step's first NaN or infinity comes from.

    Attributes:
        reaches: the first result that is not finite: the loss, a gradient, or what the update or forward wrote; None where
            everything is finite, and then the others are None too.
        kind: ``"nan"`` or ``"inf"`` (of either sign): what the operator's result holds.
        operator: the ATen operator whose result is the first that is not finite on the way there; None where it came in.
        key: logical key of its node; of the input where it came in: a parameter, a buffer, or a leaf of the batch.
        module_path: module whose forward ran the operator, or whose forward operator it differentiates; "" is the root.
        source_line: ``file:line`` of the user's code that did.
        phase: forward, backward, norm or update; None for an input.
        became_nan: operator, key and line of the node that made a NaN of infinities, where the first value was an infinity.
    """

    reaches: str | None = None
    kind: str | None = None
    operator: str | None = None
    key: str | None = None
    module_path: str | None = None
    source_line: str | None = None
    phase: Phase | None = None
    became_nan: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether nothing was found."""
        return self.reaches is None

    def __str__(self) -> str:
        if self.is_finite:
            return "the loss, the gradients and everything that the step writes are finite"
        if self.operator is None:
            return f"{self.reaches} is not finite, since {self.key} comes in with {self.kind}"
        lines = [
            f"{self.reaches} is not finite; the first {self.kind} on the way there is made by {self.operator} ({self.phase})",
            f"  node: {self.key}",
            f"  module: {self.module_path or '(root)'}",
        ]
        if self.source_line is not None:
            line = "differentiates" if self.phase is Phase.BACKWARD else "source"
            lines.append(f"  {line}: {self.source_line}")
        if self.became_nan is not None:
            lines.append(f"  turned into nan by: {self.became_nan}")
        return "\n".join(lines)


def find_nonfinite(graph: StepGraph, inputs: list[Any]) -> NonfiniteReport:
    """Runs ``graph`` node by node on ``inputs``, which it changes, and follows a non-finite result back to its origin.

    An infinity that goes nowhere, such as that of a mask before a softmax, is not reported.
    """
    held = dict(zip(graph.placeholders, inputs, strict=True))
    trail = _Trail(graph, held)
    values: dict[fx.Node, Any] = {}
    for node, values in run_nodes(graph, inputs):
        trail.follow(node, values)
    values = {**held, **values}
    for node, what in _results(graph):
        if node in values and (maker := trail.maker_of(node, values[node])) is not None:
            return _report(graph, trail, maker, what)
    return NonfiniteReport()


class _Trail:
    """Which nodes made values that are not finite, and out of which.

    Attributes:
        kinds: ``"nan"`` or ``"inf"``, for nodes and inputs whose value is not finite.
        sources: for each such node, those whose non-finite values it read.
    """

    def __init__(self, graph: StepGraph, inputs: dict[fx.Node, Any]) -> None:
        self.kinds: dict[fx.Node, str] = {}
        self.sources: dict[fx.Node, list[fx.Node]] = {}
        self.order = {node: position for position, node in enumerate(graph.graph.nodes)}
        self._makers: dict[int, fx.Node] = {}  # by storage
        for node, value in inputs.items():
            if (kind := _kind_of(tensors_in(value))) is not None:
                self.kinds[node] = kind
                self._makers.update(dict.fromkeys(storages_of(node), node))

    def follow(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Notes what a call that just ran did to its result and to what it wrote."""
        if family_of(node.target) in UNINITIALISED:
            return
        written = list(written_nodes(node))
        changed = [*tensors_in(values[node]), *(t for operand in written for t in tensors_in(values[operand]))]
        if (kind := _kind_of(changed)) is None:
            return
        self.kinds[node] = kind
        sources = [self.maker_of(operand, values[operand]) for operand in node.all_input_nodes]
        self.sources[node] = [source for source in sources if source is not None]
        for changed_node in (node, *written):
            self._makers.update(dict.fromkeys(storages_of(changed_node), node))

    def maker_of(self, node: fx.Node, value: Any) -> fx.Node | None:
        """The call or input that made ``value``, which ``node`` stands for, non-finite; None where it is finite."""
        makers = [self._makers[key] for key in storages_of(node) if key in self._makers]
        return makers[0] if makers and _kind_of(tensors_in(value)) is not None else None

    def ancestors(self, node: fx.Node) -> list[fx.Node]:
        """Where ``node`` got its non-finite value from, itself included, in execution order.

        A NaN that was made of a NaN did not come from an infinity beside it.
        """
        found, pending = {node}, [node]
        while pending:
            current = pending.pop()
            sources = self.sources.get(current, [])
            if self.kinds[current] == "nan":
                sources = [s for s in sources if self.kinds[s] == "nan"] or sources
            pending += [s for s in sources if s not in found]
            found.update(sources)
        return sorted(found, key=self.order.__getitem__)


def _kind_of(tensors: list[Tensor]) -> str | None:
    floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    if any(bool(torch.isnan(t).any()) for t in floats):
        return "nan"
    return "inf" if any(bool(torch.isinf(t).any()) for t in floats) else None


def _results(graph: StepGraph) -> Iterator[tuple[fx.Node, str]]:
    """What must be finite, in the order in which a reader wants to hear of it, and what to call it."""
    for role, name in _NAMES.items():
        for key, value in graph.output_nodes(role).items():
            if isinstance(value, fx.Node):
                yield value, name.format(key)
    for node, spec in zip(graph.placeholders, graph.inputs, strict=True):
        if spec.role in (InputRole.PARAM, InputRole.BUFFER, InputRole.STATE):
            yield node, str(spec)


_NAMES = {
    OutputRole.LOSS: "the loss",
    OutputRole.GRAD: "the gradient of {}",
    OutputRole.NORM: "the norm of the gradients",
    OutputRole.BUFFER: "buffer {}",
    OutputRole.STATE: "state {}",
}


def _report(graph: StepGraph, trail: _Trail, maker: fx.Node, what: str) -> NonfiniteReport:
    ancestors = trail.ancestors(maker)
    first = ancestors[0]
    kind = trail.kinds[first]
    if first.op == "placeholder":
        spec = graph.inputs[graph.placeholders.index(first)]
        return NonfiniteReport(what, kind, key="the batch" if str(spec) == "batch batch" else str(spec))
    turned = next((n for n in ancestors if trail.kinds[n] == "nan"), None) if kind == "inf" else None
    became_nan = None
    if turned is not None:
        became_nan = f"{target_name(turned.target)}, {turned.meta['key'].name}, {turned.meta.get('source')}"
    key = first.meta["key"]
    return NonfiniteReport(
        what,
        kind,
        target_name(first.target),
        key.name,
        key.module,
        first.meta.get("source"),
        first.meta["phase"],
        became_nan,
    )


def first_nonfinite(
    model: nn.Module, optimizer: torch.optim.Optimizer, compiled: CompiledBatch, variant: Variant, batch: FlatBatch
) -> NonfiniteReport:
    """Looks at forward and backward as they were captured, and if all is finite there, at norm, clip and update.

    Both run on the user's own objects and are undone.
    """
    captured = compiled.step.graph
    report = NonfiniteReport()
    for graph in (captured, variant.graph):
        with rolled_back(model, optimizer):
            inputs = compiled.inputs(variant, flatten_batch(batch.copied()))
            by_spec = dict(zip(variant.graph.inputs, inputs, strict=True))
            report = find_nonfinite(graph, [by_spec[spec] for spec in graph.inputs])
        if not report.is_finite:
            break
    return report
