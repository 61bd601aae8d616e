"""One batch signature compiled: its capture, and a rewritten graph for each form that the optimizer's update takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..capture import (
    CapturedStep,
    CapturedUpdate,
    FlatBatch,
    ModuleTensors,
    capture_update,
    garbage_collection_paused,
    update_targets,
)
from ..device import compiles_updates
from ..graph import OutputRole, StepGraph
from ..passes import PassRecord, run_passes, training_passes
from ..torch_compat import pytree
from .binding import Binding
from .executor import Executor
from .guards import OptimizerGuard
from .inductor import CompiledRegions, lowered
from .options import StepOptions
from .state import StepState


@dataclass
class Variant:
    """The whole step, update included, for one form of the update.

    Attributes:
        may_round: whether it is rounded otherwise than eager.
    """

    update: CapturedUpdate
    graph: StepGraph
    records: list[PassRecord]
    guard: OptimizerGuard
    binding: Binding
    executor: Executor
    may_round: bool = False
    outputs: dict[OutputRole, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = {role: [] for role in OutputRole}
        for position, spec in enumerate(self.graph.outputs):
            self.outputs[spec.role].append(position)

    def inputs(self, batch_tensors: list[Tensor]) -> list[Any]:
        """The graph's inputs, for an optimizer that the variant's guard has matched."""
        return self.binding.inputs(batch_tensors, self.guard.state_version)

    def first(self, role: OutputRole, values: list[Any]) -> Any:
        """The only output of ``role`` among ``values``, or None."""
        positions = self.outputs[role]
        return values[positions[0]] if positions else None


class CompiledBatch:
    """A capture and its variants. The update alone is traced again when the optimizer needs another form of it."""

    def __init__(
        self,
        step: CapturedStep,
        batch: FlatBatch,
        tensors: ModuleTensors,
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
        state: StepState,
    ) -> None:
        self.step = step
        self.batch = batch.describe()
        self.batch_positions = batch.tensor_positions
        self.variants: list[Variant] = []
        self.capture_seconds = 0.0
        self.has_run = False
        self._tensors = tensors
        self._optimizer = optimizer
        self._options = options
        self.state = state
        self._params = {h.key: h.tensor for h in tensors.params}
        self._regions: CompiledRegions = {}
        self._device = next(iter(self._params.values())).device

    def variant(self) -> Variant:
        """The variant that fits the optimizer as it is now."""
        for position, variant in enumerate(self.variants):
            if variant.guard.matches():
                if position:
                    self.variants.insert(0, self.variants.pop(position))
                return variant
        self.variants.insert(0, self._build())
        return self.variants[0]

    def inputs(self, variant: Variant, batch: FlatBatch) -> list[Any]:
        """The values of the variant's inputs, in order, for a batch of this signature."""
        return variant.inputs([batch.leaves[i] for i in self.batch_positions])

    def aux_of(self, variant: Variant, outputs: list[Any]) -> Any:
        """What ``loss_fn`` returned beside the loss, put together from the outputs and the constants of the capture."""
        leaves = [outputs[i] for i in variant.outputs[OutputRole.AUX]]
        for position, value in sorted(self.step.aux_constants.items()):
            leaves.insert(position, value)
        return pytree.tree_unflatten(leaves, self.step.aux_spec)

    def _build(self) -> Variant:
        options = self._options
        compiles_update = options.is_fast and compiles_updates(self._device)
        with garbage_collection_paused():
            masters = self.state.masters.of(self.step.grad_keys)
            self.state.masters.check_state(self._optimizer)
            swapped = functools.partial(self.state.masters.in_optimizer, self._optimizer)
            targets = update_targets(self.step, masters, swapped)
            update = capture_update(self._optimizer, self._params, targets, tensor_by_tensor=compiles_update)
            graph = self.step.graph.copy()
            passes = training_passes(
                max_norm=options.max_norm,
                norm_type=options.norm_type,
                clip_value=options.clip_value,
                error_if_nonfinite=options.error_if_nonfinite,
                scales_loss=options.loss_scale is not None,
                masters=frozenset(masters),
                nonfinite=options.nonfinite,
                update=update.graph,
                for_compiler=compiles_update,
            )
            records = run_passes(graph, passes)
        runs_once = graph.output_of(OutputRole.STATE) is not None  # the first update, which creates the state
        trained: dict[str, Tensor] = {key: self._params[key] for key in self.step.grad_keys}
        program = graph
        if options.uses_inductor:
            program = lowered(graph, self._regions, compiles_update=compiles_update and not runs_once)
        return Variant(
            update,
            graph,
            records,
            OptimizerGuard(update, self._optimizer, trained),
            Binding(graph, self._tensors, self._optimizer, self.state),
            Executor(program),
            options.is_fast or options.uses_inductor,
        )
