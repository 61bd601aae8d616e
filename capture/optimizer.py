"""Traces the user's own ``optimizer.step()`` as a graph of its own.

Hyperparameters enter as 0-dim float64 inputs whose ``item()`` is a symbol, so a schedule costs nothing. Where ``step()``
branches on one (``if weight_decay != 0``), the outcome becomes a guard, and a later value with another outcome traces the
update again, alone. Optimizer state enters as it is: parameters without state get a first update that creates it, exactly as
eager's first step does, and hands it out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from ..device import optimizer_uses_foreach
from ..errors import CaptureError, NotYetError
from ..graph import InputRole, InputSpec, OutputRole, OutputSpec, Phase, StepGraph, family_of
from ..graph.ops import FUSED_TWINS
from ..torch_compat import OPTIMIZER_BOOKKEEPING, fused_optimizers_replaced, hyper_scalar, make_fx, pytree
from .context import TraceContext
from .failures import capture_error
from .forward_backward import CapturedStep, drop_profiler_marks, lift_constants
from .known_values import KnownValues

Hypers = dict[str, float]


@dataclass(frozen=True)
class HyperGuard:
    """A condition on hyperparameters under which an update graph is right."""

    expression: Any
    keys: dict[sympy.Symbol, str]

    def holds(self, hypers: Hypers) -> bool:
        """Whether the condition has the same outcome for these values."""
        values = {symbol: sympy.Float(hypers[key]) for symbol, key in self.keys.items()}
        return bool(self.expression.xreplace(values))

    def __str__(self) -> str:
        return str(self.expression.xreplace({s: sympy.Symbol(k) for s, k in self.keys.items()}))


@dataclass(frozen=True)
class CapturedUpdate:
    """One trace of ``optimizer.step()``.

    Attributes:
        graph: inputs are parameters, gradients, state and hyperparameters; outputs are the state entries that it creates.
        guards: conditions on hyperparameters.
        constants: everything in the parameter groups that is not a hyperparameter (flags such as ``maximize``).
        hypers: the hyperparameters that the graph reads.
    """

    graph: StepGraph
    guards: tuple[HyperGuard, ...]
    constants: tuple[Hashable, ...]
    hypers: tuple[str, ...]


def hypers_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any], str, int | None, Any]]:
    """Every number in the parameter groups: key (``group.0.betas.1``), group, name, position in a tuple, value."""
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if _is_number(value):
                yield f"group.{index}.{name}", group, name, None, value
            elif isinstance(value, (tuple, list)) and name != "params":
                for position, item in enumerate(value):
                    if _is_number(item):
                        yield f"group.{index}.{name}.{position}", group, name, position, item


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 or value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def group_constants(optimizer: torch.optim.Optimizer) -> tuple[Hashable, ...]:
    """What is baked into an update besides hyperparameters and membership: flags and strings of the groups."""
    return tuple(
        tuple([(k, v) for k, v in group.items() if v is None or isinstance(v, (bool, str))])
        for group in optimizer.param_groups
    )


def state_signature(optimizer: torch.optim.Optimizer, params: dict[str, Tensor]) -> tuple[Hashable, ...]:
    """Which state entries exist, with their metadata."""
    state = optimizer.state
    return tuple([(key, _entries(state[p])) if p in state else (key, ()) for key, p in params.items()])


def _entries(state: dict[str, Any]) -> tuple[Hashable, ...]:
    return tuple(
        (name, (v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v if isinstance(v, Hashable) else type(v))
        for name, v in state.items()
    )


def capture_update(optimizer: torch.optim.Optimizer, params: dict[str, Tensor], step: CapturedStep) -> CapturedUpdate:
    """Traces one update of the parameters that got a gradient in ``step``; nothing real is read, run or changed.

    Args:
        params: every parameter of the model, by key.
        step: the forward and backward that the update follows; its fake tensors are used, so that both graphs agree on
            which values share memory.

    Raises:
        CaptureError: ``step()`` branches on data, or cannot be traced for another reason.
        NotYetError: it keeps something in its state that is no tensor.
    """
    trace = _UpdateTrace(optimizer, params, step)
    try:
        return trace.run()
    except Exception as error:
        raise capture_error(error, trace.context, f"{type(optimizer).__name__}.step()") from error


class _UpdateTrace:
    def __init__(self, optimizer: torch.optim.Optimizer, params: dict[str, Tensor], step: CapturedStep) -> None:
        self.optimizer = optimizer
        self.params = params
        self.grad_keys = step.grad_keys
        self.grads = {key: node.meta["val"] for key, node in step.graph.output_nodes(OutputRole.GRAD).items()}
        self.fakes = step.fakes
        self.mode = step.graph.fake_mode
        assert self.mode.shape_env is not None
        self.env = self.mode.shape_env
        self.guards_before = len(self.env.guards)
        self.context = TraceContext(torch.nn.Module())
        self.context.phase = Phase.UPDATE
        self.hypers = {key: (float(v) if not isinstance(v, Tensor) else v) for key, _, _, _, v in hypers_of(optimizer)}
        self.state_keys: list[tuple[str, str]] = []
        self.new_state: list[tuple[str, str]] = []
        self.symbols: dict[sympy.Symbol, str] = {}

    def run(self) -> CapturedUpdate:
        fake = {id(p): self.fakes[key] for key, p in self.params.items()}
        with_grad = [self.params[k] for k in self.grad_keys]
        self.state_keys = [
            (key, name)
            for key, p in zip(self.grad_keys, with_grad, strict=True)
            if p in self.optimizer.state
            for name, value in self.optimizer.state[p].items()
            if self._is_state_tensor(key, name, value)
        ]
        flat = [
            [fake[id(p)] for p in with_grad],
            [self.grads[k] for k in self.grad_keys],
            [self._fake_state(key, name) for key, name in self.state_keys],
            [self._fake_hyper(value) for value in self.hypers.values()],
        ]
        with self.context.labelling(), fused_optimizers_replaced(FUSED_TWINS), self.mode:
            traced = make_fx(lambda *a: self._step(fake, *a), tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
        return self._finish(traced)

    def _is_state_tensor(self, key: str, name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return True
        if value is None or isinstance(value, (bool, str)):
            return False
        raise NotYetError(
            f"{type(self.optimizer).__name__} keeps a {type(value).__name__} in state[{key!r}][{name!r}]; this version "
            "compiles optimizers whose state is tensors. Keep it as a 0-dim tensor."
        )

    def _fake_state(self, key: str, name: str) -> Tensor:
        return self.mode.from_tensor(self.optimizer.state[self.params[key]][name], static_shapes=True)

    def _fake_hyper(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return self.mode.from_tensor(value, static_shapes=True)
        with self.mode:
            return torch.empty((), dtype=torch.float64)

    def _step(
        self,
        fake: dict[int, Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        state: list[Tensor],
        hypers: list[Tensor],
    ) -> list[Tensor]:
        stand_ins = dict(fake)
        stand_ins.update((id(self.params[k]), p) for k, p in zip(self.grad_keys, params, strict=True))
        scratch = self._scratch_optimizer(stand_ins, hypers)
        given = dict(zip(self.state_keys, state, strict=True))
        for key, param in zip(self.grad_keys, params, strict=True):
            real = self.optimizer.state.get(self.params[key])
            if real:
                scratch.state[param] = {name: given.get((key, name), value) for name, value in real.items()}
        attributes = dict(scratch.__dict__)
        try:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            with KnownValues():
                type(scratch).step(scratch)
        finally:
            for param in params:
                param.grad = None
        self._check_attributes(scratch, attributes)
        return self._created_state(scratch, dict(zip(self.grad_keys, params, strict=True)), given)

    def _scratch_optimizer(self, stand_ins: dict[int, Tensor], hypers: list[Tensor]) -> torch.optim.Optimizer:
        real = self.optimizer
        scratch = object.__new__(type(real))
        scratch.__dict__.update({k: v for k, v in real.__dict__.items() if k != "step"})
        scratch.state = defaultdict(dict)
        scratch.param_groups = [dict(group) for group in real.param_groups]
        for group in scratch.param_groups:
            real_params = group["params"]
            group["params"] = [stand_ins[id(p)] for p in real_params]
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                trained = [p for p in real_params if any(p is self.params[k] for k in self.grad_keys)]
                group["foreach"] = bool(trained) and optimizer_uses_foreach(trained)
        scalars = dict(zip(self.hypers, hypers, strict=True))
        for key, group, name, position, value in list(hypers_of(scratch)):
            scalar = self._scalar(key, scalars[key], value)
            if position is None:
                group[name] = scalar
            else:
                items = list(group[name])
                items[position] = scalar
                group[name] = type(group[name])(items)
        return scratch

    def _scalar(self, key: str, fake: Tensor, value: Any) -> Any:
        if isinstance(value, Tensor):
            return fake
        scalar, symbol = hyper_scalar(fake, float(value), key.replace(".", "_"), self.env)
        self.symbols[symbol] = key
        return scalar

    def _check_attributes(self, scratch: torch.optim.Optimizer, before: dict[str, Any]) -> None:
        changed = [
            k for k, v in scratch.__dict__.items() if k not in OPTIMIZER_BOOKKEEPING and before.get(k, _ABSENT) is not v
        ]
        if changed:
            raise CaptureError(
                f"step() changes attributes of the optimizer itself ({', '.join(changed)}), which a graph cannot carry.",
                remedy="keep per-parameter tensors in self.state[param]",
            )

    def _created_state(
        self, scratch: torch.optim.Optimizer, params: dict[str, Tensor], given: dict[tuple[str, str], Tensor]
    ) -> list[Tensor]:
        keys = {id(param): key for key, param in params.items()}
        created = []
        for param, entries in scratch.state.items():  # in the order in which eager's state fills
            key = keys[id(param)]
            for name, value in entries.items():
                if self._is_state_tensor(key, name, value) and value is not given.get((key, name)):
                    self.new_state.append((key, name))
                    created.append(value)
        return created

    def _finish(self, traced: torch.fx.GraphModule) -> CapturedUpdate:
        graph = traced.graph
        drop_profiler_marks(graph)
        inputs = [InputSpec(InputRole.PARAM, k) for k in self.grad_keys]
        inputs += [InputSpec(InputRole.GRAD, k) for k in self.grad_keys]
        inputs += [InputSpec(InputRole.STATE, f"{k}/{name}") for k, name in self.state_keys]
        inputs += [InputSpec(InputRole.HYPER, k) for k in self.hypers]
        outputs = [OutputSpec(OutputRole.STATE, f"{k}/{name}") for k, name in self.new_state]
        graph.output_node().args = (pytree.tree_leaves(graph.output_node().args[0]),)
        step_graph = StepGraph(graph, inputs, outputs, fake_mode=self.mode)
        lift_constants(step_graph, traced)
        owners = _owning_params(step_graph)
        for node in step_graph.calls:
            module = next(iter(owners[node])) if len(owners[node]) == 1 else "optimizer"
            node.meta.pop("module")
            step_graph.assign_key(node, module, family_of(node.target), Phase.UPDATE)
        for node in reversed(step_graph.calls):
            if not node.users and family_of(node.target) == "_local_scalar_dense":
                graph.erase_node(node)
        step_graph.drop_unused_inputs([InputRole.HYPER, InputRole.CONSTANT, InputRole.STATE, InputRole.PARAM])
        return CapturedUpdate(
            step_graph,
            tuple(self._guards()),
            group_constants(self.optimizer),
            tuple(s.key for s in step_graph.inputs if s.role is InputRole.HYPER),
        )

    def _guards(self) -> Iterator[HyperGuard]:
        for guard in self.env.guards[self.guards_before :]:
            symbols = guard.expr.free_symbols
            if unknown := symbols - self.symbols.keys():
                raise CaptureError(f"step() branches on {guard.expr}, which involves data ({unknown}).")
            if symbols:
                yield HyperGuard(guard.expr, {s: self.symbols[s] for s in symbols})


_ABSENT = object()


def _owning_params(step_graph: StepGraph) -> dict[torch.fx.Node, frozenset[str]]:
    """For each node, the parameters that its operands belong to."""
    owners: dict[torch.fx.Node, frozenset[str]] = {}
    for node, spec in zip(step_graph.placeholders, step_graph.inputs, strict=True):
        is_owned = spec.role in (InputRole.PARAM, InputRole.GRAD, InputRole.STATE)
        owners[node] = frozenset({spec.key.partition("/")[0]}) if is_owned else frozenset()
    for node in step_graph.calls:
        owners[node] = frozenset().union(*(owners[n] for n in node.all_input_nodes))
    return owners
