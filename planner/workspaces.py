"""Memory that operators take while they run and give back: measured on the device, since no shape tells it.

Convolutions choose an algorithm, some kernels copy what is not contiguous or of another dtype. Each operator is run on values
of the layouts it has in the graph: on zeros, and where it takes whole numbers or truth values, on ones as well, since what a
kernel picks out by them takes memory too. The larger counts; layers that are alike share the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..device import allocation_peak, autocast_off
from ..graph import (
    CAPTURED_PHASES,
    StepGraph,
    effects_of,
    family_of,
    is_view,
    likeness_of,
    storage_sizes,
    storages_of,
    tensors_in,
)
from ..graph.ops import KERNELS
from ..torch_compat import grad_mode_below_autograd, has_symbolic_shape

# They take what their forward packed into a buffer, and read past its end where that holds zeros.
_READS_PACKED = frozenset({"mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"})

_MEASURED: dict[Hashable, int | None] = {}


@dataclass(frozen=True)
class Workspaces:
    """Bytes that each call needs while it runs, beside operands and results.

    Attributes:
        measured: of the calls that could be measured; others count 0.
        refused: names of the operators that ran on none of the values that were tried.
    """

    measured: Mapping[fx.Node, int]
    refused: tuple[str, ...] = ()

    def __call__(self, node: fx.Node) -> int:
        return self.measured.get(node, 0)


def measured_workspaces(graph: StepGraph) -> Workspaces:
    """What the calls of forward and backward need while they run.

    Those not measured before in this process run, on memory of their own. What draws random numbers, depends on data, reads
    what its forward packed or is no torch operator is not measured, nor is the update.
    """
    found: dict[fx.Node, int] = {}
    refused: dict[str, None] = {}
    for node in graph.calls:
        if _is_measurable(node):
            key = likeness_of(node)
            if key not in _MEASURED:
                _MEASURED[key] = _measure(node)
            if (workspace := _MEASURED[key]) is None:
                refused[str(node.target)] = None
            else:
                found[node] = workspace
    return Workspaces(found, tuple(refused))


def _is_measurable(node: fx.Node) -> bool:
    if node.meta["phase"] not in CAPTURED_PHASES or not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return False
    effects = effects_of(node)
    if (
        effects.random
        or effects.opaque
        or effects.collective
        or effects.control
        or family_of(node.target) in _READS_PACKED
        or node.target.namespace not in ("aten", "stepgraph")
    ):
        return False
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    return all(isinstance(v, Tensor) for v in values[1:]) and not any(
        has_symbolic_shape(t) for v in values for t in tensors_in(v)
    )


def _measure(node: fx.Node) -> int | None:
    """The most that it takes; None where it refuses all values."""
    chooses = any(_is_discrete(operand.meta["val"]) for operand in node.all_input_nodes)
    taken = [_measured_on(node, fill) for fill in ((_zeros, _ones) if chooses else (_zeros,))]
    return max((workspace for workspace in taken if workspace is not None), default=None)


def _measured_on(node: fx.Node, fill: Callable[[Tensor], Tensor]) -> int | None:
    """None where the operator refuses the values."""
    target: Any = KERNELS.get(node.target, node.target)
    scratch = {operand: fill(_memory_like(operand.meta["val"])) for operand in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, node.kwargs), scratch.__getitem__)
    given = {key for operand in node.all_input_nodes for key in storages_of(operand)}
    made = sum(size for key, size in storage_sizes(node).items() if key not in given)
    device = next((t.device for t in scratch.values()), None)
    if device is None:
        return 0
    mode: Any = grad_mode_below_autograd() if node.meta["grad_mode"] else contextlib.nullcontext()
    with torch.no_grad(), autocast_off(), mode:
        try:
            _, peak_bytes = allocation_peak(lambda: target(*args, **kwargs), device)
        except Exception:
            return None
    return max(peak_bytes - made, 0)


def _is_discrete(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _memory_like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _zeros(tensor: Tensor) -> Tensor:
    return tensor.zero_()


def _ones(tensor: Tensor) -> Tensor:
    """Ones where numbers count or choose something, zeros elsewhere."""
    return tensor.fill_(1) if _is_discrete(tensor) else tensor.zero_()
