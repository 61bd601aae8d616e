"""Seconds of one operator call: the larger of what its arithmetic and what its memory takes, and a launch.

The roofline of Williams, Waterman and Patterson (2009), by kind of operator: products, attention and convolutions go by
floating-point operations, everything else by bytes, and functions such as ``exp`` by elements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..graph import is_view, likeness_of, short_dtype, storages_of, tensors_in
from ..torch_compat import has_symbolic_shape, storage_key
from .hardware import HardwareSpec

_ATTENTION = ("attention", "flash", "sdp")
_TRANSCENDENTAL = frozenset(
    {
        "exp", "log", "tanh", "sigmoid", "silu", "silu_backward", "gelu", "gelu_backward", "erf", "sin", "cos", "softplus",
        "softplus_backward", "_softmax", "_safe_softmax", "_log_softmax", "_log_softmax_backward_data", "mish", "log1p",
        "expm1", "logsumexp", "elu", "tan", "atan", "pow", "bernoulli_", "normal_", "uniform_",
    }
)  # fmt: skip


def node_seconds(spec: HardwareSpec) -> Callable[[fx.Node], float]:
    """A function that predicts the seconds of a call on ``spec``; calls that are alike are worked out once."""
    known: dict[Hashable, float] = {}

    def seconds(node: fx.Node) -> float:
        key = likeness_of(node)
        if key not in known:
            known[key] = _seconds(node, spec)
        return known[key]

    return seconds


def _seconds(node: fx.Node, spec: HardwareSpec) -> float:
    if is_view(node):
        return spec.view_seconds
    result = tensors_in(node.meta["val"])
    dtype = short_dtype(result[0].dtype) if result else "f32"
    moved = moved_bytes(node) / spec.memory_bytes_per_second
    flops = flops_of(node)
    name = node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""
    if flops:
        rates = spec.matmul_flops
        if any(word in name for word in _ATTENTION):
            rates = spec.attention_flops
        elif "conv" in name:
            rates = spec.convolution_flops
        return spec.launch_seconds + max(flops / rates.get(dtype, rates["f32"]), moved)
    if name in _TRANSCENDENTAL:
        elements = sum(t.numel() for t in result if not has_symbolic_shape(t))
        return spec.launch_seconds + max(elements / spec.scalar_ops_per_second, moved)
    return spec.launch_seconds + moved


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a product, attention or convolution, by torch's own count; 0 for everything else."""
    target: Any = node.target
    count = flop_registry.get(getattr(target, "overloadpacket", None))
    if count is None or any(has_symbolic_shape(t) for t in _tensors(node)):
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def moved_bytes(node: fx.Node) -> int:
    """Bytes of operands and results as the operator sees them, each storage at most whole."""
    seen: dict[int, int] = {}
    for tensor in _tensors(node):
        if not has_symbolic_shape(tensor):
            key, whole = storage_key(tensor), tensor.untyped_storage().nbytes()
            seen[key] = max(seen.get(key, 0), min(tensor.numel() * tensor.element_size(), whole))
    operands = {key for operand in node.all_input_nodes for key in storages_of(operand)}
    in_place = operands.intersection(storages_of(node))
    return sum(seen.values()) + sum(seen.get(key, 0) for key in in_place)  # read and written


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for n in (node, *node.all_input_nodes) for t in tensors_in(n.meta["val"])]
