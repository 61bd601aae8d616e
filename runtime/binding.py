"""Binds a graph's inputs to the live tensors of a model and an optimizer, and writes back what the graph created."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture import CapturedUpdate, HeldTensor, ModuleTensors, group_constants, hypers_of, state_signature
from ..errors import GuardError
from ..graph import InputRole, OutputRole, StepGraph


class OptimizerGuard:
    """Whether a traced update still fits the optimizer: its state, flags and hyperparameters."""

    def __init__(self, update: CapturedUpdate, optimizer: torch.optim.Optimizer, params: dict[str, Tensor]) -> None:
        self._update = update
        self._optimizer = optimizer
        self._params = params
        self._state_signature = state_signature(optimizer, params)
        self._watched: list[tuple[Tensor, dict[str, Any] | None, int]] = []
        self._groups: Any = None
        self._values: list[tuple[str, Any]] = []
        self._watch_state()

    def matches(self) -> bool:
        """Whether the update graph is right for the optimizer as it is now."""
        return self._state_matches() and self._groups_match()

    def _watch_state(self) -> None:
        state = self._optimizer.state
        self._watched = [(p, state.get(p), len(state.get(p, ()))) for p in self._params.values()]

    def _state_matches(self) -> bool:
        get = self._optimizer.state.get
        for param, entries, size in self._watched:
            now = get(param)
            if now is not entries or (now is not None and len(now) != size):
                break
        else:
            return True
        if state_signature(self._optimizer, self._params) != self._state_signature:
            return False
        self._watch_state()
        return True

    def _groups_match(self) -> bool:
        values = [(key, v) for key, _, _, _, v in hypers_of(self._optimizer)]
        groups = group_constants(self._optimizer)
        if groups != self._groups:
            if groups != self._update.constants:
                return False
            self._groups = groups
        if values == self._values:
            return True
        numbers = {key: float(v) for key, v in values}
        if not all(guard.holds(numbers) for guard in self._update.guards):
            return False
        self._values = values
        return True


class Binding:
    """Produces the flat inputs of ``graph`` from live objects.

    Parameters, buffers and state are the user's own tensors: the graph updates them in place, so the module and the
    optimizer are usable at any time.
    """

    def __init__(self, graph: StepGraph, tensors: ModuleTensors, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._params = {h.key: h.tensor for h in tensors.params}
        held = {h.key: h for h in tensors.buffers + tensors.attributes}
        self._fixed: list[Any] = []
        self._buffers: list[tuple[int, HeldTensor]] = []
        self._states: list[tuple[int, Tensor, str]] = []
        self._batch: list[tuple[int, str]] = []
        self._hypers: list[_Hyper] = []
        for position, spec in enumerate(graph.inputs):
            self._fixed.append(None)
            if spec.role is InputRole.PARAM:
                self._fixed[position] = self._params[spec.key]
            elif spec.role is InputRole.CONSTANT:
                self._fixed[position] = graph.constants[spec.key]
            elif spec.role is InputRole.BUFFER:
                self._buffers.append((position, held[spec.key]))
            elif spec.role is InputRole.STATE:
                key, _, name = spec.key.partition("/")
                self._states.append((position, self._params[key], name))
            elif spec.role is InputRole.BATCH:
                self._batch.append((position, spec.key))
            elif spec.role is InputRole.HYPER:
                self._hypers.append(_Hyper(position, spec.key))
            else:
                raise GuardError(f"nothing to bind for the input {spec}")
        self._created = [
            (i, *spec.key.partition("/")[::2]) for i, spec in enumerate(graph.outputs) if spec.role is OutputRole.STATE
        ]

    def inputs(self, batch_tensors: Sequence[Tensor]) -> list[Any]:
        """One value for each placeholder. ``batch_tensors`` are the tensor leaves of the batch, in order."""
        values = list(self._fixed)
        for position, held in self._buffers:
            values[position] = held.current()
        state = self._optimizer.state
        for position, param, name in self._states:
            values[position] = state[param][name]
        for (position, _), tensor in zip(self._batch, batch_tensors, strict=True):
            values[position] = tensor
        groups = self._optimizer.param_groups
        for hyper in self._hypers:
            values[hyper.position] = hyper.tensor(groups)
        return values

    def store_created_state(self, outputs: list[Any]) -> None:
        """Hands the state entries that the graph created to the optimizer; does nothing after a skipped update."""
        for position, key, name in self._created:
            if outputs[position] is not None:
                self._optimizer.state[self._params[key]][name] = outputs[position]


class _Hyper:
    """One hyperparameter as a 0-dim float64 tensor that follows the optimizer's groups."""

    def __init__(self, position: int, key: str) -> None:
        self.position = position
        _, group, *path = key.split(".")
        self._group = int(group)
        is_item = len(path) > 1 and path[-1].isdigit()
        self._item = int(path[-1]) if is_item else None
        self._name = ".".join(path[:-1] if is_item else path)
        self._tensor = torch.zeros((), dtype=torch.float64)
        self._value: Hashable = 0.0

    def tensor(self, groups: list[dict[str, Any]]) -> Tensor:
        """The current value; a hyperparameter that is a tensor is passed as it is."""
        value = groups[self._group][self._name]
        if self._item is not None:
            value = value[self._item]
        if isinstance(value, Tensor):
            return value
        if value != self._value:
            self._tensor.fill_(value)
            self._value = value
        return self._tensor
