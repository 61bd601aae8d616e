"""The captures of a step: which one a batch needs, made where there is none yet, and run."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import (
    CapturedStep,
    FlatBatch,
    LossCall,
    ModuleTensors,
    batch_signature,
    capture_forward_backward,
    check_model,
    check_optimizer,
    flatten_batch,
    is_capturing,
    tensors_of,
    varying_leaves,
    warn_user,
)
from ..device import stands_for
from ..errors import ConfigError, StepGraphError
from ..graph import InputRole, StorageMap
from ..planner import measured_workspaces, simulate
from .attributes import AttributeWatch
from .compiled import CompiledBatch, Program
from .executor import first_run_error
from .guards import MembershipGuard, ModelGuard
from .options import StepOptions
from .rollback import restored_on_error
from .state import StepState
from .window import Part

logger = logging.getLogger("stepgraph")

CAPTURES_BEFORE_WARNING = 8
Signature = tuple[Hashable, int, tuple[int, ...]]  # batch; model; optimizer membership and companions of the model


class Captures:
    """What was captured of a model and an optimizer, by the kind of batch and the state of the model.

    Attributes:
        latest: what ran or was prepared last, with its program; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: ModuleTensors,
        call: LossCall,
        options: StepOptions,
        state: StepState,
    ) -> None:
        self.latest: tuple[CompiledBatch, Program] | None = None
        self._model = model
        self._optimizer = optimizer
        self._call = call
        self._options = options
        self._state = state
        self._device = stands_for(tensors.params[0].tensor.device)
        self._guard = ModelGuard(model, tensors)
        self._members = MembershipGuard(optimizer)
        self._companions: dict[int, AttributeWatch] = {}
        self._by_signature: dict[Signature, CompiledBatch] = {}
        self._tensor_ids = {id(held.tensor) for held in tensors.all}

    @property
    def all(self) -> list[CompiledBatch]:
        """Every capture, in the order in which they were made."""
        return list(self._by_signature.values())

    def check(self) -> None:
        """Looks whether the model is still the one that was compiled, and follows what was loaded into it.

        Raises:
            ConfigError: within the loss of another compiled step.
            GuardError: a parameter was replaced.
        """
        if is_capturing():
            raise ConfigError("a compiled step is called inside the loss of another; call one after the other")
        self._guard.check()
        self._state.masters.follow()

    def find(
        self, batch: Any, part: Part | None = None, *, is_micro: bool = False
    ) -> tuple[CompiledBatch, Program, FlatBatch]:
        """What a call with this batch runs: the whole step, or a micro-batch that is not the last of its window."""
        self.check()
        flat = flatten_batch(batch)
        if not self._tensor_ids.isdisjoint(map(id, flat.leaves)):
            raise ConfigError("the batch holds a parameter or buffer of the model itself; pass a copy of it")
        compiled = self._by_signature.get(self._signature(flat)) or self._capture(flat, part, is_micro)
        program = compiled.program(part, is_micro=is_micro)
        self.latest = (compiled, program)
        return compiled, program, flat

    def _signature(self, batch: FlatBatch) -> Signature:
        surroundings = (self._members.signature(), *[watch.number() for watch in self._companions.values()])
        return (batch_signature(batch, self._device), self._guard.signature(), surroundings)

    def _capture(self, batch: FlatBatch, part: Part | None, is_micro: bool) -> CompiledBatch:
        with _torch_log_quiet():
            return self._capture_alone(batch, part, is_micro)

    def _capture_alone(self, batch: FlatBatch, part: Part | None, is_micro: bool) -> CompiledBatch:
        start = time.perf_counter()
        tensors = tensors_of(self._model)  # buffers may have been replaced, and hooks added, since the last capture
        check_model(self._model, tensors)
        check_optimizer(self._optimizer, tensors)
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        step = capture_forward_backward(self._model, tensors, trained, self._call, batch)
        compiled = CompiledBatch(step, batch, tensors, self._optimizer, self._options, self._state)
        compiled.program(part, is_micro=is_micro)
        compiled.capture_seconds = time.perf_counter() - start
        logger.info("captured %s in %.1f s", ", ".join(batch.describe()), compiled.capture_seconds)
        for companion in step.companions:
            named = [(f"{type(companion).__name__}.{path}", module) for path, module in companion.named_modules()]
            self._companions.setdefault(id(companion), AttributeWatch(named, of_companions=True))
        self._guard.ignore(step.changed_attributes)
        self._guard.ignore(self._irrelevant_attributes(step, batch))
        self._by_signature[self._signature(batch)] = compiled
        if len(self._by_signature) == CAPTURES_BEFORE_WARNING:
            varying = varying_leaves(batch.paths, [s[0] for s in self._by_signature])
            warn_user(
                f"{len(self._by_signature)} captures so far, each for another kind of batch or state of the model. "
                + (f"What varies: {'; '.join(varying)}. " if varying else "")
                + "Pad or bucket batches to few shapes, and pass numbers that change as tensors."
            )
        return compiled

    def _irrelevant_attributes(self, step: CapturedStep, batch: FlatBatch) -> list[str]:
        """Attributes whose change led to a capture of the very same graph: a step counter that forward does not read."""
        batch_part, number, surroundings = self._signature(batch)
        alike = [
            (other, compiled)
            for (other_batch, other, others), compiled in self._by_signature.items()
            if (other_batch, others) == (batch_part, surroundings)
        ]
        text = str(step.graph) if alike else ""
        for other, compiled in alike:
            if str(compiled.step.graph) == text:
                return self._guard.differing_attributes(number, other)
        return []

    def run(self, compiled: CompiledBatch, program: Program, batch: FlatBatch) -> list[Any]:
        """The outputs of a program for a batch of its kind."""
        if compiled.is_on_meta:
            raise ConfigError(
                "the model is on the meta device, which holds no values: its step can be prepared and planned, not run. Load "
                "the model on a real device, with plan= the saved plan."
            )
        inputs = compiled.inputs(program, batch)
        return program.executor(inputs) if compiled.has_run else self._first_run(compiled, program, inputs)

    def _first_run(self, compiled: CompiledBatch, program: Program, inputs: list[Any]) -> list[Any]:
        """Runs a capture that has never run: what only real values show, such as dtypes that do not fit, is told as a capture's
        failure, and undone."""
        try:
            with restored_on_error(*self._undoable(program, inputs)):
                outputs = program.executor(inputs)
        except Exception as error:
            if isinstance(error, StepGraphError):
                raise
            self._by_signature = {key: value for key, value in self._by_signature.items() if value is not compiled}
            self.latest = None
            raise first_run_error(error) from error
        compiled.has_run = True
        return outputs

    def _undoable(self, program: Program, inputs: list[Any]) -> tuple[list[Tensor], set[torch.device], float]:
        """Buffers and other tensors of the model that a program writes, devices, and the bytes that a copy may take."""
        graph, budget = program.graph, self._options.planning.budget_bytes
        storages = StorageMap(graph.graph)
        written = [
            value
            for node, spec, value in zip(graph.placeholders, graph.inputs, inputs, strict=True)
            if spec.role in (InputRole.BUFFER, InputRole.CONSTANT) and storages.is_written(node)
        ]
        devices = {value.device for value in inputs if isinstance(value, Tensor)}
        if budget is None or not written:
            return written, devices, math.inf
        return written, devices, budget - simulate(graph, measured_workspaces(graph)).settled().peak().peak_bytes


@contextlib.contextmanager
def _torch_log_quiet() -> Iterator[None]:
    """Keeps torch from printing the traceback of an error that is raised in better words."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
