"""Memory that operators take while they run and give back: measured on the device, since no shape tells it.

Convolutions choose an algorithm, some kernels copy what is not contiguous or of another dtype. Each operator is run on values
of the layouts it has in the graph: on zeros, and where it takes whole numbers or truth values, on ones as well, since what a
kernel picks out by them takes memory too; grouped products with all groups in use. The largest counts; layers that are alike
share the result.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..device import allocation_peak, autocast_off, same_random_numbers
from ..graph import (
    CAPTURED_PHASES,
    Rehearses,
    StepGraph,
    argument,
    effects_of,
    family_of,
    filled_like,
    is_view,
    likeness_of,
    name_of,
    rehearsal_of,
    storage_sizes,
    storages_of,
    tensors_in,
)
from ..graph.ops import KERNELS
from ..torch_compat import grad_mode_below_autograd, has_symbolic_shape
from .cost import LIST_OPERATORS

# They take what their forward packed into a buffer, and read past its end where that holds something else.
_PACKED_BY = {"mkldnn_rnn_layer_backward": "mkldnn_rnn_layer"}
# They pack into buffers of unknown size, or read such.
_UNKNOWN = frozenset({"_cudnn_rnn", "miopen_rnn", "_cudnn_rnn_backward", "miopen_rnn_backward"})

_MEASURED: dict[Hashable, int | None] = {}


@dataclass(frozen=True)
class Workspaces:
    """Bytes that each call needs while it runs, beside operands and results.

    Attributes:
        measured: of the calls that could be measured; others count 0.
        refused: what is not counted: operators that ran on none of the values that were tried, what an opaque call left out.
    """

    measured: Mapping[fx.Node, int]
    refused: tuple[str, ...] = ()

    def __call__(self, node: fx.Node) -> int:
        return self.measured.get(node, 0)


def measured_workspaces(graph: StepGraph) -> Workspaces:
    """What the calls of a step need while they run.

    Operators not measured before in this process run, on memory of their own. What depends on data or is no torch operator is
    not measured. Of what follows backward, neither is what works element by element nor what takes lists of tensors, all of the
    model's at once.
    """
    found: dict[fx.Node, int] = {}
    refused: dict[str, None] = {}
    for node in graph.calls:
        if isinstance(node.target, Rehearses):
            found[node], left_out = _of_opaque(node)
            refused.update(dict.fromkeys(left_out))
        elif family_of(node.target) in _UNKNOWN:
            refused[str(node.target)] = None
        elif _is_measurable(node):
            if (workspace := _measured(node)) is None:
                refused[str(node.target)] = None
            else:
                found[node] = workspace
    return Workspaces(found, tuple(refused))


def _of_opaque(node: fx.Node) -> tuple[int, list[str]]:
    """Of an opaque call, that of its kernels included, and what is not counted."""
    inside = rehearsal_of(node)
    if inside is None:
        return 0, [name_of(node)]
    measured = [(call, _measured(call.node)) for call in inside.calls if _is_measurable(call.node)]
    workspace = max([inside.workspace_bytes, *(call.beside_bytes + (own or 0) for call, own in measured)])
    refused = [str(call.node.target) for call, own in measured if own is None]
    return workspace, [*refused, *([inside.left_out] if inside.left_out else [])]


def _measured(node: fx.Node) -> int | None:
    """What was measured of a call like this, now where it never was; None where no trial values suit it."""
    key = likeness_of(node)
    if key not in _MEASURED:
        _MEASURED[key] = _measure(node)
    return _MEASURED[key]


def _is_measurable(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return False
    if node.meta["phase"] not in CAPTURED_PHASES and (
        torch.Tag.pointwise in node.target.tags or family_of(node.target).startswith(LIST_OPERATORS)
    ):
        return False
    effects = effects_of(node)
    if (
        effects.opaque
        or effects.collective
        or effects.control
        or family_of(node.target) in _UNKNOWN
        or node.target.namespace not in ("aten", "stepgraph")
    ):
        return False
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    return all(isinstance(v, Tensor) for v in values[1:]) and not any(
        has_symbolic_shape(t) for v in values for t in tensors_in(v)
    )


def _measure(node: fx.Node) -> int | None:
    """The most that it takes on any trial values; None where it refuses them all."""
    taken = [_measured_on(node, values) for values in _trials(node)]
    return max((workspace for workspace in taken if workspace is not None), default=None)


def _measured_on(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> int | None:
    """None where the operator refuses the values."""
    given = {key for operand in node.all_input_nodes for key in storages_of(operand)}
    made = sum(size for key, size in storage_sizes(node).items() if key not in given)
    device = next((t.device for t in values.values()), None)
    if device is None:
        return 0
    with same_random_numbers({device} if effects_of(node).random else set()):
        try:
            _, peak_bytes = allocation_peak(lambda: _run(node, values), device)
        except Exception:
            return None
    return max(peak_bytes - made, 0)


def _run(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> Any:
    target: Any = KERNELS.get(node.target, node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    mode: Any = grad_mode_below_autograd() if node.meta["grad_mode"] else contextlib.nullcontext()
    with torch.no_grad(), autocast_off(), mode:
        return target(*args, **kwargs)


def _trials(node: fx.Node) -> Iterator[dict[fx.Node, Tensor]]:
    """Values for its operands: zeros, ones where they count, pick or set a norm, and groups that are all in use."""
    if packer := _PACKED_BY.get(family_of(node.target)):
        if packed := _packed(node, packer):
            yield _filled(node, 0) | packed
        return
    yield _filled(node, 0)
    if any(_is_discrete(operand.meta["val"]) for operand in node.all_input_nodes):
        yield _filled(node, 1)
    if family_of(node.target).startswith("linalg_") or effects_of(node).random:
        # a matrix exponential has more terms for larger norms, and chances must not all be 0
        yield _filled(node, 1, numbers=1)
    ends = argument(node, "offs")  # where each group of a grouped product ends
    if isinstance(ends, fx.Node):
        values = _filled(node, 0)
        first, second = (values[operand] for operand in node.all_input_nodes[:2])
        rows = (
            first.shape[0]
            if (first.dim(), second.dim()) == (2, 3)
            else (second if first.dim() > 2 else first).shape[-1]
        )
        count = values[ends].numel()
        values[ends].copy_(torch.arange(1, count + 1).clamp(max=rows))  # a row each, since odd places cost a copy,
        values[ends][count - 1] = rows  # and the rest in the last
        yield values


def _packed(node: fx.Node, packer: str) -> dict[fx.Node, Tensor]:
    """Those operands that calls of ``packer`` made, as it makes them of zeros."""
    made: dict[fx.Node, Any] = {}
    found = {}
    for operand in node.all_input_nodes:
        call = operand.args[0] if operand.target is operator.getitem else None
        if isinstance(call, fx.Node) and family_of(call.target) == packer:
            if call not in made:
                made[call] = _run(call, _filled(call, 0))
            found[operand] = made[call][operand.args[1]]
    return found


def _filled(node: fx.Node, count: int, numbers: int = 0) -> dict[fx.Node, Tensor]:
    """``count`` wherever whole numbers or truth values are taken, ``numbers`` elsewhere."""

    fakes = {operand: operand.meta["val"] for operand in node.all_input_nodes}
    return {n: filled_like(fake, count if _is_discrete(fake) else numbers) for n, fake in fakes.items()}


def _is_discrete(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
