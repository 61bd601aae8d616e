"""The update as tensor arithmetic: what is computed in Python numbers comes first, and reaches tensors as one vector."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from ..graph import InputRole, Phase, StepGraph, argument, effects_of, is_scalar_function
from .base import Pass, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class HostScalars(Pass):
    """Fast tier. Makes an update that was traced tensor by tensor fit for a compiler.

    A for-loop optimizer computes in Python numbers what depends on hyperparameters and step counts (bias corrections), and
    passes them to operators. Those computations are moved to the beginning of the update, where Python does them as in eager,
    counting steps ahead; the results are packed into one vector, and each operator reads its entry as a 0-dim tensor. So
    nothing of a schedule is compiled in, and a compiler sees tensors only. ``a + alpha * b`` and the like are spelled out.

    Results differ from eager's by rounding: a scalar is rounded to the tensor's dtype before the operation, spelled-out
    operators round once more, and so does a quotient by a number, which becomes a product with its reciprocal. Nothing is
    changed where an operator takes a number in a way that is not known here.
    """

    name: ClassVar[str] = "host_scalars"
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.UPDATE})

    def run(self, graph: StepGraph) -> PassResult:
        update = [n for n in graph.calls if n.meta["phase"] is Phase.UPDATE]
        counting = _counting(graph, update)
        host = _host_nodes(graph, update, counting)
        readers = [n for n in update if n not in host and any(map(_is_number, n.all_input_nodes))]
        if not host or not all(map(_can_take_tensors, readers)):
            return PassResult(False)
        host_order = [n for n in update if n in host]
        anchor = next(n for n in update if n not in host)
        for node in host_order:
            anchor.prepend(node)
        with graph.graph.inserting_before(anchor):
            host_order = _counted_in_python(graph, host_order, counting)
            _merge(graph, host_order)
            entries = _packed(graph, readers)
        for node in readers:
            _take_tensors(graph, node, entries)
        return PassResult(True)


def _counting(graph: StepGraph, update: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Calls that advance a count of the state on the CPU by a whole number, exactly in every dtype, and what they advance."""
    specs = zip(graph.placeholders, graph.inputs, strict=True)
    counters = {n for n, s in specs if s.role is InputRole.STATE and n.meta["val"].ndim == 0 and _on_cpu(n)}
    found: dict[fx.Node, fx.Node] = {}
    for node in update:
        if node.target is not aten.add_.Tensor or node.kwargs or not isinstance(node.args[1], int):
            continue
        operand = node.args[0]
        if isinstance(operand, fx.Node) and (operand in counters or operand in found):
            found[node] = operand
    return found


_ITEM = aten._local_scalar_dense.default


def _host_nodes(graph: StepGraph, update: list[fx.Node], counting: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Calls that give Python numbers and depend on hyperparameters and counts alone."""
    specs = zip(graph.placeholders, graph.inputs, strict=True)
    known = {n for n, s in specs if s.role is InputRole.HYPER} | counting.keys() | set(counting.values())
    host: set[fx.Node] = set()
    for node in update:
        gives_a_number = is_scalar_function(node.target) or node.target is _ITEM
        if gives_a_number and all(n in known or n in host for n in node.all_input_nodes):
            host.add(node)
    return host


def _counted_in_python(graph: StepGraph, host: list[fx.Node], counting: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Lets Python count ahead: what it read from an advanced count, it computes from the count before.

    Returns the computations that are left, in order.
    """
    before: dict[fx.Node, fx.Node] = {}
    order: list[fx.Node] = []

    def value_of(count: fx.Node) -> fx.Node:
        if count not in before:
            module = count.meta["key"].module if count.op == "call_function" else "optimizer"
            if count in counting:
                operands = (value_of(counting[count]), count.args[1])
                before[count] = _call(graph, operator.add, operands, module)
            else:
                before[count] = _call(graph, _ITEM, (count,), module)
            order.append(before[count])
        return before[count]

    for node in host:
        if node.target is _ITEM and node.args[0] in counting:
            with graph.graph.inserting_before(node):
                value = value_of(node.args[0])  # type: ignore[arg-type]
            node.replace_all_uses_with(value)
            graph.graph.erase_node(node)
        else:
            order.append(node)
    return order


def _merge(graph: StepGraph, host: list[fx.Node]) -> None:
    """Removes computations of the same number from the same numbers; a for-loop repeats them for each parameter."""
    first: dict[Any, fx.Node] = {}
    for node in host:
        if is_scalar_function(node.target) and not node.kwargs:
            known = first.setdefault((node.target, node.args), node)
            if known is not node:
                node.replace_all_uses_with(known)
                graph.graph.erase_node(node)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and not isinstance(node.meta["val"], (torch.Tensor, list, tuple, type(None)))


def _on_cpu(node: fx.Node) -> bool:
    return bool(node.meta["val"].device.type == "cpu")


def _call(graph: StepGraph, target: Any, args: tuple[Any, ...], module: str) -> fx.Node:
    return graph.add_call(target, args, module=module, phase=Phase.UPDATE)


class _Form(NamedTuple):
    """A number as an operator needs it."""

    number: fx.Node
    dtype: torch.dtype
    is_divisor: bool


Entries = dict[_Form, tuple[fx.Node, int]]


def _packed(graph: StepGraph, readers: list[fx.Node]) -> Entries:
    """One vector for each dtype that numbers are needed in, and one of reciprocals; the vector and position of each number."""
    wanted = dict.fromkeys(_form_of(x, n) for n in readers for x in n.all_input_nodes if _is_number(x))
    entries: Entries = {}
    for dtype, is_divisor in dict.fromkeys((form.dtype, form.is_divisor) for form in wanted):
        forms = [form for form in wanted if (form.dtype, form.is_divisor) == (dtype, is_divisor)]
        numbers = [form.number for form in forms]
        vector = _call(graph, torch.ops.stepgraph.pack.default, (numbers, dtype), "optimizer")
        if is_divisor:
            vector = _call(graph, torch.ops.stepgraph.reciprocals.default, (vector,), "optimizer")
        entries.update((form, (vector, position)) for position, form in enumerate(forms))
    return entries


def _form_of(number: fx.Node, reader: fx.Node) -> _Form:
    return _Form(number, _dtype_for(reader), _divides_by(reader, number))


def _divides_by(reader: fx.Node, number: fx.Node) -> bool:
    """Whether an operator divides by a number: it then multiplies by the reciprocal, in a fraction of the time."""
    is_division = reader.target in (aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar)
    return is_division and argument(reader, "other") is number


def _dtype_for(reader: fx.Node) -> torch.dtype:
    """Dtype in which an operator takes a number: its own, and at least single precision."""
    dtype: torch.dtype = reader.meta["val"].dtype
    return torch.float64 if dtype is torch.float64 else torch.float32


Spelling = Callable[[Callable[..., fx.Node], "dict[str, Any]"], fx.Node]


def _scaled(call: Callable[..., fx.Node], value: Any, factor: Any) -> Any:
    return call(aten.mul.Tensor, value, factor) if isinstance(factor, fx.Node) or factor != 1 else value


def _add(call: Callable[..., fx.Node], given: dict[str, Any]) -> fx.Node:
    return call(aten.add.Tensor, given["self"], _scaled(call, given["other"], given["alpha"]))


def _sub(call: Callable[..., fx.Node], given: dict[str, Any]) -> fx.Node:
    return call(aten.sub.Tensor, given["self"], _scaled(call, given["other"], given["alpha"]))


def _addcmul(call: Callable[..., fx.Node], given: dict[str, Any]) -> fx.Node:
    product = call(aten.mul.Tensor, given["tensor1"], given["tensor2"])
    return call(aten.add.Tensor, given["self"], call(aten.mul.Tensor, product, given["value"]))


def _addcdiv(call: Callable[..., fx.Node], given: dict[str, Any]) -> fx.Node:
    quotient = call(aten.div.Tensor, given["tensor1"], given["tensor2"])
    return call(aten.add.Tensor, given["self"], call(aten.mul.Tensor, quotient, given["value"]))


def _lerp(call: Callable[..., fx.Node], given: dict[str, Any]) -> fx.Node:
    difference = call(aten.sub.Tensor, given["end"], given["self"])
    return call(aten.add.Tensor, given["self"], call(aten.mul.Tensor, difference, given["weight"]))


def _binary(target: Any) -> Spelling:
    return lambda call, given: call(target, given["self"], given["other"])


def _power(call: Callable[..., fx.Node], given: dict[str, Any]) -> fx.Node:
    return call(aten.pow.Tensor_Tensor, given["self"], given["exponent"])


def _fill(call: Callable[..., fx.Node], given: dict[str, Any]) -> fx.Node:
    return call(aten.expand.default, given["value"], list(given["self"].meta["val"].shape))


# How each operator is written with a 0-dim tensor in the place of a number; in-place forms then copy the result.
_SPELLINGS: dict[str, Spelling] = {
    "add": _add,
    "sub": _sub,
    "mul": _binary(aten.mul.Tensor),
    "div": _binary(aten.div.Tensor),
    "maximum": _binary(aten.maximum.default),
    "pow": _power,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "fill": _fill,
}


def _can_take_tensors(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return _stem(node.target) in _SPELLINGS and isinstance(node.args[0], fx.Node) and not _is_number(node.args[0])


def _take_tensors(graph: StepGraph, node: fx.Node, entries: Entries) -> None:
    module = node.meta["key"].module

    def call(target: Any, *args: Any) -> fx.Node:
        return _call(graph, target, args, module)

    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    with graph.graph.inserting_before(node):
        numbers = dict.fromkeys(n for n in node.all_input_nodes if _is_number(n))
        forms = {n: _form_of(n, node) for n in numbers}
        tensors = {n: call(aten.select.int, entries[form][0], 0, entries[form][1]) for n, form in forms.items()}
        given = {a.name: a.default_value for a in schema.arguments}
        given |= dict(zip(given, node.args, strict=False)) | node.kwargs
        given = {name: fx.map_arg(v, lambda n: tensors.get(n, n)) for name, v in given.items()}
        divides = any(form.is_divisor for form in forms.values())
        result = _SPELLINGS["mul" if divides else _stem(node.target)](call, given)
        if effects_of(node).writes:
            result = call(aten.copy_.default, node.args[0], result)
            result.meta["trace_index"] = node.meta["trace_index"]
        elif result.meta["val"].dtype != node.meta["val"].dtype:
            result = call(torch.ops.prims.convert_element_type.default, result, node.meta["val"].dtype)
    node.replace_all_uses_with(result)
    graph.graph.erase_node(node)


def _stem(target: torch._ops.OpOverload) -> str:
    return target._schema.name.removeprefix("aten::").rstrip("_")
