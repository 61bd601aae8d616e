"""Finds the operator that made the first NaN or infinity of a step."""

from __future__ import annotations

import math
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
    is_scalar_function,
    storages_of,
    target_name,
    tensors_in,
    written_nodes,
)
from .interpret import Values, run_nodes

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
            where = f", at {self.source_line}" if self.source_line else ""
            return f"{self.reaches} is not finite, since {self.key} comes in with {self.kind}{where}"
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
    values: Values = {}
    for node, values in run_nodes(graph, inputs, trail.look_at_written):
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

    def __init__(self, graph: StepGraph, inputs: Values) -> None:
        self.kinds: dict[fx.Node, str] = {}
        self.sources: dict[fx.Node, list[fx.Node]] = {}
        self.order = {node: position for position, node in enumerate(graph.graph.nodes)}
        self._makers: dict[int, fx.Node] = {}  # by storage
        self._before: dict[fx.Node, list[Tensor]] = {}
        for node, value in inputs.items():
            self._note(node, _kind_of(value), [node])

    def look_at_written(self, node: fx.Node, values: Values) -> None:
        """Remembers what a call is about to write over, where that is not finite."""
        written = {operand: values[operand] for operand in _written(node)}
        self._before = {n: [t.clone() for t in tensors_in(v)] for n, v in written.items() if _kind_of(v) is not None}

    def follow(self, node: fx.Node, values: Values) -> None:
        """Notes what a call that just ran did to its result and to what it wrote."""
        if family_of(node.target) in UNINITIALISED:
            return
        written = _written(node)
        changed = [values[node], *(values[operand] for operand in written)]
        kind = _kind_of(changed)
        if kind is not None:
            sources = [
                self.maker_of(
                    operand, self._before.get(operand, []) if operand in written else values[operand], changed
                )
                for operand in node.all_input_nodes
            ]
            self.sources[node] = [source for source in sources if source is not None]
            self._note(node, kind, [node, *(n for n in written if _kind_of(values[n]) is not None)])
        for operand in written:
            if _kind_of(values[operand]) is None and all(map(_is_whole, tensors_in(values[operand]))):
                for key in storages_of(operand):
                    self._makers.pop(key, None)

    def _note(self, node: fx.Node, kind: str | None, changed: list[fx.Node]) -> None:
        if kind is not None:
            self.kinds[node] = kind
            self._makers.update((key, node) for n in changed for key in storages_of(n))

    def maker_of(self, node: fx.Node, value: Any, result: Any = None) -> fx.Node | None:
        """The call or input that made ``value``, which ``node`` stands for, non-finite.

        None where it is finite, or where ``result``, which was computed from it, is non-finite in other places only.
        """
        if _kind_of(value) is None or not _may_come_from(value, result):
            return None
        makers = [self._makers[key] for key in storages_of(node) if key in self._makers]
        return makers[0] if makers else (node if node in self.kinds else None)

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


def _written(node: fx.Node) -> list[fx.Node]:
    """What a call may write: of calls that are not operators, such as the optimizer's own step(), all that they get."""
    return written_nodes(node) if isinstance(node.target, torch._ops.OpOverload) else _operands_of_python(node)


def _operands_of_python(node: fx.Node) -> list[fx.Node]:
    return [] if is_scalar_function(node.target) else list(node.all_input_nodes)


def _kind_of(value: Any) -> str | None:
    """``"nan"`` or ``"inf"`` where a number or tensor in ``value`` is that, else None."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else "inf" if math.isinf(value) else None
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            return None
        return "nan" if bool(value.isnan().any()) else "inf" if bool(value.isinf().any()) else None
    kinds = {_kind_of(item) for item in value} if isinstance(value, (list, tuple)) else set()
    return "nan" if "nan" in kinds else "inf" if "inf" in kinds else None


def _may_come_from(value: Any, result: Any) -> bool:
    """False only where both have one shape, and ``value`` is finite wherever ``result`` is NaN, or infinite without one."""
    values, results = tensors_in(value), tensors_in(result)
    shapes = {t.shape for t in (*values, *results)}
    if not values or not results or len(shapes) > 1:
        return True
    wrong = [r.isnan() if bool(r.isnan().any()) else r.isinf() for r in results]
    return any(bool((~v.isfinite() & w).any()) for v in values for w in wrong)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all that there is in its memory."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


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
        if spec.role is InputRole.CONSTANT:
            user = next(iter(first.users))
            module, line = user.meta["key"].module, user.meta.get("source")
            return NonfiniteReport(what, kind, None, "a constant of the code", module, line, user.meta["phase"])
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
        with compiled.state.rolled_back(model, optimizer):
            inputs = compiled.inputs(variant, flatten_batch(batch.copied()))
            by_spec = dict(zip(variant.graph.inputs, inputs, strict=True))
            report = find_nonfinite(graph, [by_spec[spec] for spec in graph.inputs])
        if not report.is_finite:
            break
    return report
