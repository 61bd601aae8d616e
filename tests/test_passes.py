"""Each pass after `clean` does what eager does, bit for bit, alone and all together."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import stepgraph.passes
from stepgraph.errors import VerificationError
from stepgraph.graph import InputRole, OutputRole, Phase
from stepgraph.graph.ops import NONFINITE_GRAD, NONFINITE_LOSS, NONFINITE_NORM
from stepgraph.passes import PASSES, Pass, run_passes, training_passes
from stepgraph.passes.clip import Clip
from stepgraph.passes.grad_norm import GradNorm
from stepgraph.passes.update import Update

from . import fixtures
from .graphs import (
    assert_same,
    assert_same_run,
    assert_same_tables,
    eager_gradients,
    of_fixture,
    of_function,
    own,
    run,
    subject,
)

pytestmark = pytest.mark.usefixtures("no_knobs")


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


@pytest.mark.feature("CLIP-6")
def test_norm_and_clip_are_batched_kernels_where_eager_s_are() -> None:
    graph = of_fixture("MLP").graph
    run_passes(graph, [GradNorm(), Clip(max_norm=1.0)])
    norm_phase = [str(n.target) for n in graph.calls if n.meta["phase"] is Phase.NORM]
    assert norm_phase.count("aten._foreach_norm.Scalar") == norm_phase.count("aten._foreach_mul_.Tensor") == 1
    assert "aten.mul_.Tensor" not in norm_phase


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


def test_skip_changes_nothing_where_all_is_finite() -> None:
    of = of_fixture("MLP")
    with_gate, without = of.rewritten(), of.graph
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
    after = run(of.rewritten(1.0), of, (poisoned, y))
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
    assert int(run(of.rewritten(1.0), of).outputs["nonfinite"]) == NONFINITE_NORM  # type: ignore[arg-type]
    assert int(run(of.rewritten(None), of).outputs["nonfinite"]) == 0  # type: ignore[arg-type]


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
    after = run(of.rewritten(0.01), of)
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


NO_PASSES = ("__init__", "base", "pipeline", "fused_kernels")


def _pass_files() -> list[str]:
    folder = Path(inspect.getfile(stepgraph.passes)).parent
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in NO_PASSES)


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
