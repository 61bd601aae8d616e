"""One batch signature compiled: its capture, and a rewritten graph for each form that the optimizer's update takes."""

from __future__ import annotations

import functools
import time
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
from ..device import compiles_updates, keep_freed_memory, reads_are_cheap, stands_for
from ..graph import OutputRole, StepGraph
from ..passes import (
    Accumulate,
    PassRecord,
    SkipOnDevice,
    backward_passes,
    can_fold,
    flush_graph,
    is_skippable,
    run_passes,
    training_passes,
)
from ..planner import Plan
from ..torch_compat import pytree
from .binding import Binding
from .executor import Executor
from .guards import OptimizerGuard
from .inductor import CompiledRegions, lowered
from .loss_scale import LossScale
from .options import StepOptions
from .planning import apply_plan
from .state import StepState
from .window import Part


@dataclass
class Program:
    """A rewritten graph that can run."""

    graph: StepGraph
    records: list[PassRecord]
    binding: Binding
    executor: Executor
    outputs: dict[OutputRole, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = {role: [] for role in OutputRole}
        for position, spec in enumerate(self.graph.outputs):
            self.outputs[spec.role].append(position)

    def inputs(self, batch_tensors: list[Tensor]) -> list[Any]:
        """The graph's inputs."""
        return self.binding.inputs(batch_tensors, 0)

    def first(self, role: OutputRole, values: list[Any]) -> Any:
        """The only output of ``role`` among ``values``, or None."""
        positions = self.outputs[role]
        return values[positions[0]] if positions else None

    def nonfinite_code(self, values: list[Any]) -> Tensor | None:
        """Why the update was left out, or 0; None where nothing was checked."""
        spared: Tensor | None = self.first(OutputRole.SPARED, values)
        code: Tensor | None = self.first(OutputRole.NONFINITE, values)
        return spared if code is None and spared is not None and int(spared) else code

    def gradients(self, values: list[Any]) -> dict[str, Tensor | None]:
        """The gradients among ``values``, by parameter key."""
        return {self.graph.outputs[i].key: values[i] for i in self.outputs[OutputRole.GRAD]}


@dataclass
class Variant(Program):
    """The whole step, update included, for one form of the update and one part of the window.

    Attributes:
        grad_keys: the parameters that it updates, in the order in which a code for non-finite values counts them.
        may_round: whether it is rounded otherwise than eager.
        is_read_later: whether its outcome stays on the device until somebody asks.
        part: of the window; None where each batch is an update.
    """

    update: CapturedUpdate
    guard: OptimizerGuard
    grad_keys: list[str]
    may_round: bool = False
    is_read_later: bool = False
    part: Part | None = None

    @property
    def norm_dtype(self) -> torch.dtype:
        """Of the gradient norm."""
        dtype: torch.dtype = self.graph.output_of(OutputRole.NORM).meta["val"].dtype
        return dtype

    def inputs(self, batch_tensors: list[Tensor]) -> list[Any]:
        """The graph's inputs, for an optimizer that the variant's guard has matched."""
        return self.binding.inputs(batch_tensors, self.guard.state_version)


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
        self.plan: Plan | None = None
        self.variants: list[Variant] = []
        self.micros: dict[Part | None, Program] = {}
        self.capture_seconds = 0.0
        self.planning_seconds = 0.0
        self.has_run = False
        self._tensors = tensors
        self._optimizer = optimizer
        self._options = options
        self.state = state
        self._params = {h.key: h.tensor for h in tensors.params}
        self._regions: CompiledRegions = {}
        device = next(iter(self._params.values())).device
        self.is_on_meta = device.type == "meta"
        self._planned_for, self._device = device, stands_for(device)
        if device.type == "cpu":
            keep_freed_memory()

    def variant(self, part: Part | None = None) -> Variant:
        """The variant that fits this part of the window and the optimizer as it is now."""
        for position, variant in enumerate(self.variants):
            if variant.part == part and variant.guard.matches():
                if position:
                    self.variants.insert(0, self.variants.pop(position))
                return variant
        self.variants.insert(0, self._build(part))
        return self.variants[0]

    @property
    def last_part(self) -> Part | None:
        """The part that fills a window, where every parameter has a gradient from before; None without windows."""
        return None if self.state.window is None else Part(frozenset(self.step.grad_keys))

    def program(self, part: Part | None, *, is_micro: bool) -> Program:
        """The whole step, or a micro-batch that is not the last of its window."""
        return self.micro(part) if is_micro else self.variant(part)

    def micro(self, part: Part | None) -> Program:
        """The program of a micro-batch that is not the last of its window; None is one that is left out of it."""
        if part not in self.micros:
            self.micros[part] = self._build_micro(part)
        return self.micros[part]

    def explained_plan(self) -> Plan:
        """The plan with its predictions, which are left out at capture where nothing had to be decided."""
        if self.plan is None:
            self.variant(self.last_part)
        assert self.plan is not None
        if self.plan.prediction is None and self._options.planning.given is None:
            graph = self.variant(self.last_part).graph
            self.plan = self._options.planning.made(graph, self._optimizer, self._planned_for)
        return self.plan

    def inputs(self, program: Program, batch: FlatBatch) -> list[Any]:
        """The values of the program's inputs, in order, for a batch of this signature."""
        return program.inputs([batch.leaves[i] for i in self.batch_positions])

    def aux_of(self, program: Program, outputs: list[Any]) -> Any:
        """What ``loss_fn`` returned beside the loss, put together from the outputs and the constants of the capture."""
        leaves = [outputs[i] for i in program.outputs[OutputRole.AUX]]
        for position, value in sorted(self.step.aux_constants.items()):
            leaves.insert(position, value)
        return pytree.tree_unflatten(leaves, self.step.aux_spec)

    def _build(self, part: Part | None) -> Variant:
        options = self._options
        compiles_update = options.is_fast and compiles_updates(self._device)
        keys = self._keys(part)
        with garbage_collection_paused():
            masters = self.state.masters.of(keys)
            self.state.masters.check_state(self._optimizer)
            swapped = functools.partial(self.state.masters.in_optimizer, self._optimizer)
            targets = update_targets(self.step, masters, swapped, keys)
            update = capture_update(self._optimizer, self._params, targets, tensor_by_tensor=compiles_update)
            has_backward = part is None or part.has_batch
            on_device = self._skip_on_device(update, keys)
            graph = self.step.graph.copy() if has_backward else flush_graph(self.step.graph)
            passes = training_passes(
                max_norm=options.max_norm,
                norm_type=options.norm_type,
                clip_value=options.clip_value,
                error_if_nonfinite=options.error_if_nonfinite,
                scales_loss=options.loss_scale is not None,
                masters=frozenset(masters),
                accumulate=self._accumulate(part),
                has_backward=has_backward,
                nonfinite=options.nonfinite,
                update=update.graph,
                for_compiler=compiles_update,
                folds=self._folds(compiles_update),
                on_device=on_device,
                spares=options.spare_backward,
            )
            records = run_passes(graph, passes)
            if has_backward:
                plan = self.plan
                if plan is None:
                    start = time.perf_counter()
                    plan, compacted = options.planning.plan(graph, self._optimizer, self._planned_for)
                    self.planning_seconds = time.perf_counter() - start
                    records += compacted
                records += apply_plan(graph, plan, uses_inductor=options.uses_inductor)
                self.plan = self.plan or options.planning.replayed(graph, plan, self._planned_for)
        runs_once = graph.output_of(OutputRole.STATE) is not None  # the first update, which creates the state
        trained: dict[str, Tensor] = {key: self._params[key] for key in keys}
        program = graph
        if options.uses_inductor:
            program = lowered(graph, self._regions, compiles_update=compiles_update and not runs_once)
        return Variant(
            graph,
            records,
            Binding(graph, self._tensors, self._optimizer, self.state),
            Executor(program),
            update,
            OptimizerGuard(update, self._optimizer, trained),
            keys,
            options.is_fast or options.uses_inductor,
            on_device is not None,
            part,
        )

    def _folds(self, compiles_update: bool) -> bool:
        options, scale = self._options, self._options.loss_scale
        initial = scale.init_scale if isinstance(scale, LossScale) else scale
        reader_can_scale = options.uses_inductor or not compiles_update  # a compiled update, or fused kernels
        return options.is_fast and reader_can_scale and can_fold(options.norm_type, initial)

    def _skip_on_device(self, update: CapturedUpdate, keys: list[str]) -> SkipOnDevice | None:
        """How an update is left out without reading whether everything was finite; None where it has to be read."""
        options, trained = self._options, [self._params[key] for key in keys]
        if reads_are_cheap(self._device) or options.nonfinite != "skip" or options.error_if_nonfinite:
            return None
        if not options.max_norm or not is_skippable(update.graph):
            return None
        if len({p.dtype for p in trained}) > 1 or not all(p.numel() for p in trained):
            return None  # the code counts norms, which are grouped by dtype
        policy = options.loss_scale if isinstance(options.loss_scale, LossScale) else None
        return SkipOnDevice(None if policy is None else policy.numbers)

    def _build_micro(self, part: Part | None) -> Program:
        masters = frozenset(self.state.masters.of(self._keys(part)))
        with garbage_collection_paused():
            graph = self.step.graph.copy()
            passes = backward_passes(
                scales_loss=self._options.loss_scale is not None,
                masters=masters,
                accumulate=self._accumulate(part),
                spares=self._options.spare_backward,
            )
            records = run_passes(graph, passes)
            planning = self._options.planning
            if self.plan is None and not planning.decides_nothing(graph, self._planned_for):
                self.variant(self.last_part)  # a plan is for the whole step
            if self.plan is not None:
                records += apply_plan(graph, self.plan, uses_inductor=self._options.uses_inductor)
        program = lowered(graph, self._regions, compiles_update=False) if self._options.uses_inductor else graph
        return Program(graph, records, Binding(graph, self._tensors, self._optimizer, self.state), Executor(program))

    def _accumulate(self, part: Part | None) -> Accumulate | None:
        return None if part is None else Accumulate(tuple(self._keys(part)), part.held, part.weighted)

    def _keys(self, part: Part | None) -> list[str]:
        """Parameters that have a gradient after this part of the window, in the model's order."""
        if part is None:
            return self.step.grad_keys
        own = set(self.step.grad_keys) if part.has_batch else set()
        return [key for key in self._params if key in part.held or key in own]
