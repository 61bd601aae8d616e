"""`clean` drops what nobody reads, bypasses what changes nothing and merges equal calls; every bit and every effect stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from stepgraph.graph import InputRole, OutputRole, OutputSpec, Phase, StepGraph, family_of, storages_of
from stepgraph.passes import run_passes
from stepgraph.passes.clean import Clean
from stepgraph.passes.clip import Clip
from stepgraph.passes.grad_norm import GradNorm

from . import fixtures
from .graphs import (
    Subject,
    added,
    assert_same,
    assert_same_run,
    assert_same_tables,
    eager_gradients,
    families,
    of_fixture,
    of_function,
    own,
    run,
    subject,
)

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("no_knobs")


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


def test_clean_never_merges_across_phases() -> None:
    of = of_function(lambda self, x: self.linear(x.sin()).square().mean())
    graph = of.graph
    forward = next(n for n in graph.calls if family_of(n.target) == "sin")
    users = [n for n in forward.users if n.meta["phase"] is Phase.BACKWARD]
    assert users, "backward needs the input of the linear layer"
    first = next(n for n in graph.calls if n.meta["phase"] is Phase.BACKWARD)
    again = added(graph, first, Phase.BACKWARD, aten.sin.default, *forward.args)  # as a user writes a recompute
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
    pair = [added(graph, end, Phase.FORWARD, aten.mul.Scalar, operand, number) for number in (left, right)]
    graph.set_outputs(
        [*graph.output_values, added(graph, end, Phase.FORWARD, aten.stack.default, pair)],
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
