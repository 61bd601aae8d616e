"""Prints step graphs for people: grouped by phase and module, repeated blocks once, no line longer than the page."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import fx

from ..errors import ConfigError
from ..graph import (
    InputRole,
    OutputRole,
    Phase,
    StepGraph,
    describe_type,
    effects_of,
    family_of,
    format_operand,
    storage_bytes,
    target_name,
    type_of,
)

_CAPTURED = (Phase.FORWARD, Phase.BACKWARD)
_MANY_OPERANDS = 6
_MANY_LINES = 12


@dataclass(frozen=True)
class Selection:
    """Which calls to print.

    Attributes:
        phase: only this phase.
        module: only modules, parameters or stages whose path is this or begins with it. A parameter selects what norm, clip
            and update do with its gradient and its state too.
        around: only the neighbourhood of the call with this number (``%36``), key (``norm/mul#0@norm``) or node name.
        radius: how many calls before and after that one.
    """

    phase: Phase | None = None
    module: str | None = None
    around: str | None = None
    radius: int = 6

    def __str__(self) -> str:
        asked = {"phase": self.phase, "module": self.module, "around": self.around}
        return ", ".join(f"{name} {str(value)!r}" for name, value in asked.items() if value is not None)


class Dump:
    """The text of one graph.

    Args:
        graph: as captured, or rewritten.
        width: longest line, in characters.
        folds: whether a block that repeats the one before it is printed as one line.
    """

    def __init__(self, graph: StepGraph, *, width: int = 100, folds: bool = True) -> None:
        self.graph = graph
        self.width = width
        self.folds = folds
        self.names = {n: f"%{i}" for i, n in enumerate(n for n in graph.graph.nodes if n.op != "output")}
        self._specs = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self._marked: dict[fx.Node, str] = {}
        self._stages = self._named_stages()

    def text(self, selection: Selection = Selection()) -> str:
        """Inputs, calls by phase and module, and outputs; with a selection only the calls.

        Raises:
            ConfigError: nothing is selected.
        """
        calls = self.selected(selection)
        self._marked = self._of_parameters(selection.module) if selection.module else {}
        if selection.around is not None:
            return "\n".join(self._neighbourhood(self._find(selection.around), calls))
        lines = list(self._legend(calls)) if selection.phase or selection.module else list(self._inputs())
        for phase, group in groupby(calls, key=lambda n: n.meta["phase"]):
            nodes = list(group)
            lines.append(f"{phase}: {len(nodes)} operators")
            lines += self._blocks(nodes)
        if not (selection.phase or selection.module):
            lines += self._outputs()
        return "\n".join(lines)

    def records(self, selection: Selection = Selection()) -> list[dict[str, Any]]:
        """The selected calls as plain data."""
        return [self._record(node) for node in self.selected(selection)]

    def selected(self, selection: Selection) -> list[fx.Node]:
        """The calls that a selection leaves, in order."""
        calls = self.graph.calls
        if selection.phase is not None:
            calls = [n for n in calls if n.meta["phase"] is selection.phase]
        if (module := selection.module) is not None:
            values = self._of_parameters(module)
            calls = [
                n
                for n in calls
                if _is_within(n.meta["key"].module, module)
                or (n.meta["phase"] not in _CAPTURED and not values.keys().isdisjoint(n.all_input_nodes))
            ]
        if selection.around is not None:
            position = self.graph.calls.index(self._find(selection.around))
            near = set(self.graph.calls[max(0, position - selection.radius) : position + selection.radius + 1])
            calls = [n for n in calls if n in near]
        if not calls:
            modules = dict.fromkeys(n.meta["key"].module.split(".")[0] or "(root)" for n in self.graph.calls)
            raise ConfigError(
                f"nothing to print: {selection} selects no operator. Phases are "
                f"{', '.join(self.graph.op_counts_by_phase())}; modules begin with {', '.join(list(modules)[:12])}"
            )
        return calls

    def _of_parameters(self, module: str) -> dict[fx.Node, str]:
        """Parameters below ``module`` with their state, and the gradients that update them; with what they are."""
        owned = {n: str(s) for n, s in self._specs.items() if s.role in (InputRole.PARAM, InputRole.STATE)}
        owned = {n: what for n, what in owned.items() if _is_within(self._specs[n].key.partition("/")[0], module)}
        grads: dict[fx.Node, str] = {}
        for node in self.graph.calls:
            if node.meta["phase"] is not Phase.UPDATE:
                continue
            lists = [a for a in node.args if isinstance(a, (list, tuple))]
            parallel = zip(*(v for v in lists if len(v) == len(lists[0])), strict=True) if lists else ()
            for values in (*parallel, node.args):
                nodes = [v for v in values if isinstance(v, fx.Node)]
                if found := [n for n in nodes if n in owned]:
                    what = f"gradient of {self._specs[found[0]].key.partition('/')[0]}"
                    grads.update((n, what) for n in nodes if n.op == "call_function" and n.meta["phase"] in _CAPTURED)
        return owned | grads

    def _named_stages(self) -> dict[fx.Node, str]:
        """What the calls between backward and update are for."""
        roles = {
            OutputRole.LOSS: "the loss",
            OutputRole.NORM: "the norm",
            OutputRole.CLIP_FACTOR: "the factor of clipping",
        }
        stages = {}
        for node in self.graph.calls:
            if node.meta["phase"] is not Phase.NORM:
                continue
            if effects_of(node).control:
                stages[node] = "ends the step here unless 0"
            elif effects_of(node).writes:
                stages[node] = "clips the gradients"
            elif family_of(node.target) == "_foreach_norm":
                stages[node] = "a norm for each gradient"
            elif family_of(node.target) == "nonfinite_code":
                stages[node] = "0 where all is finite"
        for role, what in roles.items():
            if isinstance(node := self.graph.output_of(role), fx.Node):
                stages[node] = what
        return stages

    def _legend(self, calls: list[fx.Node]) -> Iterator[str]:
        """What the values are that a selection's lines name and do not show, where it is by parameters."""
        if not self._marked or all(n.meta["phase"] in _CAPTURED for n in calls):
            return
        named: dict[fx.Node, str] = {}
        for operand in (n for call in calls for n in call.all_input_nodes if n not in calls):
            spec = self._specs.get(operand.all_input_nodes[0]) if operand.all_input_nodes else None
            if operand in self._stages and operand not in self._marked:
                named[operand] = self._stages[operand]
            elif spec is not None and spec.role is InputRole.HYPER:
                named[operand] = str(spec)
        yield "values"
        yield from self._shortened([self._meaning(n, what) for n, what in self._marked.items()])
        yield from (self._meaning(n, what) for n, what in named.items())

    def _meaning(self, node: fx.Node, what: str) -> str:
        return f"    {self.names[node]}  {_type(node)}  {what}"

    def _find(self, name: str) -> fx.Node:
        for node in self.graph.calls:
            if name in (self.names[node], node.name, node.meta["key"].name):
                return node
        raise ConfigError(
            f"no operator is called {name!r}: give a number that dump prints (%36), a key (norm/mul#0@norm) or a node name"
        )

    def _inputs(self) -> Iterator[str]:
        yield f"inputs: {len(self.graph.inputs)}"
        for role, group in groupby(self._specs, key=lambda n: self._specs[n].role):
            nodes = list(group)
            yield f"  {role}"
            yield from self._shortened([self._input_line(n) for n in nodes])

    def _input_line(self, node: fx.Node) -> str:
        spec = self._specs[node]
        return f"    {self.names[node]}  {_type(node)}  {' = '.join((spec.key, *spec.aliases))}"

    def _outputs(self) -> Iterator[str]:
        yield f"outputs: {len(self.graph.outputs)}"
        pairs = zip(self.graph.output_values, self.graph.outputs, strict=True)
        yield from self._shortened([f"  {format_operand(value, self.names)}  {spec}" for value, spec in pairs])

    def _shortened(self, lines: list[str]) -> list[str]:
        if not self.folds or len(lines) <= _MANY_LINES:
            return lines
        return [*lines[:8], f"    ... {len(lines) - 8} more"]

    def _blocks(self, nodes: list[fx.Node]) -> Iterator[str]:
        blocks = [(key, list(group)) for key, group in groupby(nodes, key=_block_of)]
        position = 0
        while position < len(blocks):
            key, block = blocks[position]
            yield from self._modules(block)
            repeats = position + 1
            while self.folds and repeats < len(blocks) and _is_repetition(blocks[repeats], blocks[position]):
                repeats += 1
            if repeats > position + 1:
                yield from self._folded([k for k, _ in blocks[position + 1 : repeats]], key, len(block))
            position = repeats

    def _folded(self, keys: list[str], model: str, count: int) -> Iterator[str]:
        names = keys if len(keys) <= 2 else [keys[0], "...", keys[-1]]
        each = f"each {count} operators" if len(keys) > 1 else f"{count} operators"
        yield f"  {', '.join(names)}"
        yield f"    {each}, as in {model}"

    def _modules(self, nodes: list[fx.Node]) -> Iterator[str]:
        for module, group in groupby(nodes, key=lambda n: n.meta["key"].module):
            yield f"  {module or '(root)'}"
            yield from self._items(list(group))

    def _line(self, node: fx.Node, mark: str = "    ") -> Iterator[str]:
        shown = self._positions(node)
        operands = [self._operand(a, shown) for a in node.args]
        operands += [f"{name}={self._operand(a, shown)}" for name, a in sorted(node.kwargs.items())]
        kind = _type(node)
        size = f"  {_bytes(storage_bytes(node))}" if kind != "-" else ""
        region = f"  region {node.meta['region']}" if node.meta.get("region") is not None else ""
        head = f"{mark}{self.names[node]} = {_short(node)}("
        stage = f"  # {self._stages[node]}" if node in self._stages else ""
        yield from _wrapped(head, operands, f"{kind}{size}{region}{stage}", self.width)

    def _positions(self, node: fx.Node) -> list[int]:
        """Which items of long lists of operands are shown: those of the selected parameters, or the first and the last."""
        lists = [a for a in node.args if isinstance(a, (list, tuple)) and len(a) > _MANY_OPERANDS]
        chosen = sorted({i for values in lists for i, v in enumerate(values) if v in self._marked})
        return chosen[:3] if chosen else [0, 1, 2, -1]

    def _operand(self, value: Any, shown: list[int]) -> str:
        if isinstance(value, (list, tuple)):
            if not self.folds or len(value) <= _MANY_OPERANDS:
                return "[" + ", ".join(self._operand(v, shown) for v in value) + "]"
            items = [self._operand(value[i], shown) for i in shown]
            if shown[-1] == -1:
                return f"[{', '.join(items[:-1])}, ... {len(value) - 4} more, {items[-1]}]"
            return f"[{', '.join(items)} and {len(value) - len(items)} others]"
        return format_operand(value, self.names)

    def _items(self, nodes: list[fx.Node]) -> Iterator[str]:
        """Calls of one module, a run of items taken from one list as a single line."""
        for (is_item, source), group in groupby(nodes, key=_item_source):
            run = list(group)
            if self.folds and is_item and len(run) > _MANY_OPERANDS:
                yield f"    {self.names[run[0]]} ... {self.names[run[-1]]} = the {len(run)} items of {self.names[source]}"
            else:
                for node in run:
                    yield from self._line(node)

    def _neighbourhood(self, centre: fx.Node, calls: Sequence[fx.Node]) -> Iterator[str]:
        yield f"{centre.meta['key']}"
        if source := centre.meta.get("source"):
            yield f"  source: {source}"
        yield "operands:"
        for operand in centre.all_input_nodes:
            spec = self._specs.get(operand)
            what = f"{spec}" if spec is not None else operand.meta["key"].name
            yield f"    {self.names[operand]}  {_type(operand)}  {what}"
        yield f"used by: {', '.join(self.names.get(u, 'an output') for u in centre.users) or 'nothing'}"
        for phase, group in groupby(calls, key=lambda n: n.meta["phase"]):
            yield f"{phase}:"
            for module, nodes in groupby(group, key=lambda n: n.meta["key"].module):
                yield f"  {module or '(root)'}"
                for node in nodes:
                    yield from self._line(node, " -> " if node is centre else "    ")

    def _record(self, node: fx.Node) -> dict[str, Any]:
        key = node.meta["key"]
        return {
            "number": self.names[node],
            "key": key.name,
            "operator": target_name(node.target),
            "phase": str(key.phase),
            "module": key.module,
            "type": _type(node),
            "bytes": storage_bytes(node),
            "operands": [self.names[n] for n in node.all_input_nodes],
            "source": node.meta.get("source"),
        }


def _item_source(node: fx.Node) -> tuple[bool, fx.Node]:
    is_item = node.target is operator.getitem
    return is_item, node.all_input_nodes[0] if is_item else node


def _is_within(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")


def _block_of(node: fx.Node) -> str:
    """The path up to its first number, as ``model.layers.0``; in the update, the parameter."""
    path: str = node.meta["key"].module
    if node.meta["phase"] is Phase.UPDATE:
        return path
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
    return match.group() if match else path


def _is_repetition(block: tuple[str, list[fx.Node]], first: tuple[str, list[fx.Node]]) -> bool:
    (key, nodes), (first_key, first_nodes) = block, first
    is_update = nodes[0].meta["phase"] is Phase.UPDATE
    if re.sub(r"\d+", "N", key) != re.sub(r"\d+", "N", first_key) and not is_update:
        return False
    return [_shape_of(n, key) for n in nodes] == [_shape_of(n, first_key) for n in first_nodes]


def _shape_of(node: fx.Node, block: str) -> tuple[Any, ...]:
    path = node.meta["key"].module.removeprefix(block)
    return path, node.target, "" if node.meta["phase"] is Phase.UPDATE else _type(node)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        kinds = [describe_type(*type_of(v)) for v in value]
        return f"({kinds[0]}, ... {len(kinds)} in all)" if len(kinds) > 3 else f"({', '.join(kinds)})"
    return describe_type(*type_of(value))


def _short(node: fx.Node) -> str:
    """``aten.mul.Tensor`` -> ``mul``; other namespaces are kept."""
    namespace, _, rest = target_name(node.target).partition(".")
    name = rest.rpartition(".")[0] or rest
    return name if namespace == "aten" else target_name(node.target).removesuffix(".default").removeprefix("python.")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _wrapped(head: str, operands: list[str], result: str, width: int) -> Iterator[str]:
    """One call over as many lines as it takes, broken between operands."""
    words = f"{head}{', '.join(operands)})".replace(", ", ",\0").split("\0")
    line = words[0]
    for word in (*words[1:], f" {result}"):
        if len(line) + 1 + len(word) > width:
            yield line
            line = " " * 8 + word.strip()
        else:
            line += f" {word}"
    yield line
