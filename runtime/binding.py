"""Binds a graph's inputs to the live tensors of a model and an optimizer, and writes back what the graph created."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture import HeldTensor, ModuleTensors
from ..errors import GuardError
from ..graph import InputRole, OutputRole, StepGraph
from .state import StepState


class Binding:
    """Produces the flat inputs of ``graph`` from live objects.

    Parameters, buffers and state are the user's own tensors: the graph updates them in place, so the module and the
    optimizer are usable at any time.
    """

    def __init__(
        self, graph: StepGraph, tensors: ModuleTensors, optimizer: torch.optim.Optimizer, state: StepState
    ) -> None:
        self._optimizer = optimizer
        self._params = {h.key: h.tensor for h in tensors.params}
        held = {h.key: h for h in tensors.buffers + tensors.attributes}
        self._fixed: list[Any] = []
        self._buffers: list[tuple[int, HeldTensor]] = []
        self._states: list[tuple[int, Tensor, str]] = []
        self._batch: list[tuple[int, str]] = []
        self._hypers: list[_Hyper] = []
        self._accumulators: list[tuple[int, str]] = []
        self._window = state.window
        self._state_version = -1
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
            elif spec.role is InputRole.ACCUMULATOR:
                self._accumulators.append((position, spec.key))
            elif (own := state.tensor(spec)) is not None:
                self._fixed[position] = own
            else:
                raise GuardError(f"nothing to bind for the input {spec}")
        slots = {slot.name: slot for h in tensors.buffers + tensors.attributes for slot in h.slots}
        self._rebound = [(i, slots[s.key]) for i, s in enumerate(graph.outputs) if s.role is OutputRole.BUFFER]
        self._created = [
            (i, *spec.key.partition("/")[::2]) for i, spec in enumerate(graph.outputs) if spec.role is OutputRole.STATE
        ]

    def inputs(self, batch_tensors: Sequence[Tensor], state_version: int) -> list[Any]:
        """One value for each placeholder.

        Args:
            batch_tensors: the tensor leaves of the batch, in order.
            state_version: state tensors are looked up again only where this differs from the last call's; hashing
                parameters is slow.
        """
        if state_version != self._state_version:
            state = self._optimizer.state
            self._state_version = state_version
            for position, param, name in self._states:
                self._fixed[position] = state[param][name]
        values = list(self._fixed)
        for position, held in self._buffers:
            values[position] = held.current()
        for (position, _), tensor in zip(self._batch, batch_tensors, strict=True):
            values[position] = tensor
        for position, key in self._accumulators:
            values[position] = self._window.gradients[key]  # type: ignore[union-attr]
        groups = self._optimizer.param_groups
        for hyper in self._hypers:
            values[hyper.position] = hyper.tensor(groups)
        return values

    def store(self, outputs: list[Any]) -> None:
        """Binds what forward bound to buffers and attributes, and hands the optimizer the state that the update created.

        After a skipped update there is no such state.
        """
        for position, slot in self._rebound:
            slot.put(outputs[position])
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
