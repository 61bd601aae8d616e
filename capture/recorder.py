"""Records what a function computes on fake tensors: one graph node for each operator that reaches a backend.

Most calls have plain values and tensors of fixed shapes as arguments. Those are recorded here, in a few steps; every other call
(real tensors, shapes that depend on data, composite operators) takes torch's own way, which :class:`Recorder` extends.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import CaptureError
from ..graph import tensors_in
from ..torch_compat import (
    FakeTensor,
    FakeTensorMode,
    GraphTracer,
    RecordingMode,
    constant_of,
    differing_flags,
    forget_constant,
    has_symbolic_shape,
    is_composite,
    numeric_flags,
    pytree,
    track_fixed_shape,
    track_tensor_tree,
    tracked_tensor,
)
from .context import user_source_line
from .fake_results import FakeResults, metadata_of, snapshot_of
from .known_values import SYMBOLS, KnownValues, written_tensors

_DEVICE_OF = torch.ops.prim.device.default
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


_SYMBOL = "symbol"


class _NotPlain(Exception):
    """An argument is neither a plain value nor a symbol nor a recorded tensor of fixed shape."""


class Recorder(RecordingMode):
    """A dispatch mode that adds a node to ``graph`` for each operator that runs within it.

    Args:
        mode: the fake mode of the tensors; it has to be active around this one.
        label: called with each new node, before its operator runs.

    Attributes:
        graph: what was recorded.
        known: values that depend on nothing but constants.
        made: every tensor that the recorded code made, weakly, with the source line that made it.
        sparse: the first operator that made a tensor which is not strided, with its source line, or None.
    """

    def __init__(self, mode: FakeTensorMode, label: Callable[[fx.Node], None]) -> None:
        self._results = FakeResults(mode)
        self.known = KnownValues()
        self.sparse: tuple[Any, str | None] | None = None
        self.made: list[tuple[weakref.ref[Tensor], str | None]] = []
        self._label = label
        self._flags = numeric_flags()
        self._tracer = GraphTracer(label)
        super().__init__(self._tracer, "fake")

    @property
    def graph(self) -> fx.Graph:
        return self._tracer.graph

    def add_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Adds a placeholder for each of these fake tensors of fixed shape."""
        for position, tensor in enumerate(tensors):
            node = self.graph.placeholder(f"input_{position}")
            node.meta["val"] = snapshot_of(tensor)
            track_fixed_shape(tensor, node, self._tracer)

    def finish(self, outputs: Sequence[Any]) -> nn.Module:
        """Adds the output node. Returns the module that holds the real tensors that the graph reads by name."""
        self.graph.output([self._tracer.operand(value) for value in outputs])
        _drop_unread_symbols(self.graph)
        return self._tracer.root

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        if (flags := numeric_flags()) != self._flags:
            raise CaptureError(
                f"{', '.join(differing_flags(self._flags, flags))} is another here than before the step: the graph's operators "
                "would run without the change.",
                remedy="set it before the step and leave it; give dtypes to the functions that make tensors",
            )
        if not _is_direct(func):
            return self._follow(func, types, args, kwargs)
        operands: list[FakeTensor] = []
        arguments: list[Hashable] = []
        try:
            node_args = tuple([self._operand(a, operands, arguments) for a in args])
            arguments += kwargs
            node_kwargs = {name: self._operand(a, operands, arguments) for name, a in kwargs.items()}
        except _NotPlain:
            return self._follow(func, types, args, kwargs)

        has_symbols = _SYMBOL in arguments
        real_arguments = None if has_symbols else self.known.arguments_of(func, args, kwargs, operands)
        if func._schema.is_mutable:
            self.known.forget_written(func, args, kwargs)
        node = self._new_node(func, node_args, node_kwargs, _name_of(func))
        out, value = self._results.call(func, args, kwargs, operands, None if has_symbols else arguments)
        self._track(out, value, node)
        self._note(func, out, operands, real_arguments, node.meta["source"])
        return out

    def _follow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Torch's own way, which takes everything."""
        leaves = pytree.tree_leaves((args, kwargs))
        operands = [a for a in leaves if isinstance(a, Tensor)]
        has_symbols = any(isinstance(a, SYMBOLS) for a in leaves)
        real_arguments = None if has_symbols else self.known.arguments_of(func, args, kwargs, operands)
        if real_arguments is not None and operands and not _returns_tensors(func):
            return self.known.compute(func, real_arguments)
        if has_symbols:  # the result depends on a hyperparameter or on data, however constant the tensors are
            self._forget_constants(operands)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            if any(constant_of(t) is None for t in operands):  # torch 2.13 overlooks tensors in lists
                self._forget_constants(written_tensors(func, args, kwargs))
            self.known.forget_written(func, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented:
            self._note(func, out, operands, real_arguments, user_source_line())
        return out

    def _forget_constants(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            forget_constant(tensor, self._tracer)

    def _operand(self, value: Any, operands: list[FakeTensor], arguments: list[Hashable]) -> Any:
        """The node that stands for a value, or the value; adds tensors to ``operands``, and what they are to ``arguments``."""
        kind = type(value)
        if kind is FakeTensor:
            tracked = tracked_tensor(value, self._tracer)
            if (
                tracked is None
                or tracked.constant is not None
                or value.constant is not None
                or has_symbolic_shape(value)
                or value.layout is not torch.strided
            ):
                raise _NotPlain
            operands.append(value)
            arguments.append(metadata_of(value))
            return tracked.proxy.node
        if kind in _PLAIN:
            arguments.append((kind, value))
            return value
        if kind in SYMBOLS:
            arguments.append(_SYMBOL)
            return self._tracer.operand(value)
        if kind is list or kind is tuple:
            arguments.append((kind, len(value)))
            return kind([self._operand(v, operands, arguments) for v in value])
        raise _NotPlain

    def _new_node(self, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
        node = self.graph.create_node("call_function", target, name=name)
        node.args, node.kwargs = (
            args,
            kwargs,
        )  # apart: torch 2.13 walks arguments that create_node is given, for a warning
        self._label(node)
        return node

    def _track(self, out: Any, value: Any, node: fx.Node) -> None:
        """Makes ``node`` stand for the result ``out``, and notes ``value``, the same outside of autograd."""
        tensors = out if isinstance(out, (list, tuple)) else (out,)
        if not all(type(t) is FakeTensor and not has_symbolic_shape(t) for t in tensors):
            track_tensor_tree(out, fx.Proxy(node, self._tracer), constant=None, tracer=self._tracer)
            return
        node.meta["val"] = value
        if tensors is not out:
            track_fixed_shape(out, node, self._tracer)
            return
        for position, (tensor, part) in enumerate(zip(out, value, strict=True)):
            item = self._new_node(operator.getitem, (node, position), {}, "getitem")
            item.meta["val"] = part
            track_fixed_shape(tensor, item, self._tracer)

    def _note(self, func: Any, out: Any, operands: Sequence[Tensor], real_arguments: Any, source: str | None) -> None:
        results = tensors_in(out)
        if self.sparse is None and any(t.layout is not torch.strided for t in results):
            self.sparse = (func, source)
        self.made += [(weakref.ref(t), source) for t in results if not any(t is o for o in operands)]
        if real_arguments is not None:
            self.known.learn(func, results, real_arguments)


@functools.cache
def _is_direct(func: Any) -> bool:
    """Whether an operator is recorded as it is and its result is no value that Python would read."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace in ("aten", "stepgraph")
        and not is_composite(func)
        and torch.Tag.data_dependent_output not in func.tags
        and func not in (torch.ops.aten.lift_fresh.default, torch.ops.aten.is_nonzero.default)
    )


@functools.cache
def _name_of(func: Any) -> str:
    return str(func._schema.name.split("::")[1])


@functools.cache
def _returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(r.type) for r in func._schema.returns)


def _drop_unread_symbols(graph: fx.Graph) -> None:
    """Removes arithmetic on numbers that no operator takes; reading a number from a tensor stays."""
    for node in reversed(list(graph.nodes)):
        if node.users or not isinstance(node.meta.get("val"), SYMBOLS):
            continue
        reads_shape = isinstance(node.target, torch._ops.OpOverload) and node.target.__name__.startswith("sym_")
        if reads_shape or all(isinstance(a.meta.get("val"), SYMBOLS) for a in node.all_input_nodes):
            graph.erase_node(node)
