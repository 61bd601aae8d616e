"""Traces the user's own ``optimizer.step()`` as a graph of its own.

Hyperparameters enter as 0-dim float64 inputs whose ``item()`` is a symbol, so a schedule costs nothing. Where ``step()``
branches on one (``if weight_decay != 0``), the outcome becomes a guard, and a later value with another outcome traces the
update again, alone. Optimizer state enters as it is: parameters without state get a first update that creates it, exactly as
eager's first step does, and hands it out.
"""

from __future__ import annotations

import contextlib
import numbers
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from ..device import autocast_off
from ..errors import CaptureError, some_of
from ..graph import InputRole, InputSpec, OutputRole, OutputSpec, Phase, StepGraph, family_of
from ..graph.ops import FUSED_TWINS
from ..torch_compat import (
    FakeTensor,
    FakeTensorMode,
    fused_optimizers_replaced,
    has_step_hooks,
    hyper_scalar,
    storage_key,
)
from .ambient import CAPTURE_LOCK
from .context import TraceContext
from .failures import capture_error, is_data_dependent, source_line_of
from .fake_results import fake_of, fake_on
from .forward_backward import CapturedStep, drop_profiler_marks, lift_constants
from .opaque_update import Swap, opaque_update_graph
from .recorder import Recorder
from .scratch import ScratchRecord, scratch_copy

Hypers = dict[str, float]
State = Mapping[Tensor, dict[str, Any]]


class _Untraceable(Exception):
    """``step()`` does what no graph can hold: the update is then one opaque call."""


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
        integers_are_constants: whether integers in the groups (Muon's ``ns_steps``) are among the constants.
        opaque_reason: why the update is a single call of the user's ``step()``; empty where it was traced.
        has_hooks: whether the optimizer has step hooks, which are the reason then.
    """

    graph: StepGraph
    guards: tuple[HyperGuard, ...] = ()
    constants: tuple[Hashable, ...] = ()
    integers_are_constants: bool = False
    opaque_reason: str = ""
    has_hooks: bool = False


def hypers_of(
    optimizer: torch.optim.Optimizer, *, integers_are_constants: bool = False
) -> Iterator[tuple[str, dict[str, Any], str, int | None, Any]]:
    """Every hyperparameter: key (``group.0.betas.1``), group, name, position in a tuple, value."""
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if _is_hyper(value, integers_are_constants):
                yield f"group.{index}.{name}", group, name, None, value
            elif isinstance(value, (tuple, list)) and name != "params":
                for position, item in enumerate(value):
                    if _is_hyper(item, integers_are_constants):
                        yield f"group.{index}.{name}.{position}", group, name, position, item


def _is_hyper(value: Any, integers_are_constants: bool) -> bool:
    if isinstance(value, int):
        return not integers_are_constants and not isinstance(value, bool)
    return isinstance(value, (Tensor, float))


def group_constants(optimizer: torch.optim.Optimizer, *, integers_are_constants: bool = False) -> tuple[Hashable, ...]:
    """What is baked into an update besides hyperparameters and membership: flags and strings of the groups, and what kind of
    value each entry is. Other objects count by identity."""

    def kind(value: Any) -> Hashable:
        if _is_hyper(value, integers_are_constants):
            return (value.dtype, value.device, value.shape) if isinstance(value, Tensor) else "number"
        if value is None or isinstance(value, (bool, int, str)):
            return (type(value), value)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(kind, value))
        return (type(value), id(value))

    return tuple(tuple([(k, kind(v)) for k, v in group.items() if k != "params"]) for group in optimizer.param_groups)


def state_signature(optimizer: torch.optim.Optimizer, params: dict[str, Tensor]) -> tuple[Hashable, ...]:
    """Which state entries exist, with their metadata."""
    state = optimizer.state
    return tuple([(key, _entries(state[p])) if p in state else (key, ()) for key, p in params.items()])


def _entries(state: dict[str, Any]) -> tuple[Hashable, ...]:
    return tuple(
        (name, (v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v if isinstance(v, Hashable) else type(v))
        for name, v in state.items()
    )


@dataclass(frozen=True)
class UpdateTargets:
    """What an update changes, and by which gradients; all fake, in the mode of the step that it follows.

    Attributes:
        mode: the step's fake mode.
        params: every parameter of the model, or its master, by key.
        grads: the gradient of each parameter that has one, by key, in the model's order.
        swapped: a context in which the real optimizer holds the masters in the places of their parameters.
    """

    mode: FakeTensorMode
    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    swapped: Swap = contextlib.nullcontext


def update_targets(
    step: CapturedStep,
    masters: dict[str, Tensor] | None = None,
    swapped: Swap = contextlib.nullcontext,
    keys: Sequence[str] | None = None,
) -> UpdateTargets:
    """Those of an update that follows ``step``, with ``masters`` updated in the places of the parameters with these keys.

    ``keys``: the parameters that have a gradient, where these are others than ``step`` has.

    The gradients are the step's own fake tensors, so that both graphs agree on which values share memory; a master's is of its
    dtype.
    """
    mode = step.graph.fake_mode
    fake_masters = {key: fake_of(mode, master) for key, master in (masters or {}).items()}
    found = {key: node.meta["val"] for key, node in step.graph.output_nodes(OutputRole.GRAD).items()}
    with mode, torch.no_grad():
        grads = {key: found[key] if key in found else torch.empty_like(step.fakes[key]) for key in keys or found}
        for key in grads.keys() & fake_masters.keys():
            grad, dtype = grads[key], fake_masters[key].dtype
            grads[key] = torch.empty_strided(grad.shape, grad.stride(), dtype=dtype, device=grad.device)
    return UpdateTargets(mode, step.fakes | fake_masters, grads, swapped)


def capture_update(
    optimizer: torch.optim.Optimizer,
    params: dict[str, Tensor],
    targets: UpdateTargets,
    *,
    tensor_by_tensor: bool = False,
) -> CapturedUpdate:
    """Traces one update of the parameters that have a gradient in ``targets``; nothing real is read, run or changed.

    Where ``step()`` branches on data, keeps state that is no tensor, changes the optimizer itself or has hooks, the update is
    one call of it (:mod:`.opaque_update`). So is a first update that knows the values of the state that it creates, where a
    later one would not: each step is then what the first was planned as.

    Args:
        params: every parameter of the model, by key.
        tensor_by_tensor: traces the for-loop implementation, whichever the optimizer would take (fast tier).

    Raises:
        CaptureError: ``step()`` fails.
    """

    def opaque() -> StepGraph:
        return opaque_update_graph(optimizer, params, targets.mode, targets.params, targets.grads, targets.swapped)

    if has_step_hooks(optimizer):
        return CapturedUpdate(opaque(), opaque_reason="the optimizer has step hooks", has_hooks=True)
    try:
        update = _traced(optimizer, params, targets, optimizer.state, tensor_by_tensor)
        _require_later_update(update.graph, optimizer, params, targets)
        return update
    except _Untraceable as untraceable:
        reason = f"{type(optimizer).__name__}.step() {untraceable}"
        return CapturedUpdate(opaque(), constants=group_constants(optimizer), opaque_reason=reason)


def _require_later_update(
    first: StepGraph, optimizer: torch.optim.Optimizer, params: dict[str, Tensor], targets: UpdateTargets
) -> None:
    """Raises where the update that follows one that creates state is not traceable, which one parameter of a kind tells."""
    created: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for full_key, node in first.output_nodes(OutputRole.STATE).items():
        key, _, name = full_key.partition("/")
        fake = node.meta["val"]
        created[key][name] = fake_on(targets.mode, fake, fake.device)
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    kinds = {(groups[id(params[key])], params[key].ndim, params[key].dtype): key for key in created}
    keys = set(kinds.values())
    if keys:
        few = replace(targets, grads={key: grad for key, grad in targets.grads.items() if key in keys})
        state = {p: {**optimizer.state.get(p, {}), **created[key]} for key, p in params.items() if key in keys}
        with contextlib.suppress(CaptureError):  # which the later update will raise, if it does
            _traced(optimizer, params, few, state, tensor_by_tensor=False)


def _traced(
    optimizer: torch.optim.Optimizer,
    params: dict[str, Tensor],
    targets: UpdateTargets,
    state: State,
    tensor_by_tensor: bool,
) -> CapturedUpdate:
    """Traces with integers as hyperparameters, and as constants where ``step()`` needs them to be integers."""
    failures = []
    for integers_are_constants in (False, True):
        trace = _UpdateTrace(optimizer, params, targets, state, integers_are_constants, tensor_by_tensor)
        try:
            with CAPTURE_LOCK:
                return trace.run()
        except _Untraceable:
            raise
        except Exception as error:
            if is_data_dependent(error):
                line = source_line_of(error) or "in torch"
                raise _Untraceable(f"branches on the value of a tensor ({line})") from error
            failures.append(capture_error(error, trace.context, f"{type(optimizer).__name__}.step()"))
            failures[-1].__cause__ = error
    raise failures[0]


class _UpdateTrace:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: dict[str, Tensor],
        targets: UpdateTargets,
        state: State,
        integers_are_constants: bool,
        tensor_by_tensor: bool,
    ) -> None:
        self.optimizer = optimizer
        self.state = state
        self.tensor_by_tensor = tensor_by_tensor
        self.integers_are_constants = integers_are_constants
        self.params = params
        self.grads = targets.grads
        self.grad_keys = list(targets.grads)
        self.fakes = targets.params
        self.mode = targets.mode
        assert self.mode.shape_env is not None
        self.env = self.mode.shape_env
        self.guards_before = len(self.env.guards)
        self.context = TraceContext(torch.nn.Module())
        self.context.phase = Phase.UPDATE
        self.recorder = Recorder(self.mode, self.context.label)
        hypers = hypers_of(optimizer, integers_are_constants=integers_are_constants)
        self.hypers = {key: (float(v) if not isinstance(v, Tensor) else v) for key, _, _, _, v in hypers}
        self.state_keys: list[tuple[str, str]] = []
        self.new_state: list[tuple[str, str]] = []
        self.symbols: dict[sympy.Symbol, str] = {}

    def run(self) -> CapturedUpdate:
        self._check_hypers()
        fake = {id(p): self.fakes[key] for key, p in self.params.items()}
        with_grad = [self.params[k] for k in self.grad_keys]
        self.state_keys = [
            (key, name)
            for key, p in zip(self.grad_keys, with_grad, strict=True)
            if p in self.state
            for name, value in self.state[p].items()
            if self._is_state_tensor(key, name, value)
        ]
        flat = [
            [fake[id(p)] for p in with_grad],
            [self.grads[k] for k in self.grad_keys],
            [self._fake_state(key, name) for key, name in self.state_keys],
            [self._fake_hyper(value) for value in self.hypers.values()],
        ]
        self.recorder.add_inputs([tensor for group in flat for tensor in group])
        with fused_optimizers_replaced(FUSED_TWINS), self.mode, autocast_off(), self.recorder:
            outputs = self._step(fake, *flat)
        return self._finish(self.recorder.finish(outputs))

    def _check_hypers(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            for name, value in group.items():
                items = value if isinstance(value, (tuple, list)) and name != "params" else [value]
                for item in items:
                    if isinstance(item, numbers.Number) and not isinstance(item, (int, float)):
                        kind = f"{type(item).__module__}.{type(item).__name__}"
                        raise _Untraceable(f"takes group {index}[{name!r}], a {kind}, whose arithmetic is its own")

    def _is_state_tensor(self, key: str, name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return True
        if value is None or isinstance(value, (bool, str)):
            return False
        raise _Untraceable(f"keeps a {type(value).__name__} in state[{key!r}][{name!r}]")

    def _fake_state(self, key: str, name: str) -> Tensor:
        value = self.state[self.params[key]][name]
        return value if isinstance(value, FakeTensor) else fake_of(self.mode, value)

    def _fake_hyper(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return fake_of(self.mode, value)
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
            real = self.state.get(self.params[key])
            if real:
                scratch.state[param] = {name: given.get((key, name), value) for name, value in real.items()}
        before = ScratchRecord(scratch, params)
        try:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            type(scratch).step(scratch)
        finally:
            for param in params:
                param.grad = None
        if changed := before.changes(scratch):
            raise _Untraceable(f"changes {', '.join(changed)}")
        return self._created_state(scratch, dict(zip(self.grad_keys, params, strict=True)), given)

    def _scratch_optimizer(self, stand_ins: dict[int, Tensor], hypers: list[Tensor]) -> torch.optim.Optimizer:
        scratch = scratch_copy(self.optimizer, stand_ins, [self.params[k] for k in self.grad_keys])
        if self.tensor_by_tensor:
            for group in scratch.param_groups:
                group.update((name, False) for name in ("foreach", "fused") if name in group)
        scalars = dict(zip(self.hypers, hypers, strict=True))
        for key, group, name, position, value in list(
            hypers_of(scratch, integers_are_constants=self.integers_are_constants)
        ):
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

    def _created_state(
        self, scratch: torch.optim.Optimizer, params: dict[str, Tensor], given: dict[tuple[str, str], Tensor]
    ) -> list[Tensor]:
        keys = {id(param): key for key, param in params.items()}
        created = []
        for param, entries in scratch.state.items():  # in the order in which eager's state fills
            if id(param) not in keys:
                raise _Untraceable("keeps state under what is no parameter with a gradient")
            key = keys[id(param)]
            real = self.state.get(self.params[key], {})
            if gone := real.keys() - entries.keys():
                raise _Untraceable(f"deletes state entries ({', '.join(gone)})")
            for name, value in entries.items():
                if self._is_state_tensor(key, name, value):
                    if value is not given.get((key, name)):
                        self.new_state.append((key, name))
                        created.append(value)
                elif name not in real or value is not real[name]:
                    raise _Untraceable(f"sets state[{key!r}][{name!r}], which is no tensor")
        return created

    def _finish(self, root: torch.nn.Module) -> CapturedUpdate:
        graph = self.recorder.graph
        drop_profiler_marks(graph)
        inputs = [InputSpec(InputRole.PARAM, k) for k in self.grad_keys]
        inputs += [InputSpec(InputRole.GRAD, k) for k in self.grad_keys]
        inputs += [InputSpec(InputRole.STATE, f"{k}/{name}") for k, name in self.state_keys]
        inputs += [InputSpec(InputRole.HYPER, k) for k in self.hypers]
        outputs = [OutputSpec(OutputRole.STATE, f"{k}/{name}") for k, name in self.new_state]
        step_graph = StepGraph(graph, inputs, outputs, fake_mode=self.mode, unread=self._state_of_others())
        if ignored := [key for key, node in step_graph.input_nodes(InputRole.GRAD).items() if not node.users]:
            raise _Untraceable(f"does not read the gradient of {some_of(ignored)}")
        lift_constants(step_graph, root)
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
            group_constants(self.optimizer, integers_are_constants=self.integers_are_constants),
            self.integers_are_constants,
        )

    def _state_of_others(self) -> dict[int, tuple[InputRole, int]]:
        """Storages in the state of parameters that have no gradient."""
        others = [self.state[p] for key, p in self.params.items() if key not in self.grads and p in self.state]
        tensors = [t for entries in others for t in entries.values() if isinstance(t, Tensor)]
        return {storage_key(t): (InputRole.STATE, t.untyped_storage().nbytes()) for t in tensors}

    def _guards(self) -> Iterator[HyperGuard]:
        for guard in self.env.guards[self.guards_before :]:
            symbols = guard.expr.free_symbols
            if symbols - self.symbols.keys():
                raise _Untraceable("branches on the value of a tensor")
            if symbols:
                yield HyperGuard(guard.expr, {s: self.symbols[s] for s in symbols})


def _owning_params(step_graph: StepGraph) -> dict[torch.fx.Node, frozenset[str]]:
    """For each node, the parameters that its operands belong to."""
    owners: dict[torch.fx.Node, frozenset[str]] = {}
    for node, spec in zip(step_graph.placeholders, step_graph.inputs, strict=True):
        is_owned = spec.role in (InputRole.PARAM, InputRole.GRAD, InputRole.STATE)
        owners[node] = frozenset({spec.key.partition("/")[0]}) if is_owned else frozenset()
    for node in step_graph.calls:
        owners[node] = frozenset().union(*(owners[n] for n in node.all_input_nodes))
    return owners
