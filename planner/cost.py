"""Seconds of one operator call: from what was measured on the device, or the larger of its arithmetic and its memory traffic.

Where a calibrated spec has a table for the operator, that is the figure. Otherwise it is the roofline of Williams, Waterman and
Patterson (2009), by kind of operator: products, attention and convolutions go by floating-point operations, everything else
by bytes, and functions such as ``exp`` by elements; and a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from ..graph import (
    StepGraph,
    argument,
    effects_of,
    is_scalar_function,
    is_view,
    likeness_of,
    rehearsal_of,
    short_dtype,
    storages_of,
    tensors_in,
)
from ..torch_compat import has_symbolic_shape, storage_key
from .hardware import HardwareSpec
from .timeline import waits

_ATTENTION = ("attention", "flash", "sdp")
_TRANSCENDENTAL = frozenset(
    {
        "exp", "log", "tanh", "sigmoid", "silu", "silu_backward", "gelu", "gelu_backward", "erf", "sin", "cos", "softplus",
        "softplus_backward", "_softmax", "_safe_softmax", "_log_softmax", "_log_softmax_backward_data", "mish", "log1p",
        "expm1", "logsumexp", "elu", "tan", "atan", "pow", "bernoulli", "normal", "uniform",
    }
)  # fmt: skip
ROW_OPERATORS = frozenset(
    {
        "_softmax", "_safe_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
        "native_layer_norm", "native_layer_norm_backward",
    }
)  # fmt: skip
PRODUCTS = {"mm": "mm", "addmm": "mm", "bmm": "bmm", "baddbmm": "bmm"}
_PERMUTED = " permuted"
PATCHES = " of patches"  # convolutions whose windows do not overlap
LIST_OPERATORS = ("_foreach", "_fused", "fused")
MATRICES = 16  # products in the batch that the table of "bmm" is of
TENSORS = 16  # in the lists that the tables of list operators are of
ELEMENTWISE, COPY, LISTS = "mul", "clone", "_foreach_add"  # tables for what has none of its own
_aten = torch.ops.aten
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


class Work(NamedTuple):
    """What a call has to do.

    Attributes:
        table: name of the table that tells its seconds.
        sizes: one for each of the table's axes: rows, inner and columns of a product; floating-point operations of convolutions
            and of each head of attention, and the number of heads; the number and the length of rows of softmax and layer norm;
            bytes for the rest, of list operators those of one tensor.
        times: how many of what the table is of.
        launches: how many of its launches.
    """

    table: str
    sizes: tuple[float, ...]
    times: float = 1.0
    launches: float = 1.0


def node_seconds(spec: HardwareSpec) -> Callable[[fx.Node], float]:
    """A function that predicts the seconds of a call on ``spec``; calls that are alike are worked out once."""
    known: dict[Hashable, float] = {}

    def seconds(node: fx.Node) -> float:
        key = likeness_of(node)
        if key not in known:
            known[key] = _seconds(node, spec)
        return known[key]

    return seconds


def beside_seconds(graph: StepGraph, spec: HardwareSpec) -> float:
    """Seconds of a step beside those of its calls: its own, and what first calls of operators take."""
    return spec.step_seconds + spec.first_call_seconds * len({node.target for node in graph.calls})


def _seconds(node: fx.Node, spec: HardwareSpec) -> float:
    if is_scalar_function(node.target):
        return spec.python_seconds * spec.launch_factor
    if is_view(node) or waits(node):
        return spec.view_seconds * spec.launch_factor
    if (inside := rehearsal_of(node)) is not None:
        return sum(_seconds(call.node, spec) * call.count for call in inside.calls)
    effects = effects_of(node)
    if effects.collective:
        return spec.link_seconds + moved_bytes(node) / spec.link_bytes_per_second
    if effects.moves:
        return spec.launch_seconds + moved_bytes(node) / spec.host_bytes_per_second
    work, dtype = work_of(node), _dtype_of(node)
    for name in (f"{work.table}:{dtype}", *_stand_ins(node, work.table, dtype)):
        table = spec.tables.get(name)
        if table is not None and len(table.axes) == len(work.sizes):
            launch = table.least * work.launches
            seconds = table.at(*[max(size, 1.0) for size in work.sizes]) * work.times
            return max(seconds - launch, 0.0) * spec.amid_factor + launch * spec.launch_factor
    return _roofline(node, spec, dtype)


def _stand_ins(node: fx.Node, name: str, dtype: str) -> list[str]:
    """Tables to go by where an operator was not measured in this dtype, the nearest first."""
    target: Any = node.target
    if name.endswith(PATCHES):
        return [f"{name.removesuffix(PATCHES)}:{dtype}"]
    if name in ("mm", "bmm") or flops_of(node):
        return []
    kind = ELEMENTWISE if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags else COPY
    if name.startswith(LIST_OPERATORS):
        return [f"{LISTS}:f32"]
    if name.endswith(_PERMUTED):
        return [f"copy{_PERMUTED}:{dtype}", f"copy{_PERMUTED}:f32"]
    return [f"{name}:f32", f"{kind}:{dtype}", f"{kind}:f32"]


def _roofline(node: fx.Node, spec: HardwareSpec, dtype: str) -> float:
    moved = moved_bytes(node) / spec.memory_bytes_per_second
    name = _name_of(node)
    flops = flops_of(node)
    if flops:
        kinds = {"attention": spec.attention_flops, "convolution": spec.convolution_flops}
        rates = kinds.get(_kind_of(name), spec.matmul_flops)
        return spec.launch_seconds + max(flops / rates.get(dtype, rates["f32"]), moved)
    if name in _TRANSCENDENTAL:
        elements = sum(t.numel() for t in tensors_in(node.meta["val"]) if not has_symbolic_shape(t))
        return spec.launch_seconds + max(elements / spec.scalar_ops_per_second, moved)
    return spec.launch_seconds + moved


def work_of(node: fx.Node) -> Work:
    """What a call has to do, by which table."""
    name = _name_of(node)
    if name in PRODUCTS:
        first, second = [n.meta["val"] for n in node.args if isinstance(n, fx.Node)][-2:]
        if not has_symbolic_shape(first):
            batch = float(first.shape[0]) if first.dim() == 3 else float(MATRICES)
            sizes = (float(first.shape[-2]), float(first.shape[-1]), float(second.shape[-1]))
            return Work(PRODUCTS[name], sizes, batch / MATRICES)
    if flops := flops_of(node):
        kind = _kind_of(name)
        table = f"{kind}_backward" if "backward" in name else kind
        if kind != "attention":
            return Work(f"{table}{_windows_of(node)}", (float(flops),))
        heads = float(math.prod(tensors_in(node.all_input_nodes[0].meta["val"])[0].shape[:-2]))
        return Work(table, (flops / heads, heads))
    result = tensors_in(node.meta["val"])
    if name in ROW_OPERATORS and result and not has_symbolic_shape(result[0]):
        length = _row_length(node, result[0])
        return Work(name, (result[0].numel() / length, float(length)))
    count = _longest_list(node)
    if count:
        return Work(name, (moved_bytes(node) / count,), count / TENSORS, count / TENSORS)
    variant = _variant_of(node, name)
    moved = (
        result[0].nbytes if variant == _PERMUTED else moved_bytes(node)
    )  # a copy into memory counts like one to new memory
    return Work(f"{name}{variant}", (float(moved),))


def _windows_of(node: fx.Node) -> str:
    """Whether a convolution's windows lie side by side; its table is another one then."""
    weight, stride = argument(node, "weight"), argument(node, "stride")
    if not isinstance(weight, fx.Node) or not isinstance(stride, (list, tuple)):
        return ""
    window = list(weight.meta["val"].shape[2:])
    return PATCHES if list(stride) == window and math.prod(window) > 1 else ""


def _kind_of(name: str) -> str:
    """``attention`` or ``convolution``; for other operators their name."""
    if any(word in name for word in _ATTENTION):
        return "attention"
    return "convolution" if "conv" in name else name


def _variant_of(node: fx.Node, name: str) -> str:
    """Reductions over outer dimensions and copies between different layouts have tables of their own."""
    operands = [t for n in node.all_input_nodes[:1] for t in tensors_in(n.meta["val"])]
    result = tensors_in(node.meta["val"])
    if not operands or not result or has_symbolic_shape(operands[0]):
        return ""
    given = operands[0]
    if name in ("sum", "mean") and len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) and given.dim() > 1:
        reduced = {int(d) % given.dim() for d in node.args[1] if isinstance(d, int)}
        return "" if given.dim() - 1 in reduced or not reduced else " outer"
    if name in ("clone", "copy", "_to_copy") and given.dim() > 1:
        source = node.args[1] if name == "copy" and len(node.args) > 1 else None
        other = source.meta["val"] if isinstance(source, fx.Node) else given
        return "" if _order_of(other) == _order_of(result[0]) else _PERMUTED
    return ""


def _row_length(node: fx.Node, result: Tensor) -> int:
    """Elements of a row, from the first argument that is a dimension or the sizes of the last ones."""
    told = next((a for a in node.args if isinstance(a, (int, list, tuple)) and not isinstance(a, bool)), -1)
    shape = list(told) if isinstance(told, (list, tuple)) else list(result.shape[told : told + 1 or None])
    return max(math.prod(shape), 1)


def _order_of(tensor: Tensor) -> list[int]:
    """Dimensions longer than 1 by falling stride."""
    strides = tensor.stride()
    long = [d for d, size in enumerate(tensor.shape) if size > 1]
    return sorted(long, key=lambda d: (-strides[d], d))


def _longest_list(node: fx.Node) -> int:
    if not _name_of(node).startswith(LIST_OPERATORS):
        return 0
    lists = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (list, tuple))]
    return max((len(a) for a in lists if any(isinstance(x, fx.Node) for x in a)), default=0)


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", "")
    return target._schema.name.partition("::")[2].rstrip("_")


def _dtype_of(node: fx.Node) -> str:
    result = tensors_in(node.meta["val"]) or [t for n in node.all_input_nodes for t in tensors_in(n.meta["val"])]
    return short_dtype(result[0].dtype) if result else "f32"


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a product, attention or convolution, by torch's own count; 0 for everything else."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    count = flop_registry.get(_COUNTED_AS.get(packet, packet)) if packet is not None else None
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


def _tensors(node: fx.Node) -> list[Tensor]:
    return [t for n in (node, *node.all_input_nodes) for t in tensors_in(n.meta["val"])]
