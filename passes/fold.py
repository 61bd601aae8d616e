"""Scales gradients where the update reads them, instead of in memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from ..graph import (
    OutputRole,
    Phase,
    StepGraph,
    effects_of,
    family_of,
    gradients_of,
    nodes_in,
)
from .base import Pass, PassResult
from .fused_kernels import is_fused_kernel, with_scaler_arguments
from .grad_norm import add_norm_call

aten = torch.ops.aten

MODERATE_SCALES = (2.0**-24, 2.0**24)


@dataclass(frozen=True)
class Fold(Pass):
    """Fast tier. Reads each gradient once for the norm and once for the update, and writes none.

    Unscaling, the average over a window and the clip factor become one number. The update multiplies by it: a fused kernel
    that the optimizer calls takes its reciprocal as ``grad_scale``; before an update that is compiled, each gradient is
    multiplied out of place, which the compiler fuses. The norm is taken of the gradients as they came, then unscaled and
    averaged itself. An update is left out at the gate, before it reads anything.

    Rounded differently: one product in the place of up to three. A norm overflows where that of the scaled gradients does,
    which counts as non-finite; so this is for norms of types 1, 2 and infinity, and scales that are not extreme
    (:func:`can_fold`).

    Without ``multiplies``, nothing is changed where the update reads gradients otherwise than through fused kernels.

    Attributes:
        multiplies: whether gradients are multiplied ahead of the update, for a compiler.
    """

    name: ClassVar[str] = "fold"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.NORM,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM, Phase.UPDATE})
    optional: ClassVar[bool] = True

    multiplies: bool

    def run(self, graph: StepGraph) -> PassResult:
        grads = gradients_of(graph)
        changes = _changes_of(graph, set(grads))
        if not changes or not (self.multiplies or _all_read_by_fused_kernels(graph, set(grads), changes)):
            return PassResult(False)
        factors = _Factors(graph, grads, changes)
        _scale_norm(graph, changes)
        if self.multiplies:
            touched = _multiply(graph, set(grads), changes, factors)
        else:
            touched = _scale_in_kernels(graph, set(grads), factors)
        for change in changes:
            graph.graph.erase_node(change.node)
        _drop_unused(graph)
        return PassResult(True, intended={"gradients": len(grads)}, touched={"gradients": touched})


def can_fold(norm_type: float, scale: float | None) -> bool:
    """Whether the norm of scaled gradients is as good as that of unscaled ones: their powers neither overflow nor underflow."""
    is_moderate = scale is None or MODERATE_SCALES[0] <= scale <= MODERATE_SCALES[1]
    return norm_type in (1.0, 2.0, math.inf) and is_moderate


class _Change(NamedTuple):
    """A call that changes gradients in place.

    Attributes:
        factor: what it multiplies by; None where it clamps.
        power: -1 where it divides.
        is_before_norm: whether the norm sees it.
    """

    node: fx.Node
    grads: list[fx.Node]
    factor: fx.Node | None
    power: int
    is_before_norm: bool


_FACTORS = {  # position of the factor, and its exponent
    "mul_": (1, 1),
    "_foreach_mul_": (1, 1),
    "div_": (1, -1),
    "_foreach_div_": (1, -1),
    "_amp_foreach_non_finite_check_and_unscale_": (2, 1),
}


def _changes_of(graph: StepGraph, grads: set[fx.Node]) -> list[_Change]:
    norm = graph.output_of(OutputRole.NORM)
    changes, is_before = [], True
    for node in graph.calls:
        is_before = is_before and node is not norm
        if node.meta["phase"] is not Phase.NORM or not effects_of(node).writes:
            continue
        changed = [n for n in nodes_in(node.args[0]) if n in grads]
        if not changed:
            continue
        position, power = _FACTORS.get(family_of(node.target), (None, 0))
        factor = None if position is None else node.args[position]
        changes.append(_Change(node, changed, factor, power, is_before))  # type: ignore[arg-type]
    return changes


def _all_read_by_fused_kernels(graph: StepGraph, grads: set[fx.Node], changes: list[_Change]) -> bool:
    if any(change.factor is None for change in changes):
        return False
    for node in graph.calls:
        reads = node.meta["phase"] is Phase.UPDATE and not grads.isdisjoint(node.all_input_nodes)
        if reads and not is_fused_kernel(node):
            return False
    return True


class _Factors:
    """What each gradient is multiplied by between the backward and the update, as one 0-dim tensor."""

    def __init__(self, graph: StepGraph, grads: list[fx.Node], changes: list[_Change]) -> None:
        self._graph = graph
        late = {change.node for change in changes if not change.is_before_norm}
        behind_norm = (n for n in graph.calls if n in late or (effects_of(n).control and n.meta["phase"] is Phase.NORM))
        self.position = next(behind_norm, None) or _first_of_update(graph)
        parts: dict[fx.Node, list[tuple[fx.Node, int]]] = {grad: [] for grad in grads}
        for change in changes:
            for grad in change.grads:
                if change.factor is not None:
                    parts[grad].append((change.factor, change.power))
        self._parts = {grad: tuple(found) for grad, found in parts.items()}
        self._products: dict[tuple[Any, bool], fx.Node | None] = {}

    def of(self, grad: fx.Node, *, inverted: bool = False) -> fx.Node | None:
        """The factor, or its reciprocal in single precision; None where it is 1."""
        key = (self._parts[grad], inverted)
        if key not in self._products:
            with self._graph.graph.inserting_before(self.position):
                product = _product(self._graph, None, key[0])
                if product is not None and inverted:
                    product = add_norm_call(self._graph, aten.reciprocal.default, (product,))
                    product = _cast(self._graph, product, torch.float32)
            self._products[key] = product
        return self._products[key]


def _product(graph: StepGraph, start: fx.Node | None, parts: tuple[tuple[fx.Node, int], ...]) -> fx.Node | None:
    for factor, power in parts:
        if start is None:
            start = factor if power == 1 else add_norm_call(graph, aten.reciprocal.default, (factor,))
        else:
            start = add_norm_call(graph, aten.mul.Tensor if power == 1 else aten.div.Tensor, (start, factor))
    return start


def _cast(graph: StepGraph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype is dtype:
        return value
    return add_norm_call(graph, aten._to_copy.default, (value,), {"dtype": dtype})


def _first_of_update(graph: StepGraph) -> fx.Node:
    return next(n for n in graph.calls if n.meta["phase"] is Phase.UPDATE)


def _scale_norm(graph: StepGraph, changes: list[_Change]) -> None:
    """Multiplies the norm by what its gradients are no longer multiplied by."""
    norm = graph.output_of(OutputRole.NORM)
    before = [change for change in changes if change.is_before_norm]
    if not before:
        return
    first = next((c for c in before if c.grads[0].meta["val"].dtype is norm.meta["val"].dtype), before[0]).grads[0]
    parts = tuple((c.factor, c.power) for c in before if first in c.grads and c.factor is not None)
    readers = list(norm.users)
    with graph.graph.inserting_before(norm.next):
        result = _product(graph, norm, parts)
        assert result is not None
        result = _cast(graph, result, norm.meta["val"].dtype)
    for reader in readers:
        reader.replace_input_with(norm, result)
        if reader.target is torch.ops.stepgraph.nonfinite_code.default:
            reader.update_arg(3, True)


def _multiply(graph: StepGraph, grads: set[fx.Node], changes: list[_Change], factors: _Factors) -> int:
    """Lets everything behind the norm read multiples. Returns how many gradients the update then reads so."""
    of_node = {change.node: change for change in changes}
    norm = graph.output_of(OutputRole.NORM)
    end = _first_of_update(graph)
    values: dict[fx.Node, fx.Node] = {}

    def value_of(grad: fx.Node, position: fx.Node) -> fx.Node:
        if grad not in values:
            factor = factors.of(grad)
            values[grad] = grad
            if factor is not None:
                with graph.graph.inserting_before(position):
                    product = add_norm_call(graph, aten.mul.Tensor, (grad, factor))
                    values[grad] = _cast(graph, product, grad.meta["val"].dtype)
        return values[grad]

    touched = set()
    for node in list(itertools.dropwhile(lambda n: n is not norm, graph.calls)):
        is_update = node.meta["phase"] is Phase.UPDATE
        if node in of_node:
            for grad in of_node[node].grads if of_node[node].factor is None else ():
                value = value_of(grad, node)
                with graph.graph.inserting_before(node):
                    values[grad] = add_norm_call(graph, aten.clamp.default, (value, *node.args[1:]))
        elif node.target is not torch.ops.stepgraph.nonfinite_code.default:
            for grad in grads.intersection(node.all_input_nodes):
                node.replace_input_with(grad, value_of(grad, end if is_update else node))
                if is_update:
                    touched.add(grad)
    return len(touched)


def _scale_in_kernels(graph: StepGraph, grads: set[fx.Node], factors: _Factors) -> int:
    """Hands the factor to the kernels. Returns how many gradients they read."""
    touched = 0
    for node in graph.calls:
        mine = [n for n in node.all_input_nodes if n in grads] if is_fused_kernel(node) else []
        if mine:
            with_scaler_arguments(graph, node, grad_scale=factors.of(mine[0], inverted=True))
            touched += len(mine)
    return touched


def _drop_unused(graph: StepGraph) -> None:
    for node in reversed(graph.calls):
        if node.meta["phase"] is Phase.NORM and not node.users and effects_of(node).pure:
            graph.graph.erase_node(node)
