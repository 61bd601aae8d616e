"""Each pass does its job, leaves alone what needs nothing, and keeps every bit; the runner holds passes to what they say."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import stepgraph as sg
import stepgraph.passes
from stepgraph import knobs
from stepgraph.capture import (
    CapturedStep,
    CapturedUpdate,
    LossCall,
    capture_forward_backward,
    capture_update,
    flatten_batch,
    tensors_of,
)
from stepgraph.errors import ConfigError, VerificationError
from stepgraph.graph import InputRole, OutputRole, OutputSpec, Phase, StepGraph, family_of, storages_of
from stepgraph.graph.ops import NONFINITE_GRAD, NONFINITE_LOSS, NONFINITE_NORM
from stepgraph.graph.verifier import verify
from stepgraph.passes import PASSES, Pass, PassRecord, PassResult, run_passes, training_passes
from stepgraph.passes.clean import Clean
from stepgraph.passes.clip import Clip
from stepgraph.passes.grad_norm import GradNorm
from stepgraph.passes.update import Update
from stepgraph.runtime import Binding, EagerExecutor

from . import fixtures, oracle

aten = torch.ops.aten


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


def subject(fixture: fixtures.Fixture, optimizer: str = "sgd_momentum") -> Subject:
    """Captures a model."""
    model, batch, loss_fn = fixture
    bound = oracle.OPTIMIZERS[optimizer](model.parameters())
    tensors = tensors_of(model)
    step = capture_forward_backward(
        model, tensors, {id(p) for p in model.parameters()}, LossCall(loss_fn), flatten_batch(batch)
    )
    update = capture_update(bound, {held.key: held.tensor for held in tensors.params}, step)
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
    binding = Binding(graph, tensors_of(model), optimizer)
    leaves = [v for v in flatten_batch(own_batch if batch is None else batch).leaves if isinstance(v, Tensor)]
    with fixtures.seeded(0):
        outputs = EagerExecutor(graph)(binding.inputs(leaves, 0))
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


def cleaned(of: Subject, **options: Any) -> StepGraph:
    """The captured graph after `clean` alone."""
    graph = of.graph
    run_passes(graph, [Clean(**options)])
    return graph


# clean: dead code.


@pytest.mark.case("B49")
def test_clean_keeps_a_batch_norm_whose_output_nobody_reads() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.norm(x)
        return self.linear(x).square().mean()

    of = of_function(forward)
    graph = cleaned(of)
    assert families(graph).count("native_batch_norm") == 1
    assert families(graph).count("add_") == 1, "the counter of batches"
    norm = next(n for n in graph.calls if family_of(n.target) == "native_batch_norm")
    assert not norm.users, "nothing but its effect is left of it"
    eager_model, _, _ = eager_gradients(of)
    after = run(graph, of).buffers
    assert_same_tables(after, dict(eager_model.named_buffers()))
    assert not torch.equal(after["norm.running_mean"], torch.zeros(4))


def test_clean_keeps_a_random_draw_whose_result_nobody_reads() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        torch.rand_like(x)
        return nn.functional.dropout(self.linear(x), 0.5).square().mean()

    of = of_function(forward)
    graph = cleaned(of)
    assert families(graph).count("rand_like") == 1
    assert_same(run(graph, of).outputs["loss"], eager_gradients(of)[2])


def test_clean_drops_what_nobody_reads() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        (x.sin() * 2).exp()  # a chain, so that one dead call keeps another alive
        return self.linear(x).square().mean()

    of = of_function(forward)
    assert {"sin", "exp"} <= set(families(of.graph))
    graph = cleaned(of)
    assert not {"sin", "exp"} & set(families(graph))
    assert_same_run(run(of.graph, of), run(graph, of))


def test_clean_keeps_an_unused_write() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.norm.running_mean.add_(1.0)
        return self.linear(x).square().mean()

    of = of_function(forward)
    assert families(cleaned(of)).count("add_") == 1
    assert_same(run(cleaned(of), of).buffers["norm.running_mean"], torch.ones(4))


def test_clean_keeps_a_check_that_raises() -> None:
    of = of_function(lambda self, x: self.linear(torch.linalg.inv(x[:4] + torch.eye(4))).square().mean())
    graph = cleaned(of)
    with pytest.raises(torch.linalg.LinAlgError):
        eager_gradients(of, -torch.eye(4))
    with pytest.raises(torch.linalg.LinAlgError):
        run(graph, of, -torch.eye(4))


# clean: no-ops.


def test_clean_bypasses_views_that_change_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y.view(6, 4).expand(6, 4) * y.detach()).mean()

    of = of_function(forward)
    assert {"detach", "view", "expand"} <= set(families(of.graph, Phase.FORWARD))
    graph = cleaned(of)
    assert not {"detach", "view", "expand"} & set(families(graph, Phase.FORWARD))
    assert_same_run(run(of.graph, of), run(graph, of))


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[:3], lambda x: x[:, None], lambda x: x.clone(), lambda x: x.float() + 0.0]
)
def test_clean_keeps_what_changes_something(view: Callable[[Tensor], Tensor]) -> None:
    of = of_function(lambda self, x: view(self.linear(x)).exp().mean())
    graph = cleaned(of)
    kept = [f for f in families(of.graph, Phase.FORWARD) if f != "detach"]
    assert families(graph, Phase.FORWARD) == kept
    assert_same_run(run(of.graph, of), run(graph, of))


# clean: common subexpressions.


def test_clean_merges_equal_calls_of_one_phase() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (self.linear(x.sin() * 2) * (x.sin() * 2)).mean()

    of = of_function(forward)
    assert families(of.graph, Phase.FORWARD).count("sin") == 2
    graph = cleaned(of)
    assert families(graph, Phase.FORWARD).count("sin") == 1
    assert families(graph, Phase.FORWARD).count("mul") == families(of.graph, Phase.FORWARD).count("mul") - 1
    assert_same_run(run(of.graph, of), run(graph, of))
    assert families(cleaned(of, merge=False), Phase.FORWARD).count("sin") == 2, "the option turns it off"


def _added(graph: StepGraph, before: fx.Node, phase: Phase, target: Any, *args: Any) -> fx.Node:
    with graph.graph.inserting_before(before):
        return graph.add_call(target, args, module="added", phase=phase)


def test_clean_never_merges_across_phases() -> None:
    of = of_function(lambda self, x: self.linear(x.sin()).square().mean())
    graph = of.graph
    forward = next(n for n in graph.calls if family_of(n.target) == "sin")
    users = [n for n in forward.users if n.meta["phase"] is Phase.BACKWARD]
    assert users, "backward needs the input of the linear layer"
    first = next(n for n in graph.calls if n.meta["phase"] is Phase.BACKWARD)
    again = _added(graph, first, Phase.BACKWARD, aten.sin.default, *forward.args)  # as a user writes a recompute
    for user in users:
        user.replace_input_with(forward, again)
    before = run(graph, of)
    run_passes(graph, [Clean()])
    assert families(graph, Phase.FORWARD).count("sin") == 1
    assert families(graph, Phase.BACKWARD).count("sin") == 1
    assert_same_run(before, run(graph, of))


def test_clean_never_merges_two_gradients() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.first).sum() + (x * self.second).sum()).square()

    of = subject(own(Twins()))
    graph = cleaned(of)
    first, second = graph.output_nodes(OutputRole.GRAD).values()
    assert first is not second
    run_passes(graph, [GradNorm(), Clip(max_norm=0.1)])
    model, _, _ = eager_gradients(of)
    norm = clip_grad_norm_(model.parameters(), 0.1)
    after = run(graph, of)
    assert_same(after.outputs["norm"], norm)
    assert_same(after.outputs["grad first"], model.first.grad)
    assert_same(after.outputs["grad second"], model.second.grad)


def test_clean_never_merges_reads_around_a_write() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        before = self.norm.running_mean.exp()
        y = self.norm(self.linear(x))
        return (y * before + self.norm.running_mean.exp()).square().mean()

    of = of_function(forward)
    graph = cleaned(of)
    assert families(graph, Phase.FORWARD).count("exp") == 2
    assert_same(run(graph, of).outputs["loss"], eager_gradients(of)[2])


def test_clean_never_merges_values_that_are_written_later() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        kept, counted = x.sin(), x.sin()
        counted.add_(1.0)
        return (self.linear(x) * kept * counted).mean()

    of = of_function(forward)
    graph = cleaned(of)
    assert families(graph, Phase.FORWARD).count("sin") == 2
    assert_same(run(graph, of).outputs["loss"], eager_gradients(of)[2])


def test_clean_never_merges_memory_that_is_filled_later() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        drop = nn.functional.dropout
        return (drop(self.linear(x), 0.5) * drop(self.linear(x), 0.5)).mean()

    of = of_function(forward)
    graph = cleaned(of)
    assert families(graph, Phase.FORWARD).count("bernoulli_") == 2
    assert families(graph, Phase.FORWARD).count("empty_like") == 2
    assert families(graph, Phase.FORWARD).count("addmm") == 1, "what the draws have in common is merged"
    assert_same(run(graph, of).outputs["loss"], eager_gradients(of)[2])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (complex(0.0, 0.0), complex(-0.0, 0.0)),
        (complex(1.0, 0.0), complex(1.0, -0.0)),
    ],
)
def test_clean_never_merges_constants_that_only_python_calls_equal(left: Any, right: Any) -> None:
    of = of_function(lambda self, x: self.linear(x).square().mean())
    graph = of.graph
    end = next(n for n in graph.calls if n.meta["phase"] is Phase.BACKWARD)
    operand = graph.input_nodes(InputRole.BATCH)["batch"]
    pair = [_added(graph, end, Phase.FORWARD, aten.mul.Scalar, operand, number) for number in (left, right)]
    graph.set_outputs(
        [*graph.output_values, _added(graph, end, Phase.FORWARD, aten.stack.default, pair)],
        [*graph.outputs, OutputSpec(OutputRole.AUX, "0")],
    )
    before = run(graph, of)
    run_passes(graph, [Clean()])
    assert families(graph).count("mul") - families(of.graph).count("mul") == 2
    aux_before, aux_after = before.outputs["aux 0"], run(graph, of).outputs["aux 0"]
    assert_same(aux_before, aux_after)


def test_clean_merges_equal_constants() -> None:
    of = of_function(lambda self, x: (self.linear(x) * (x * 0.5) * (x * 0.5)).mean())
    assert families(cleaned(of), Phase.FORWARD).count("mul") == families(of.graph, Phase.FORWARD).count("mul") - 1


def test_values_of_merged_calls_are_known_to_share_memory() -> None:
    """After a merge, a view of the call that is gone is a view of the call that stayed, and its metadata says so."""
    of = of_function(lambda self, x: (self.linear(x.sin().t().contiguous().t()) + x.sin()[:, :1]).square().mean())
    graph = cleaned(of)
    merged = next(n for n in graph.calls if family_of(n.target) == "sin")
    views = [n for n in merged.users if family_of(n.target) in ("t", "slice")]
    assert len(views) == 2
    for view in views:
        assert storages_of(view) == storages_of(merged), f"{view.meta['key']} has other memory than its base"


@pytest.mark.parametrize("name", fixtures.FIXTURES)
def test_clean_keeps_every_bit(name: str) -> None:
    of = of_fixture(name)
    assert_same_run(run(of.graph, of), run(cleaned(of), of))


@pytest.mark.parametrize("name", ["MLP", "DROP", "BN"])
def test_clean_leaves_a_clean_graph_alone(name: str) -> None:
    graph = cleaned(of_fixture(name))
    before = str(graph)
    assert Clean().run(graph).changed is False
    assert str(graph) == before


# grad_norm


@pytest.mark.parametrize("name", fixtures.FIXTURES)
@pytest.mark.feature("CLIP-7")
def test_grad_norm_is_that_of_eager(name: str) -> None:
    of = of_fixture(name)
    graph = of.graph
    run_passes(graph, [GradNorm()])
    model, _, loss = eager_gradients(of)
    after = run(graph, of)
    assert_same(after.outputs["norm"], get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert_same(after.outputs["loss"], loss)
    assert_same_run(run(of.graph, of), after)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_grad_norm_of_another_type(norm_type: float) -> None:
    of = of_fixture("MLP")
    graph = of.graph
    run_passes(graph, [GradNorm(norm_type=norm_type)])
    model, _, _ = eager_gradients(of)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert_same(run(graph, of).outputs["norm"], get_total_norm(grads, norm_type))


def test_grad_norm_groups_dtypes_as_eager_does() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with fixtures.seeded(0):
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).double()
                self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c(self.b(self.a(x).double()).float()).double()).square().mean().float()

    of = subject(own(Mixed()))
    graph = of.graph
    (record,) = run_passes(graph, [GradNorm()])
    assert record.result.touched == {"gradients": 8}
    model, _, _ = eager_gradients(of)
    assert_same(run(graph, of).outputs["norm"], get_total_norm([p.grad for p in model.parameters()]))


# clip


@pytest.mark.parametrize("name", fixtures.FIXTURES)
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
@pytest.mark.feature("CLIP-1", "CLIP-3")
def test_clip_gives_the_gradients_of_eager(name: str, max_norm: float) -> None:
    of = of_fixture(name)
    graph = of.graph
    run_passes(graph, [GradNorm(), Clip(max_norm=max_norm)])
    model, _, _ = eager_gradients(of)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    after = run(graph, of)
    assert_same(after.outputs["norm"], norm)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_same(after.outputs[f"grad {key}"], parameter.grad)
    factor = float(after.outputs["clip_factor"])  # type: ignore[arg-type]
    assert factor == 1.0 if max_norm > 1 else 0.0 < factor < 1.0


def test_clip_needs_the_norm() -> None:
    graph = of_fixture("MLP").graph
    with pytest.raises(VerificationError, match=r"'clip' requires the outputs \['norm'\].*before it"):
        run_passes(graph, [Clip(max_norm=1.0)])


# skip


def _skipping(of: Subject, max_norm: float | None = None) -> StepGraph:
    graph = of.graph
    run_passes(graph, training_passes(max_norm=max_norm, nonfinite="skip", update=of.update.graph))
    return graph


def test_skip_changes_nothing_where_all_is_finite() -> None:
    of = of_fixture("MLP")
    with_gate, without = _skipping(of), of.graph
    run_passes(without, training_passes(max_norm=None, nonfinite="ignore", update=of.update.graph))
    assert without.output_of(OutputRole.NONFINITE) is None
    gated = run(with_gate, of)
    assert int(gated.outputs["nonfinite"]) == 0  # type: ignore[arg-type]
    assert_same_run(gated, run(without, of))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw_fused"])
def test_skip_leaves_parameters_and_state_alone(bad: float, optimizer: str) -> None:
    of = of_fixture("MLP", optimizer)
    x, y = of.batch
    poisoned = x.clone()
    poisoned[0, 0] = bad
    after = run(_skipping(of, 1.0), of, (poisoned, y))
    assert int(after.outputs["nonfinite"]) != 0  # type: ignore[arg-type]
    assert_same_tables(after.params, dict(of.model.named_parameters()))
    assert after.state == []


def test_skip_says_what_was_not_finite() -> None:
    code = torch.ops.stepgraph.nonfinite_code
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    one, inf = torch.ones(()), torch.tensor(math.inf)
    assert int(code(one, one, [good, good], True)) == 0
    assert int(code(inf, one, [good, good], True)) == NONFINITE_LOSS
    assert int(code(one, inf, [good, bad], True)) == NONFINITE_GRAD + 1
    assert int(code(inf, inf, [bad, bad], True)) == NONFINITE_GRAD
    assert int(code(one, inf, [good, good], True)) == NONFINITE_NORM
    assert int(code(one, inf, [good, good], False)) == 0
    assert int(code(inf, inf, [good, good], False)) == NONFINITE_LOSS


def test_a_norm_that_overflows_skips_only_under_clipping() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (self.weight * 1e30).sum()  # each gradient is finite, its square is not

    of = of_function(forward)
    assert int(run(_skipping(of, 1.0), of).outputs["nonfinite"]) == NONFINITE_NORM  # type: ignore[arg-type]
    assert int(run(_skipping(of, None), of).outputs["nonfinite"]) == 0  # type: ignore[arg-type]


# update


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum", "adamw_forloop", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("name", ["MLP", "TIED", "BN", "DROP", "LORA", "ODD"])
def test_update_is_that_of_eager(name: str, optimizer: str) -> None:
    of = of_fixture(name, optimizer)
    graph = of.graph
    run_passes(graph, [Update(update=of.update.graph)])
    assert not graph.output_nodes(OutputRole.GRAD), "gradients are consumed"
    model, bound, loss = eager_gradients(of)
    bound.step()
    after = run(graph, of)
    assert_same(after.outputs["loss"], loss)
    assert_same_tables(after.params, dict(model.named_parameters()))
    assert_same_tables(after.buffers, dict(model.named_buffers()))
    assert len(after.state) == len([p for p in model.parameters() if bound.state.get(p)])
    for mine, parameter in zip(after.state, [p for p in model.parameters() if bound.state.get(p)], strict=True):
        assert_same_tables(mine, bound.state[parameter])


def test_update_keeps_the_update_graph_it_was_given() -> None:
    of = of_fixture("MLP")
    before = str(of.update.graph)
    run_passes(of.graph, [Update(update=of.update.graph)])
    assert str(of.update.graph) == before


def test_update_of_fewer_gradients_than_there_are_is_noticed() -> None:
    of = of_fixture("MLP")
    fewer = of.update.graph.copy()
    unread, read = list(fewer.input_nodes(InputRole.GRAD).values())[:2]
    unread.replace_all_uses_with(read)
    del fewer.inputs[fewer.placeholders.index(unread)]
    fewer.graph.erase_node(unread)
    with pytest.raises(VerificationError, match="something was missed"):
        run_passes(of.graph, [Update(update=fewer)])


# The whole pipeline.


@pytest.mark.parametrize("name", fixtures.FIXTURES)
def test_all_passes_keep_every_bit_of_eager(name: str) -> None:
    of = of_fixture(name, "adamw_fused")
    model, bound, loss = eager_gradients(of)
    norm = clip_grad_norm_(model.parameters(), 0.01)
    bound.step()
    after = run(_skipping(of, 0.01), of)
    assert_same(after.outputs["loss"], loss)
    assert_same(after.outputs["norm"], norm)
    assert_same_tables(after.params, dict(model.named_parameters()))
    assert_same_tables(after.buffers, dict(model.named_buffers()))


def test_training_passes_follow_the_arguments() -> None:
    update = of_fixture("MLP").update.graph

    def names(max_norm: float | None, nonfinite: str) -> list[str]:
        return [p.name for p in training_passes(max_norm=max_norm, nonfinite=nonfinite, update=update)]

    assert names(1.0, "skip") == ["clean", "grad_norm", "clip", "skip", "update"]
    assert names(None, "raise") == ["clean", "grad_norm", "skip", "update"]
    assert names(0.0, "ignore") == ["clean", "grad_norm", "update"]


# What every pass is.


def _pass_files() -> list[str]:
    folder = Path(inspect.getfile(stepgraph.passes)).parent
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "base", "pipeline"))


def test_every_pass_is_listed_and_named_like_its_file() -> None:
    found = {}
    for stem in _pass_files():
        module = importlib.import_module(f"stepgraph.passes.{stem}")
        classes = [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Pass)
            and value is not Pass
            and value.__module__ == module.__name__
        ]
        assert len(classes) == 1, f"{stem}.py defines {len(classes)} passes"
        assert classes[0].name == stem
        found[stem] = classes[0]
    assert found == PASSES


@pytest.mark.parametrize("item", PASSES.values(), ids=PASSES)
def test_passes_are_frozen_dataclasses_that_say_what_they_touch(item: type[Pass]) -> None:
    assert dataclasses.is_dataclass(item)
    with pytest.raises(dataclasses.FrozenInstanceError):
        item(**{f.name: 1.0 for f in dataclasses.fields(item)}).name = "other"  # type: ignore[misc]
    assert item.touches, "a pass that touches no phase can do nothing"
    assert item.__doc__


# The runner.


@dataclasses.dataclass(frozen=True)
class Hollow(Pass):
    """Does nothing; tests change what it says it does."""

    name: ClassVar[str] = "hollow"

    def run(self, graph: StepGraph) -> PassResult:
        return PassResult(changed=False)


def _pass_that(run: Callable[[StepGraph], PassResult | None], **declared: Any) -> Pass:
    def call(self: Pass, graph: StepGraph) -> PassResult:
        return run(graph) or PassResult(changed=True)

    return type("Made", (Hollow,), {"run": call, "name": "made", **declared})()


def test_runner_reports_each_pass() -> None:
    of = of_fixture("MLP")
    seen: list[tuple[int, PassRecord]] = []
    graph = of.graph
    passes = training_passes(max_norm=1.0, nonfinite="skip", update=of.update.graph)
    records = run_passes(graph, passes, on_pass=lambda g, record: seen.append((len(g.calls), record)))
    assert [r.name for r in records] == [p.name for p in passes]
    assert [r for _, r in seen] == records
    assert seen[-1][0] == len(graph.calls)
    assert all(r.seconds > 0 for r in records)
    assert all(r.verify_seconds > 0 for r in records)
    clean, norm, clip, skip, update = records
    assert clean.op_changes == {"aten.detach.default": -3}
    assert norm.op_changes["aten._foreach_norm.Scalar"] == 1
    assert clip.op_changes["aten._foreach_mul_.Tensor"] == 1
    assert skip.op_changes == {"stepgraph.gate.default": 1, "stepgraph.nonfinite_code.default": 1}
    assert sum(update.op_changes.values()) == len(of.update.graph.calls)
    assert "aten._foreach_norm.Scalar: +1" in str(norm)
    assert str(norm).startswith("grad_norm (")


def test_runner_reports_no_change() -> None:
    (record,) = run_passes(of_fixture("MLP").graph, [Hollow()])
    assert record.op_changes == {}
    assert str(record).endswith("no change")


def test_required_output_that_is_missing() -> None:
    item = _pass_that(lambda graph: None, requires=(OutputRole.CLIP_FACTOR,))
    with pytest.raises(VerificationError, match=r"'made' requires the outputs \['clip_factor'\].*before it"):
        run_passes(of_fixture("MLP").graph, [item])


def test_guaranteed_output_that_is_missing() -> None:
    item = _pass_that(lambda graph: None, guarantees=(OutputRole.NORM,))
    with pytest.raises(VerificationError, match=r"'made' guarantees the outputs \['norm'\].*after it"):
        run_passes(of_fixture("MLP").graph, [item])


@pytest.mark.parametrize("touched", [{"gradients": 3}, {}, {"gradients": 4, "losses": 1}])
def test_pass_that_misses_something(touched: dict[str, int]) -> None:
    item = _pass_that(lambda graph: PassResult(True, intended={"gradients": 4}, touched=touched))
    with pytest.raises(VerificationError, match="'made' was meant to touch .*something was missed"):
        run_passes(of_fixture("MLP").graph, [item])


def _negates_in(phase: Phase) -> Callable[[StepGraph], None]:
    def run(graph: StepGraph) -> None:
        node = next(n for n in graph.calls if n.meta["phase"] is phase)
        with graph.graph.inserting_before(node):
            graph.add_call(aten.neg.default, (graph.placeholders[0],), module="added", phase=phase)

    return run


def _swaps_an_operand(graph: StepGraph) -> None:
    node = next(n for n in graph.calls if family_of(n.target) == "mse_loss")
    node.args = (node.args[1], node.args[0])


def _changes_a_constant(graph: StepGraph) -> None:
    node = next(n for n in graph.calls if family_of(n.target) == "mse_loss_backward")
    node.args = (*node.args[:3], 2)


def _changes_a_keyword(graph: StepGraph) -> None:
    node = next(n for n in graph.calls if family_of(n.target) == "ones_like")
    node.kwargs = {**node.kwargs, "memory_format": torch.contiguous_format}


def _moves_a_node(graph: StepGraph) -> None:
    first, second = [n for n in graph.calls if family_of(n.target) == "t" and n.meta["phase"] is Phase.FORWARD]
    first.prepend(second)


@pytest.mark.parametrize(
    ("touches", "phase", "change"),
    [
        ({Phase.BACKWARD}, Phase.FORWARD, _negates_in(Phase.FORWARD)),
        ({Phase.FORWARD}, Phase.BACKWARD, _negates_in(Phase.BACKWARD)),
        ({Phase.BACKWARD}, Phase.FORWARD, _swaps_an_operand),
        ({Phase.FORWARD}, Phase.BACKWARD, _changes_a_constant),
        ({Phase.FORWARD}, Phase.BACKWARD, _changes_a_keyword),
        ({Phase.BACKWARD}, Phase.FORWARD, _moves_a_node),
    ],
)
def test_pass_that_changes_another_phase_than_it_says(
    touches: set[Phase], phase: Phase, change: Callable[[StepGraph], None]
) -> None:
    of = of_fixture("MLP")
    with pytest.raises(VerificationError, match=f"'made' changed the {phase} phase, which it did not say"):
        run_passes(of.graph, [_pass_that(change, touches=frozenset(touches))])
    (record,) = run_passes(of.graph, [_pass_that(change, touches=frozenset({phase}))])
    assert record.result.changed, "the same change is fine where it is declared"


def test_pass_that_breaks_a_rule() -> None:
    def breaks(graph: StepGraph) -> None:
        next(n for n in graph.calls if family_of(n.target) == "tanh").target = aten.sin.default

    item = _pass_that(breaks, touches=frozenset(Phase))
    with pytest.raises(VerificationError, match="metadata"):
        run_passes(of_fixture("MLP").graph, [item])


def test_graph_that_breaks_a_rule_before_any_pass() -> None:
    graph = of_fixture("MLP").graph
    next(n for n in graph.calls if family_of(n.target) == "tanh").target = aten.sin.default
    with pytest.raises(VerificationError, match="metadata"):
        run_passes(graph, [])


# Knobs.


@pytest.fixture(autouse=True)
def _no_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in knobs.KNOBS:
        monkeypatch.delenv(name, raising=False)


def _prepared(nonfinite: str = "skip") -> sg.TrainStep:
    model, batch, loss_fn = fixtures.mlp()
    step = sg.compile_train_step(
        model, oracle.OPTIMIZERS["sgd"](model.parameters()), loss_fn=loss_fn, nonfinite=nonfinite
    )
    step.prepare(batch)
    return step


def test_disable_leaves_an_optional_pass_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of = of_fixture("MLP")
    full = _skipping(of)
    monkeypatch.setenv("STEPGRAPH_DISABLE", " clean ,")
    graph = _skipping(of)
    assert "detach" in families(graph, Phase.BACKWARD)
    assert "detach" not in families(full, Phase.BACKWARD)
    assert_same_run(run(full, of), run(graph, of))
    assert "detach" in families(_prepared().graph, Phase.BACKWARD)


@pytest.mark.parametrize("name", [name for name, item in PASSES.items() if not item.optional])
def test_disable_refuses_a_pass_that_numbers_depend_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_DISABLE", f"clean,{name}")
    with pytest.raises(ConfigError, match=f"{name}.*numbers would change"):
        run_passes(of_fixture("MLP").graph, [Clean()])


def test_disable_refuses_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_DISABLE", "cleen")
    with pytest.raises(ConfigError, match="cleen.*passes are clean, grad_norm, clip, skip, update"):
        _prepared()


def test_dump_writes_the_graph_before_and_after_each_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on_demand"
    monkeypatch.setenv("STEPGRAPH_DUMP", str(folder))
    step = _prepared()
    names = ["clean", "grad_norm", "skip", "update"]
    folder = folder / "000"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{i:02d}_{name}_{when}.txt" for i, name in enumerate(names) for when in ("before", "after")
    )
    texts = {path.stem: path.read_text() for path in folder.iterdir()}
    assert "detach" in texts["00_clean_before"]
    assert "detach" not in texts["00_clean_after"]
    assert texts["00_clean_after"] == texts["01_grad_norm_before"]
    assert texts["03_update_after"] == f"{step.graph}\n"


def test_without_dump_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPGRAPH_DUMP", "")
    _prepared()
    assert not list(tmp_path.iterdir())


def _mislabelled(graph: StepGraph) -> StepGraph:
    """Breaks a rule that is checked at level 1."""
    next(n for n in graph.calls if family_of(n.target) == "tanh").target = aten.sin.default
    return graph


def _misdescribed(graph: StepGraph) -> StepGraph:
    """Breaks the rule that is checked at level 2 only: the sum would have another shape."""
    node = next(n for n in graph.calls if family_of(n.target) == "sum")
    node.args = (node.args[0], [1], True)
    return graph


@pytest.mark.parametrize(
    ("level", "corrupt", "is_noticed"),
    [
        ("0", _mislabelled, False),
        ("1", _mislabelled, True),
        ("2", _mislabelled, True),
        (None, _mislabelled, True),
        ("1", _misdescribed, False),
        (None, _misdescribed, False),
        ("2", _misdescribed, True),
    ],
)
def test_verify_levels(
    level: str | None, corrupt: Callable[[StepGraph], StepGraph], is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level is not None:
        monkeypatch.setenv("STEPGRAPH_VERIFY", level)
    graph = corrupt(of_fixture("MLP").graph)
    if is_noticed:
        with pytest.raises(VerificationError):
            run_passes(graph, [Hollow()])
    else:
        assert len(run_passes(graph, [Hollow()])) == 1


def test_verify_0_skips_the_check_of_other_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    item = _pass_that(_negates_in(Phase.FORWARD), touches=frozenset({Phase.BACKWARD}))
    monkeypatch.setenv("STEPGRAPH_VERIFY", "0")
    (record,) = run_passes(of_fixture("MLP").graph, [item])
    assert record.result.changed


@pytest.mark.parametrize("text", ["3", "-1", "yes", "", "1.0"])
def test_verify_refuses_other_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_VERIFY", text)
    with pytest.raises(ConfigError, match="STEPGRAPH_VERIFY must be 0, 1 or 2"):
        _prepared()


def _verify_changes_what_is_noticed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    broken = _mislabelled(of_fixture("MLP").graph)
    monkeypatch.setenv("STEPGRAPH_VERIFY", "0")
    run_passes(broken, [])
    monkeypatch.setenv("STEPGRAPH_VERIFY", "1")
    with pytest.raises(VerificationError):
        run_passes(broken, [])
    return True


def _dump_changes_what_is_written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    _prepared()
    before = list(folder.iterdir())
    monkeypatch.setenv("STEPGRAPH_DUMP", str(folder))
    _prepared()
    return list(folder.iterdir()) != before


def _disable_changes_the_graph(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    before = str(_prepared().graph)
    monkeypatch.setenv("STEPGRAPH_DISABLE", "clean")
    return str(_prepared().graph) != before


KNOB_EFFECTS: dict[str, Callable[[pytest.MonkeyPatch, Path], bool]] = {
    "STEPGRAPH_VERIFY": _verify_changes_what_is_noticed,
    "STEPGRAPH_DUMP": _dump_changes_what_is_written,
    "STEPGRAPH_DISABLE": _disable_changes_the_graph,
}


@pytest.mark.parametrize("name", knobs.KNOBS)
def test_every_knob_changes_something(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert KNOB_EFFECTS[name](monkeypatch, tmp_path)


def test_every_variable_that_is_read_is_a_listed_knob() -> None:
    root = Path(inspect.getfile(sg)).parent
    folders = [root, *(path.parent for path in root.glob("*/__init__.py"))]
    sources = {path: path.read_text() for folder in folders for path in folder.glob("*.py")}
    readers = {path.name for path, text in sources.items() if "os.environ" in text or "getenv" in text}
    assert readers == {"knobs.py"}


def test_whole_step_passes_level_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_VERIFY", "2")
    graph = _prepared().graph
    verify(graph, level=2)
    assert graph.output_of(OutputRole.NONFINITE) is not None
