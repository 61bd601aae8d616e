"""Memory that operators take while they run and give back: measured on the device, since no shape tells it.

Convolutions choose an algorithm, some kernels copy what is not contiguous or of another dtype. Each operator is run once on
zeros of the layouts it has in the graph; layers that are alike share the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
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

_MEASURED: dict[Hashable, int] = {}


def measured_workspaces(graph: StepGraph) -> Callable[[fx.Node], int]:
    """Bytes that each call of forward and backward needs while it runs, beside operands and results.

    Those not measured before in this process run once, on memory of their own. What draws random numbers, depends on data,
    reads what its forward packed or is no torch operator counts 0, and so does the update.
    """
    found = {}
    for node in graph.calls:
        if _is_measurable(node):
            key = likeness_of(node)
            if key not in _MEASURED:
                _MEASURED[key] = _measure(node)
            found[node] = _MEASURED[key]
    return lambda node: found.get(node, 0)


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


def _measure(node: fx.Node) -> int:
    target: Any = KERNELS.get(node.target, node.target)
    scratch = {operand: _zeros(operand.meta["val"]) for operand in node.all_input_nodes}
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
            return 0  # zeros may be what the operator refuses
    return max(peak_bytes - made, 0)


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
