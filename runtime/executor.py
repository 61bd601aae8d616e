"""Runs a step graph node by node, as generated Python that frees each value after its last use."""

from __future__ import annotations

import contextlib
import linecache
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Protocol

import torch
from torch import fx

from ..device import autocast_off
from ..errors import CaptureError
from ..graph import StepGraph, effects_of, last_uses, overwritten_operands, writing_variant
from ..graph.ops import KERNELS
from ..planner import stage_of
from ..torch_compat import grad_mode_below_autograd

_numbers = count()
# What runs in the place of an operator without a way through the dispatcher.
_DIRECT: dict[Any, Callable[..., Any]] = {**KERNELS, torch.ops.aten._local_scalar_dense.default: torch.Tensor.item}


class Watch(Protocol):
    """What is told how a step goes on."""

    def begins(self, graph: StepGraph, inputs: Sequence[Any]) -> None:
        """A graph is about to run on ``inputs``."""

    def at(self, stage: str) -> None:
        """A stage begins; ``""``: the last ended."""

    def made(self, position: int, value: Any) -> None:
        """A call returned, and nothing that it read was freed yet."""


_watches: list[Watch] = []


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within the context, executors tell ``watch`` how the step goes on."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.pop()


class Executor:
    """Executes the nodes in the graph's order with the operators that eager would call, in eager's grad mode.

    Elementwise results are written over operands that nothing reads any more, where those are laid out alike.

    The generated function takes the list of inputs and empties it, so that no reference but the caller's keeps an input
    alive. After a gate that is not 0, nothing runs and outputs that would have been computed there are None. It is generated
    when it first runs.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        number = next(_numbers)
        self._name, self._watched_name = f"<stepgraph step {number}>", f"<stepgraph step {number}, watched>"

    @cached_property
    def _generated(self) -> tuple[str, dict[str, Any]]:
        return _generate(self._graph)

    @property
    def source(self) -> str:
        """The generated Python."""
        return self._generated[0]

    @cached_property
    def _run(self) -> Callable[[list[Any]], list[Any]]:
        return _compiled(self.source, self._name, self._generated[1])

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Runs the step on ``inputs`` (one for each placeholder, emptied) and returns the outputs."""
        run = self._run if not _watches else self._watched(_watches[-1])
        with torch.no_grad(), autocast_off():
            try:
                return run(inputs)
            except Exception as error:
                self._tell_where(error)
                raise

    def _watched(self, watch: Watch) -> Callable[[list[Any]], list[Any]]:
        """The same program, which tells ``watch`` where it is."""
        source, namespace = _generate(self._graph, is_watched=True)
        run = _compiled(source, self._watched_name, {**namespace, "watch": watch})

        def run_to_the_end(inputs: list[Any]) -> list[Any]:
            watch.begins(self._graph, inputs)
            outputs = run(inputs)
            watch.at("")
            return outputs

        return run_to_the_end

    def _tell_where(self, error: Exception) -> None:
        """Notes the failing node in the error: as ``failed_node``, and in words (Python 3.11 and newer)."""
        ours = (self._name, self._watched_name)
        frame = next((f for f in traceback.extract_tb(error.__traceback__) if f.filename in ours), None)
        if frame is None or not frame.line:
            return
        name = frame.line.partition("  # ")[2]
        node = next((n for n in self._graph.calls if n.meta["key"].name == name), None)
        error.failed_node = node  # type: ignore[attr-defined]
        if node is not None and hasattr(error, "add_note"):
            error.add_note(f"in the compiled step, at {name}")


def _compiled(source: str, name: str, namespace: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
    run: Callable[[list[Any]], list[Any]] = namespace["run"]
    return run


def first_run_error(error: Exception) -> CaptureError:
    """What to raise instead of ``error``, which ended the first run of a capture."""
    node: fx.Node | None = getattr(error, "failed_node", None)
    what = f"the first run of the step failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return CaptureError(
        what,
        module_path=node.meta["key"].module if node is not None else None,
        source_line=node.meta.get("source") if node is not None else None,
        remedy="check that the same batch works in eager: dtypes (a float64 batch for a float32 model?) and index ranges show "
        "only with real values. Where it does work, an operator before this one lays its result out otherwise than torch's "
        "fake tensors say, and .contiguous() on what it reads helps. The original error is chained below",
    )


def _generate(graph: StepGraph, *, is_watched: bool = False) -> tuple[str, dict[str, Any]]:
    namespace: dict[str, Any] = {"graded": grad_mode_below_autograd}
    names: dict[fx.Node, str] = {}
    constants = _Constants(namespace)
    freed_after = last_uses(graph)
    overwritten = overwritten_operands(graph)
    placeholders = graph.placeholders
    for i, node in enumerate(placeholders):
        names[node] = f"i{i}"
    lines = ["def run(inputs):"]
    if placeholders:
        lines += [f"    {', '.join(names[n] for n in placeholders)}, = inputs", "    inputs.clear()"]
    unused = [names[n] for n in placeholders if not n.users]
    lines += [f"    del {name}" for name in unused]
    base = "    "
    behind_gates: list[set[fx.Node]] = []
    is_graded, stage = False, ""
    for i, node in enumerate(graph.calls):
        if node.meta["grad_mode"] != is_graded:
            is_graded = not is_graded
            lines += [f"{base}with graded():"] if is_graded else []
        indent = base + "    " * is_graded
        if is_watched and stage_of(node) != stage:
            stage = stage_of(node)
            lines.append(f"{indent}watch.at({stage!r})")
        names[node] = f"v{i}"
        args = [_literal(a, names, constants) for a in node.args]
        args += [f"{k}={_literal(v, names, constants)}" for k, v in node.kwargs.items()]
        target = _DIRECT.get(node.target, node.target)
        if node in overwritten and (variant := writing_variant(node.target)) is not None:
            target = variant.overload
            args += [f"{variant.out}={names[overwritten[node]]}"] if variant.out else []
        function = constants.add(target, "f")
        lines.append(f"{indent}{names[node]} = {function}({', '.join(args)})  # {node.meta['key'].name}")
        if is_watched:
            lines.append(f"{indent}watch.made({i}, {names[node]})")
        for behind in behind_gates:
            behind.add(node)
        freed = [names[n] for n in freed_after[node]]
        if freed:
            lines.append(f"{indent}del {', '.join(freed)}")
        if effects_of(node).control:
            lines.append(f"{indent}if {names[node]}.item() == 0:")
            base += "    "
            behind_gates.append(set())
    if behind_gates:
        lines.append(f"{base}pass")
    for behind in reversed(behind_gates):
        base = base.removesuffix("    ")
        computed = [v for v in graph.output_values if isinstance(v, fx.Node) and v in behind]
        if computed:
            lines.append(f"{base}else:")
            lines += [f"{base}    {names[v]} = None" for v in computed]
    returned = ", ".join(_literal(v, names, constants) for v in graph.output_values)
    lines.append(f"    return [{returned}]")
    return "\n".join(lines) + "\n", namespace


class _Constants:
    """Functions and argument values that have no literal form, by identity, as globals of the generated code."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._names: dict[int, str] = {}

    def add(self, value: Any, prefix: str) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = name = f"{prefix}{len(self._names)}"
            self._namespace[name] = value
        return self._names[id(value)]


def _literal(value: Any, names: dict[fx.Node, str], constants: _Constants) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list):
        return "[" + ", ".join(_literal(v, names, constants) for v in value) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_literal(v, names, constants) + ", " for v in value) + ")"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return constants.add(value, "c")
