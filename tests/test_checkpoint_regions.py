"""Checkpointed regions are captured once: one random draw, one write, and the numbers of a run without recompute."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import stepgraph as sg

from . import fixtures, oracle
from .fixtures import rows


@contextmanager
def no_recompute() -> Iterator[None]:
    """Checkpointed regions of this module and of the fixtures run like any other code."""

    def run(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **_: Any) -> Any:
        return function(*args)

    with mock.patch.object(fixtures, "run_checkpointed", run), mock.patch.dict(globals(), checkpoint=run):
        yield


def compare(
    build: Callable[[], nn.Module],
    batches: list[Any],
    loss_fn: fixtures.LossFn,
    *,
    optimizer: str = "adamw_foreach",
    max_norm: float | None = 1.0,
    eager_recomputes: bool = True,
    plan: str = "auto",
) -> sg.TrainStep:
    """Eager against the graph on twins, five steps, equal in every bit; returns the compiled step.

    Without `eager_recomputes` the eager run has no checkpointing at all, which is the answer where recompute changes one.
    """
    eager_model, graph_model = oracle.twin(build)
    eager_optimizer = oracle.OPTIMIZERS[optimizer]([p for p in eager_model.parameters() if p.requires_grad])
    graph_optimizer = oracle.OPTIMIZERS[optimizer]([p for p in graph_model.parameters() if p.requires_grad])
    if eager_recomputes:
        want = oracle.eager_steps(eager_model, eager_optimizer, loss_fn, batches, max_norm=max_norm)
    else:
        with no_recompute():
            want = oracle.eager_steps(eager_model, eager_optimizer, loss_fn, batches, max_norm=max_norm)
    step = sg.compile_train_step(graph_model, graph_optimizer, plan, loss_fn=loss_fn, max_norm=max_norm)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph_model, graph_optimizer, batches))
    return step


def compare_fixture(make: Callable[..., fixtures.Fixture], *, eager_recomputes: bool = True, **options: Any) -> Any:
    fixture = make(**options)
    return compare(
        lambda: make(**options).model,
        fixtures.batches(make, 5, **options),
        fixture.loss_fn,
        eager_recomputes=eager_recomputes,
    )


def operators(step: sg.TrainStep, name: str) -> int:
    return sum(count for operator, count in step.graph.op_counts().items() if f".{name}." in operator)


# B30: dropout in a region


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("eager_recomputes", [True, False])
@pytest.mark.case("B30")
@pytest.mark.feature("CKPT-5", "CKPT-6", "CKPT-12")
def test_dropout_is_drawn_once(use_reentrant: bool, eager_recomputes: bool) -> None:
    step = compare_fixture(fixtures.drop, use_reentrant=use_reentrant, eager_recomputes=eager_recomputes)
    assert operators(step, "bernoulli_") == 1
    (region,) = step.graph.regions
    assert region.module_path == "0"
    assert region.reentrant is use_reentrant
    assert region.source.startswith(fixtures.__file__)
    inside = [n for n in step.graph.calls if n.meta["region"] == 0]
    assert {n.meta["key"].module for n in inside if "." in n.meta["key"].module} == {"0.body.0", "0.body.1", "0.body.2"}
    assert any(n.meta["region"] is None for n in step.graph.calls)


@pytest.mark.case("B30")
@pytest.mark.feature("CKPT-12")
def test_first_step_gives_the_gradients_of_eager() -> None:
    eager, graph = fixtures.drop(), fixtures.drop()
    torch.manual_seed(0)
    eager.loss_fn(eager.model, eager.batch).backward()
    optimizer = torch.optim.SGD(graph.model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(graph.model, optimizer, loss_fn=graph.loss_fn)
    torch.manual_seed(0)
    step(graph.batch)
    for want, param in zip(eager.model.parameters(), graph.model.parameters(), strict=True):
        assert torch.equal(want.grad, optimizer.state[param]["momentum_buffer"])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.case("B30")
def test_gpt_with_its_own_checkpointing(use_reentrant: bool) -> None:
    step = compare_fixture(fixtures.gpt, checkpoint=True, use_reentrant=use_reentrant)
    plain = compare_fixture(fixtures.gpt)
    assert len(step.graph.regions) == 2
    assert operators(step, "bernoulli_") == operators(plain, "bernoulli_")


class Stack(nn.Module):
    """Blocks of Linear, Tanh and Dropout, run through `checkpoint_sequential`."""

    def __init__(self, segments: int, use_reentrant: bool = False) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(5)]
        self.inlet = nn.Linear(4, 6)
        self.blocks = nn.Sequential(*blocks)
        self.segments, self.use_reentrant = segments, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, self.segments, self.inlet(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.feature("CKPT-5", "CKPT-6", "CKPT-12")
@pytest.mark.case("B30")
def test_checkpoint_sequential(segments: int, use_reentrant: bool) -> None:
    batches = [rows(seed, 3, 4) for seed in range(5)]
    step = compare(lambda: Stack(segments, use_reentrant), batches, fixtures.mean_square)
    assert len(step.graph.regions) == segments - 1, "the last segment is not checkpointed"
    assert operators(step, "bernoulli_") == 5


class Selective(nn.Module):
    """A region whose policy keeps matrix products and recomputes the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        self.policy = functools.partial(create_selective_checkpoint_contexts, kept)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False, context_fn=self.policy))


@pytest.mark.feature("CKPT-5", "CKPT-8", "CKPT-12")
@pytest.mark.case("B30")
def test_selective_policy_is_remembered() -> None:
    step = compare(Selective, [rows(seed, 3, 4) for seed in range(5)], fixtures.mean_square)
    assert len(step.graph.regions) == 1
    kept = [n.target for n in step.captured_graph.calls if n.meta.get("kept")]
    assert kept == [torch.ops.aten.addmm.default] * 2
    assert operators(step, "bernoulli_") == 1


def policy_of_kinds(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Keeps layer norms, a result with several tensors, and prefers to keep products."""
    assert ctx.is_recompute is False
    if func is torch.ops.aten.native_layer_norm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_SAVE if func is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveNorm(nn.Module):
    """Two regions, one with a policy that is a function, one whose context is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4), nn.Tanh())
        self.tail = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1), nn.Sigmoid())

    def _own_contexts(self) -> tuple[Any, Any]:
        return contextlib.closing(_Closed()), contextlib.nullcontext()

    def forward(self, x: Tensor) -> Tensor:
        select = functools.partial(create_selective_checkpoint_contexts, policy_of_kinds)
        x = checkpoint(self.body, x, use_reentrant=False, context_fn=select)
        return checkpoint(self.tail, x, use_reentrant=False, context_fn=self._own_contexts)


class _Closed:
    count = 0

    def close(self) -> None:
        _Closed.count += 1


@pytest.mark.parametrize(
    ("make", "kept", "again"),
    [
        (Selective, {"addmm"}, {"gelu"}),
        (
            SelectiveNorm,
            {"body.1: native_layer_norm", "body.0: addmm"},
            {"body.2: gelu", "tail.1: gelu", "tail.0: addmm"},
        ),
    ],
)
@pytest.mark.feature("CKPT-5", "CKPT-8")
def test_plan_none_keeps_what_a_selective_policy_keeps(make: Any, kept: set[str], again: set[str]) -> None:
    batches = [rows(seed, 3, 4) for seed in range(5)]
    step = compare(make, batches, fixtures.mean_square, plan="none")
    assert make is Selective or _Closed.count, "the model's own context is entered, as in eager"
    decisions = {(d.value, d.keeps) for d in step.plan.decisions}
    for wanted, keeps in ((kept, True), (again, False)):
        for name in wanted:
            module, _, family = name.rpartition(": ")
            assert any(module in value and family in value and k is keeps for value, k in decisions), (name, keeps)
            assert not any(module in value and family in value and k is not keeps for value, k in decisions if module)


def test_an_error_of_a_policy_says_in_which_module() -> None:
    def broken(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("no policy for this")

    class Broken(Selective):
        def __init__(self) -> None:
            super().__init__()
            self.policy = functools.partial(create_selective_checkpoint_contexts, broken)

    model = Broken()
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "none", loss_fn=fixtures.mean_square
    )
    with pytest.raises(sg.CaptureError, match="no policy for this") as error:
        step.prepare(rows(0, 3, 4))
    assert "body.0" in str(error.value)


class Nested(nn.Module):
    """A region inside a region, dropout in both and after both."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.outer, self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.use_reentrant = use_reentrant

    def _inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x).tanh(), 0.5)

    def _outer(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.outer(x), 0.2)
        return self.norm(checkpoint(self._inner, hidden, use_reentrant=self.use_reentrant))

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant:
            x = x.detach().requires_grad_()
        return self.head(F.dropout(checkpoint(self._outer, x, use_reentrant=self.use_reentrant), 0.1))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.case("B30", "B31")
@pytest.mark.feature("CKPT-5", "CKPT-6", "CKPT-7")
def test_nested_regions(use_reentrant: bool) -> None:
    batches = [rows(seed, 6, 4) for seed in range(5)]
    step = compare(lambda: Nested(use_reentrant), batches, fixtures.mean_square, eager_recomputes=False)
    assert len(step.graph.regions) == 2
    assert operators(step, "bernoulli_") == 3
    assert step.model.norm.num_batches_tracked == 5
    forward = [n for n in step.graph.calls if str(n.meta["phase"]) == "forward"]
    by_module = {n.meta["key"].module: n.meta["region"] for n in forward}
    assert (by_module["outer"], by_module["inner"], by_module["norm"], by_module["head"]) == (0, 1, 0, None)


# B31: writes in a region


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.case("B31")
@pytest.mark.feature("CKPT-7", "CKPT-12")
def test_batchnorm_in_a_region_is_updated_once(use_reentrant: bool) -> None:
    step = compare_fixture(fixtures.bn, checkpoint=True, use_reentrant=use_reentrant, eager_recomputes=False)
    assert operators(step, "native_batch_norm") == 1
    fixture = fixtures.bn(checkpoint=True, use_reentrant=use_reentrant)
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    for batch in fixtures.batches(fixtures.bn, 3):
        step(batch)
    assert fixture.model[1].body.num_batches_tracked == 3


class Writes(nn.Module):
    """A region that counts in a buffer, replaces another, stores into a third, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(2))

    def _region(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.linear(x), 0.5)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.last[0] = hidden.detach().sum()
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self._region, x, use_reentrant=False))


@pytest.mark.case("B31", "B33", "B49")
@pytest.mark.feature("CKPT-7")
def test_writes_to_buffers_in_a_region_happen_once() -> None:
    batches = [rows(seed, 3, 4) for seed in range(5)]
    step = compare(Writes, batches, fixtures.mean_square, eager_recomputes=False)
    assert step.model.calls == 5


# B33: recompute that would not repeat itself


class Router(nn.Module):
    """Top 2 of 4 experts from scores that are exactly equal to begin with, all of it in one region."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.router = nn.Linear(5, 4)
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)
        self.router.requires_grad_(not frozen)
        self.experts = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.head = nn.Linear(5, 1)

    def _route(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights)
        return sum(gates[:, i, None] * expert(x) for i, expert in enumerate(self.experts))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self._route, x, use_reentrant=False))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("eager_recomputes", [True, False])
@pytest.mark.case("B33")
def test_router_with_exact_ties_chooses_once(frozen: bool, eager_recomputes: bool) -> None:
    batches = [rows(seed, 6, 5) for seed in range(5)]
    step = compare(lambda: Router(frozen), batches, fixtures.mean_square, eager_recomputes=eager_recomputes)
    assert operators(step, "topk") == 1


class PythonState(nn.Module):
    """A region that writes Python state outside of itself; `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.count = 0
        self.cache: list[Any] = []
        self.seen: dict[str, int] = {}
        self.names: set[int] = set()
        self.block = nn.ModuleDict({"linear": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 1)

    def _region(self, x: Tensor) -> Tensor:
        hidden = self.block["linear"](x)
        if self.kind == "counter":
            self.count += 1
        elif self.kind == "counter_of_submodule":
            self.head.calls = getattr(self.head, "calls", 0) + 1
        elif self.kind == "growing_lengths":
            self.cache.append(x.shape[0])
        elif self.kind == "growing_tensors":
            self.cache.append(hidden.detach())
            hidden = hidden + torch.stack(self.cache).sum(0)
        elif self.kind == "dict":
            self.seen["rows"] = self.seen.get("rows", 0) + x.shape[0]
        elif self.kind == "set":
            self.names.add(len(self.names))
        elif self.kind == "stored_tensor":
            self.last = hidden.detach()
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self._region, x, use_reentrant=False))


KINDS = ["counter", "counter_of_submodule", "growing_lengths", "growing_tensors", "dict", "set", "stored_tensor"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("B33", "B54")
@pytest.mark.feature("CKPT-7")
def test_python_state_written_in_a_region_is_refused(kind: str) -> None:
    model = PythonState(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    before = oracle.snapshot(model, optimizer, 0, torch.zeros(()), torch.zeros(()))
    with pytest.raises(sg.CaptureError, match="changes Python state outside of it") as caught:
        step(rows(0, 3, 4))
    assert caught.value.module_path == ""
    filename, _, line = caught.value.source_line.rpartition(":")
    assert os.path.samefile(filename, __file__)
    with open(filename) as file:
        assert "checkpoint(self._region" in file.read().splitlines()[int(line) - 1]
    assert "buffer" in caught.value.remedy
    for text in (caught.value.source_line, caught.value.remedy):
        assert text in str(caught.value)
    oracle.assert_bitwise(before, oracle.snapshot(model, optimizer, 0, torch.zeros(()), torch.zeros(())))
    assert (model.count, model.cache, model.seen, model.names) == (0, [], {}, set())
    assert not hasattr(model.head, "calls")
    assert not hasattr(model, "last")


@pytest.mark.case("B33")
def test_python_state_that_only_ends_up_equal_is_fine() -> None:
    class Balanced(PythonState):
        def _region(self, x: Tensor) -> Tensor:
            self.cache.append(x)
            self.count += 1
            hidden = super()._region(self.cache.pop())
            self.count -= 1
            return hidden

    compare(lambda: Balanced("none"), [rows(seed, 3, 4) for seed in range(5)], fixtures.mean_square)


# reentrant regions, and regions without gradients


class Reentrant(nn.Module):
    """A reentrant region whose input needs no gradient, then a head outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_foreach", "adamw_fused"])
@pytest.mark.case("B30", "B37")
def test_reentrant_region_without_grad_inputs_updates_as_eager_and_warns(optimizer: str) -> None:
    batches = [rows(seed, 3, 4) for seed in range(5)]
    with pytest.warns(sg.StepGraphWarning, match="none of its inputs requires grad") as caught:
        step = compare(Reentrant, batches, fixtures.mean_square, optimizer=optimizer)
    assert sum(issubclass(w.category, sg.StepGraphWarning) for w in caught) == 1, "once, at capture"
    start, _ = oracle.twin(Reentrant)
    assert torch.equal(step.model.body[0].weight, start.body[0].weight), "no gradient: no update and no decay"
    assert not torch.equal(step.model.head.weight, start.head.weight)
    assert step.model.body[0].weight not in step.optimizer.state
    assert "body.0.weight" in step.report()


class FrozenFeatures(nn.Module):
    """Regions under no_grad and over frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
        self.middle = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = checkpoint(self.features, x, use_reentrant=False)
        return self.head(checkpoint(self.middle, hidden, use_reentrant=False))


@pytest.mark.feature("CKPT-7")
def test_regions_under_no_grad() -> None:
    step = compare(FrozenFeatures, [rows(seed, 3, 4) for seed in range(5)], fixtures.mean_square)
    start, _ = oracle.twin(FrozenFeatures)
    assert torch.equal(step.model.features[0].weight, start.features[0].weight)


class SeveralArguments(nn.Module):
    """Keyword arguments, constants and several results of a region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def _region(self, x: Tensor, power: int, *, shift: Tensor, both: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.linear(x).pow(power) + shift
        return hidden, {"rest": hidden.exp() if both else hidden}

    def forward(self, x: Tensor) -> Tensor:
        hidden, more = checkpoint(self._region, x, 2, shift=x.mean(), both=True, use_reentrant=False)
        return hidden + more["rest"]


@pytest.mark.feature("CKPT-5", "CKPT-12")
def test_arguments_and_results_of_any_shape() -> None:
    compare(SeveralArguments, [rows(seed, 3, 4) for seed in range(5)], fixtures.mean_square)


@pytest.mark.feature("CKPT-12")
def test_checkpointing_works_in_eager_as_before_after_a_capture() -> None:
    fixture = fixtures.drop()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    step.prepare(fixture.batch)
    recomputed = []
    fixture.model[0].body[1].register_forward_hook(lambda *_: recomputed.append(1))
    fixture.loss_fn(fixture.model, fixture.batch).backward()
    assert len(recomputed) == 2
    assert all(p.grad is not None for p in fixture.model.parameters())


def test_no_warning_where_nothing_is_wrong() -> None:
    fixture = fixtures.drop(use_reentrant=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = sg.compile_train_step(
            fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
        )
        step(fixture.batch)


class Residual(nn.Module):
    """The input of each region is read inside of it twice and outside as well."""

    def __init__(self, use_reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.use_reentrant, self.nested = use_reentrant, nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for layer in self.layers:

            def inner(h: Tensor, layer: nn.Module = layer) -> Tensor:
                return h + layer(h)

            def outer(h: Tensor, inner: Callable[[Tensor], Tensor] = inner) -> Tensor:
                return checkpoint(inner, h, use_reentrant=self.use_reentrant) + h

            x = x + checkpoint(outer if self.nested else inner, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("plan", ["none", "auto"])
@pytest.mark.feature("CKPT-5", "CKPT-12")
def test_the_input_of_a_region_is_read_inside_and_outside(nested: bool, plan: str) -> None:
    batches = [rows(seed, 24, 16) for seed in range(5)]
    compare(lambda: Residual(False, nested), batches, fixtures.mean_square, plan=plan)
