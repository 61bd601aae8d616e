"""StepGraph: the training step as one ``fx.Graph`` with typed inputs and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from ..torch_compat import FakeTensorMode
from .effects import effects_of
from .spec import InputRole, InputSpec, LogicalKey, OutputRole, OutputSpec, Phase, type_of
from .storage import storage_sizes
from .text import format_graph, target_name

_PHASE_ORDER = list(Phase)


class StepGraph:
    """A training step, or a part of one, as a flat graph of ATen calls.

    Each node's ``meta`` holds ``val`` (its fake value), ``phase`` (:class:`Phase`), ``key`` (:class:`LogicalKey`),
    ``source`` (``file:line`` of the user's code, or None), ``region`` (number of the checkpointed region that it was
    captured in, or None), ``trace_index`` (its position in the captured program, None for what passes added) and
    ``grad_mode`` (whether eager runs it with gradients enabled, which some kernels look at).

    Attributes:
        graph: the nodes. Placeholders come first.
        inputs: one spec for each placeholder, in order.
        outputs: one spec for each output, in order.
        constants: values of the inputs whose role is ``constant``, by key.
        fake_mode: the mode that the fake values belong to.
        regions: the checkpointed regions that the model asked for, by number.
        effectful: names of the captured calls of forward and backward that are more than their result, by trace index.
        unread: role and bytes of what model and optimizer hold and the step does not read, by storage.
    """

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
        *,
        fake_mode: FakeTensorMode,
        constants: dict[str, torch.Tensor] | None = None,
        regions: Sequence[Any] = (),
        effectful: dict[int, str] | None = None,
        unread: Mapping[int, tuple[InputRole, int]] | None = None,
    ) -> None:
        self.graph = graph
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.fake_mode = fake_mode
        self.constants = dict(constants or {})
        self.regions = tuple(regions)
        self.effectful = dict(effectful or {})
        self.unread = dict(unread or {})
        self._ordinals: Counter[tuple[str, str, Phase]] = Counter()
        for node in graph.nodes:
            if (key := node.meta.get("key")) is not None:
                slot = (key.module, key.family, key.phase)
                self._ordinals[slot] = max(self._ordinals[slot], key.ordinal + 1)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes, in the order of ``inputs``."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def output_node(self) -> fx.Node:
        """The single output node; its first argument is the flat list of outputs."""
        return self.graph.output_node()

    @property
    def output_values(self) -> list[Any]:
        """What each output is: a node, or a constant."""
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    def set_outputs(self, values: Iterable[Any], specs: Iterable[OutputSpec]) -> None:
        """Replaces all outputs."""
        self.output_node.args = (list(values),)
        self.outputs = list(specs)

    def input_nodes(self, role: InputRole) -> dict[str, fx.Node]:
        """Placeholders with ``role``, by key."""
        specs = zip(self.placeholders, self.inputs, strict=True)
        return {spec.key: node for node, spec in specs if spec.role is role}

    def output_nodes(self, role: OutputRole) -> dict[str, Any]:
        """Outputs with ``role``, by key."""
        return {s.key: v for v, s in zip(self.output_values, self.outputs, strict=True) if s.role is role}

    def output_of(self, role: OutputRole) -> Any:
        """The only output with ``role``, or None."""
        return next(iter(self.output_nodes(role).values()), None)

    @property
    def calls(self) -> list[fx.Node]:
        """Every node that runs something, in execution order."""
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def op_counts_by_phase(self) -> dict[str, int]:
        """Number of operator calls by phase, phases in execution order, phases without any left out."""
        counts = Counter(n.meta["phase"] for n in self.calls)
        return {str(phase): counts[phase] for phase in _PHASE_ORDER if counts[phase]}

    def op_counts(self) -> Counter[str]:
        """Number of calls by operator."""
        targets = {id(n.target): n.target for n in self.calls}
        counts: Counter[str] = Counter()
        for identity, number in Counter([id(n.target) for n in self.calls]).items():
            counts[target_name(targets[identity])] += number
        return counts

    def node_by_key(self, name: str) -> fx.Node:
        """The node whose key has this name (``module/family#ordinal@phase``); KeyError where there is none."""
        for node in self.graph.nodes:
            key = node.meta.get("key")
            if key is not None and name in (key.name, str(key)):
                return cast(fx.Node, node)
        raise KeyError(f"no node has the key {name!r}")

    def assign_key(self, node: fx.Node, module: str, family: str, phase: Phase) -> LogicalKey:
        """Gives ``node`` the next free key of its (module, family, phase)."""
        slot = (module, family, phase)
        shape, dtype = type_of(
            node.meta.setdefault("val", None)
        )  # torch leaves it out where an operator returns nothing
        key = LogicalKey(module, family, self._ordinals[slot], phase, shape, dtype)
        self._ordinals[slot] += 1
        node.meta["key"] = key
        node.meta["phase"] = phase
        return key

    def add_call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, module: str, phase: Phase
    ) -> fx.Node:
        """Adds a call at the graph's insertion point and evaluates it on fake values for its metadata."""
        node = self.graph.call_function(target, args, kwargs or {})
        fake_args, fake_kwargs = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        with self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        node.meta.setdefault("source", None)
        node.meta.setdefault("region", None)
        node.meta.setdefault("trace_index", None)
        node.meta.setdefault("grad_mode", False)
        self.assign_key(node, module, family_of(target), phase)
        return node

    def add_input(self, spec: InputSpec, val: Any, name: str) -> fx.Node:
        """Adds a placeholder after the existing ones."""
        last = self.placeholders[-1] if self.inputs else None
        context = self.graph.inserting_after(last) if last is not None else self.graph.inserting_before()
        with context:
            node = self.graph.placeholder(name)
        node.meta.update(val=val, phase=None, key=None, source=None, region=None, trace_index=None)
        self.inputs.append(spec)
        return node

    def add_number_input(self, spec: InputSpec, dtype: torch.dtype, device: torch.device, name: str) -> fx.Node:
        """Adds a placeholder for a 0-dim tensor after the existing ones."""
        with self.fake_mode:
            return self.add_input(spec, torch.empty((), dtype=dtype, device=device), name)

    def drop_unused_inputs(self, roles: Iterable[InputRole]) -> None:
        """Removes placeholders of these roles that nothing reads."""
        droppable = set(roles)
        kept = []
        for node, spec in zip(self.placeholders, self.inputs, strict=True):
            if spec.role in droppable and not node.users:
                if spec.role in (InputRole.BUFFER, InputRole.STATE):
                    self.unread.update((key, (spec.role, size)) for key, size in storage_sizes(node).items())
                self.graph.erase_node(node)
            else:
                kept.append(spec)
        self.inputs = kept

    def copy(self) -> StepGraph:
        """A graph with nodes of its own; fake values, specs and constants are shared."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copied = mapping[node] = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
            copied.args, copied.kwargs = fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
            copied.meta = node.meta.copy()
        return StepGraph(
            graph,
            self.inputs,
            self.outputs,
            fake_mode=self.fake_mode,
            constants=self.constants,
            regions=self.regions,
            effectful=self.effectful,
            unread=self.unread,
        )

    def record_effects(self) -> None:
        """Notes which calls must never be lost; to be called once, on the captured graph."""
        self.effectful = {n.meta["trace_index"]: n.meta["key"].name for n in self.calls if not effects_of(n).pure}

    def graph_module(self) -> fx.GraphModule:
        """The nodes as an ``fx.GraphModule`` that takes the inputs and returns the list of outputs.

        It runs every node: only stepgraph's executors end the step early at a gate.
        """
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {phase}" for phase, n in self.op_counts_by_phase().items())
        return f"StepGraph({len(self.inputs)} inputs, {counts}, {len(self.outputs)} outputs)"

    def __str__(self) -> str:
        return format_graph(self)


def family_of(target: Any) -> str:
    """Operator name without overload or namespace: ``aten.addmm.default`` -> ``addmm``."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return getattr(target, "__name__", str(target))


def name_of(node: fx.Node) -> str:
    """The node's logical key in messages; its FX name where it has none."""
    key = node.meta.get("key")
    return key.name if key is not None else node.name
