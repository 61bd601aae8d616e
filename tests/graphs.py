"""Captured graphs of small models, and runs of them to compare with each other and with eager."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from stepgraph.capture import (
    CapturedStep,
    CapturedUpdate,
    LossCall,
    capture_forward_backward,
    capture_update,
    flatten_batch,
    tensors_of,
    update_targets,
)
from stepgraph.graph import Phase, StepGraph, family_of
from stepgraph.passes import Accumulate, backward_passes, run_passes, training_passes
from stepgraph.runtime import Binding, Executor, StepState

from . import fixtures, oracle


class Subject(NamedTuple):
    """A model with its captured step and update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    loss_fn: Any
    step: CapturedStep
    update: CapturedUpdate

    @property
    def graph(self) -> StepGraph:
        """A fresh copy of the captured graph."""
        return self.step.graph.copy()

    def micro(self) -> StepGraph:
        """The graph of a micro-batch in the midst of a window, with a weight."""
        graph = self.graph
        keys = tuple(self.step.grad_keys)
        run_passes(graph, backward_passes(accumulate=Accumulate(keys, frozenset(keys), weighted=True)))
        return graph

    def last_of_window(self, **options: Any) -> StepGraph:
        """The graph of the last micro-batch of a window."""
        keys = tuple(self.step.grad_keys)
        return self.rewritten(max_norm=1.0, accumulate=Accumulate(keys, frozenset(keys)), **options)

    def rewritten(self, max_norm: float | None = None, **options: Any) -> StepGraph:
        """The graph of the whole step, which skips its update where something is not finite."""
        graph = self.graph
        run_passes(graph, training_passes(max_norm=max_norm, nonfinite="skip", update=self.update.graph, **options))
        return graph


def subject(
    fixture: tuple[nn.Module, Any, fixtures.LossFn | None], optimizer: str | torch.optim.Optimizer = "sgd_momentum"
) -> Subject:
    """Captures a model with an optimizer of all its parameters, or with one that is there already."""
    model, batch, loss_fn = fixture
    bound = oracle.OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer
    tensors = tensors_of(model)
    step = capture_forward_backward(
        model, tensors, {id(p) for p in model.parameters()}, LossCall(loss_fn), flatten_batch(batch)
    )
    update = capture_update(bound, {held.key: held.tensor for held in tensors.params}, update_targets(step))
    return Subject(model, bound, batch, loss_fn, step, update)


@functools.cache
def of_fixture(name: str, optimizer: str = "sgd_momentum") -> Subject:
    """The captured step of a fixture; tests change copies only."""
    return subject(fixtures.FIXTURES[name](), optimizer)


class Run(NamedTuple):
    """What one run of a graph gave: outputs by meaning, and the tensors of model and optimizer afterwards."""

    outputs: dict[str, Tensor | None]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: list[dict[str, Any]]
    random_state: Tensor


def run(graph: StepGraph, of: Subject, batch: Any = None) -> Run:
    """Executes a graph on copies of model, optimizer and batch, from a fixed random state."""
    model, optimizer, own_batch = copy.deepcopy((of.model, of.optimizer, of.batch))
    binding = Binding(graph, tensors_of(model), optimizer, StepState())
    leaves = [v for v in flatten_batch(own_batch if batch is None else batch).leaves if isinstance(v, Tensor)]
    with fixtures.seeded(0):
        outputs = Executor(graph)(binding.inputs(leaves, 0))
        random_state = torch.get_rng_state()
    binding.store(outputs)
    state = [dict(optimizer.state[p]) for p in model.parameters() if p in optimizer.state]
    named = {str(spec): value for spec, value in zip(graph.outputs, outputs, strict=True)}
    return Run(named, dict(model.named_parameters()), dict(model.named_buffers()), state, random_state)


def eager_gradients(of: Subject, batch: Any = None) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Plain PyTorch up to the gradients, on copies, from the same random state as `run`."""
    model, optimizer, own_batch = copy.deepcopy((of.model, of.optimizer, of.batch))
    with fixtures.seeded(0):
        loss = of.loss_fn(model, own_batch if batch is None else batch)
        loss.backward()
    return model, optimizer, loss.detach()


def assert_same(left: Tensor | None, right: Tensor | None) -> None:
    """Equal bits."""
    assert left is not None
    assert right is not None
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert torch.equal(oracle.bits(left), oracle.bits(right))


def assert_same_tables(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Equal keys, and equal bits under each."""
    assert left.keys() == right.keys()
    for name in left:
        assert_same(left[name], right[name])


def assert_same_run(left: Run, right: Run) -> None:
    """Whether what both runs have in common has the same bits."""
    common = left.outputs.keys() & right.outputs.keys()
    assert "loss" in common
    for name in common:
        assert_same(left.outputs[name], right.outputs[name])
    assert_same_tables(left.params, right.params)
    assert_same_tables(left.buffers, right.buffers)
    assert torch.equal(left.random_state, right.random_state)


def families(graph: StepGraph, phase: Phase | None = None) -> list[str]:
    """Operator families in execution order."""
    return [family_of(n.target) for n in graph.calls if phase is None or n.meta["phase"] is phase]


def own(model: nn.Module, batch: Tensor | None = None) -> fixtures.Fixture:
    """A fixture of a model that returns its loss."""
    return fixtures.Fixture(
        model, torch.arange(24.0).reshape(6, 4).sin() if batch is None else batch, fixtures.own_output
    )


def added(graph: StepGraph, before: fx.Node, phase: Phase, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call that a pass adds."""
    with graph.graph.inserting_before(before):
        return graph.add_call(target, args, kwargs, module="added", phase=phase)


class FromFunction(nn.Module):
    """A linear layer, BatchNorm and a weight, and a forward given as a function of the module and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        with fixtures.seeded(0):
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.weight = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def of_function(function: Callable[[Any, Tensor], Tensor]) -> Subject:
    """Captures a forward given as a function."""
    return subject(own(FromFunction(function)))
