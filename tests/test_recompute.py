"""Recomputing: what runs again, where, and that the schedule which was planned is the graph that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.errors import PlanMismatchError
from stepgraph.graph import Phase, StepGraph, effects_of, is_view, picks_indices
from stepgraph.passes import Recompute, run_passes
from stepgraph.planner import SPECS, Plan, Repeat, simulate
from stepgraph.planner.cost import node_seconds
from stepgraph.planner.outline import outline_of
from stepgraph.planner.schedule import Choice, schedule
from stepgraph.runtime.planning import parse_bytes

from . import fixtures, oracle, zoo
from .peaks import peak_of_step


def _prepared(entry: zoo.ZooModel, **options: Any) -> StepGraph:
    model = entry.build()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), "none", **options)
    return step.prepare(entry.batch())


class Deep(nn.Module):
    """Equal layers with dropout and BatchNorm, wide enough for memory to be worth something."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.BatchNorm1d(4 * width),
                nn.GELU(),
                nn.Dropout(0.2),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _deep_step(plan: Any = "none", budget: Any = None, seed: int = 0, **options: Any) -> sg.TrainStep:
    with fixtures.seeded(seed):
        model = Deep()
    return sg.compile_train_step(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        plan,
        memory_budget=budget,
        loss_fn=fixtures.mean_square,
        **options,
    )


# What runs again


@pytest.mark.parametrize("name", ["gpt2", "bert", "mixtral", "resnet"])
@pytest.mark.case("B30", "B31", "B33")
@pytest.mark.feature("CKPT-8", "CKPT-12")
def test_draws_writes_and_picked_indices_never_run_again(name: str) -> None:
    graph = _prepared(zoo.ZOO[name])
    outline = outline_of(graph, node_seconds(SPECS["cpu"]))
    plan = Plan(repeats=schedule(outline, Choice(outline.always_kept)).repeats())
    run_passes(graph, [Recompute(plan)])
    again = [n for n in graph.calls if n.meta.get("recomputes")]
    assert len(again) > 10
    assert all(n.meta["phase"] is Phase.BACKWARD for n in again)
    assert not [n for n in again if not effects_of(n).pure or picks_indices(n)]
    kinds = {n.meta["key"].family for n in graph.calls if not effects_of(n).pure and n.meta["phase"] is Phase.FORWARD}
    assert name == "mixtral" or kinds, "there is something that must not run again"


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "whisper", "mamba", "resnet"])
def test_schedule_and_rewritten_graph_are_alike_at_every_position(name: str) -> None:
    graph = _prepared(zoo.ZOO[name])
    outline = outline_of(graph, node_seconds(SPECS["cpu"]))
    half = frozenset(s for i, s in enumerate(outline.candidates) if i % 3)
    for kept in (outline.always_kept | half, outline.always_kept, outline.always_kept.union(outline.candidates)):
        chosen = schedule(outline, Choice(kept))
        rewritten = graph.copy()
        run_passes(rewritten, [Recompute(Plan(repeats=chosen.repeats()))])
        timeline = simulate(rewritten)
        operators = [i for i, node in enumerate(rewritten.calls) if not is_view(node)]
        assert np.array_equal(timeline.live_bytes()[operators] - timeline.resident_bytes, chosen.live)
        assert timeline.peak().peak_bytes - timeline.resident_bytes == chosen.peak_bytes - outline.given_bytes


def test_a_plan_for_another_graph_is_refused() -> None:
    graph = _prepared(zoo.ZOO["gpt2"])
    with pytest.raises(PlanMismatchError, match="nowhere/mm#0@forward") as error:
        run_passes(graph, [Recompute(Plan(repeats=(Repeat("nowhere/mm#0@forward", "also/mm#0@backward", (0,)),)))])
    assert error.value.differing == ("nowhere/mm#0@forward", "also/mm#0@backward")


# Steps


@pytest.mark.case("B30", "B31", "B56")
@pytest.mark.feature("MEM-9", "CKPT-1", "CKPT-2", "CKPT-12")
def test_budgets_are_kept_and_numbers_stay() -> None:
    batches = [fixtures.rows(i, 512, 64) for i in range(3)]
    none = _deep_step()
    torch.manual_seed(0)
    want = [none(b).loss for b in batches]
    most = none.plan.prediction.peak_bytes
    with pytest.raises(sg.PlanError, match="needs .* bytes at least") as error:
        _deep_step("auto", 1).prepare(batches[0])
    least = error.value.least_bytes
    assert least < 0.95 * most
    peaks, seconds = [], []
    for budget in np.linspace(least, most, 8).astype(int):
        step = _deep_step("auto", int(budget))
        torch.manual_seed(0)
        for batch, loss in zip(batches, want, strict=True):
            result, measured = peak_of_step(step, batch)
            assert torch.equal(result.loss, loss)
        assert measured <= budget + 64
        peaks.append(step.plan.prediction.peak_bytes)
        seconds.append(step.plan.prediction.seconds)
        assert peaks[-1] <= budget
        assert peaks[-1] >= 0.97 * budget or step.plan.notes, "a budget that binds is used, or the plan says why not"
    assert peaks == sorted(peaks), "a smaller budget never has a larger peak"
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("plan", ["sqrt", "auto"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore:.*normalises each micro-batch:stepgraph.errors.StepGraphWarning")
def test_bitwise_with_dropout_batchnorm_and_windows(plan: str, accumulate: int) -> None:
    batches = [fixtures.rows(i, 256, 64) for i in range(4)]
    plain = _deep_step(accumulate=accumulate)
    torch.manual_seed(3)
    want = [plain(b).loss for b in batches]
    budget = None if plan == "sqrt" else int(plain.plan.prediction.peak_bytes * 0.93)
    planned = _deep_step(plan, budget, accumulate=accumulate)
    torch.manual_seed(3)
    got = [planned(b).loss for b in batches]
    assert planned.plan.repeats
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    for (name, a), (_, b) in zip(plain.model.state_dict().items(), planned.model.state_dict().items(), strict=True):
        oracle.assert_same(a, b), name


def test_verify_sees_no_difference() -> None:
    step = _deep_step("sqrt")
    report = step.verify(fixtures.rows(0, 16, 64))
    assert report.ok, str(report)


def test_inductor_would_undo_a_plan_and_is_refused() -> None:
    with pytest.raises(sg.NotYetError, match="lowering"):
        _deep_step("sqrt", lowering="inductor").prepare(fixtures.rows(0, 16, 64))


# The user's own regions


@pytest.mark.feature("CKPT-5")
def test_own_regions_are_computed_again_under_none_and_are_hints_under_auto() -> None:
    fixture = fixtures.drop()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), "none", loss_fn=fixture.loss_fn
    )
    graph = step.prepare(fixture.batch)
    again = [n for n in graph.calls if n.meta.get("recomputes")]
    regions = {n.meta["key"].name for n in graph.calls if n.meta.get("region") is not None}
    assert again
    assert {n.meta["recomputes"] for n in again} <= regions
    fixture = fixtures.drop()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), "auto", loss_fn=fixture.loss_fn
    )
    assert not [n for n in step.prepare(fixture.batch).calls if n.meta.get("recomputes")]


# Plans as files


_MAKE = """
import sys, torch
import stepgraph as sg
from torch import nn
torch.manual_seed(0)
layer = lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
model = nn.Sequential(*[layer() for _ in range(4)])
step = sg.compile_train_step(
    model, torch.optim.SGD(model.parameters(), lr=0.1), memory_budget=int(sys.argv[1]), loss_fn=lambda m, x: m(x).sum()
)
step.prepare(torch.ones(64, 32))
sys.stdout.write(step.plan.to_json())
"""


def test_equal_bytes_in_fresh_processes_with_another_hash_seed() -> None:
    texts = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _MAKE, "370000"], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert '"repeats": [\n  {' in texts[0], "the plan computes something again"


def test_a_saved_plan_is_replayed(tmp_path: Any) -> None:
    batch = fixtures.rows(0, 32, 64)
    made = _deep_step("sqrt")
    made.prepare(batch)
    path = made.plan.save(tmp_path / "plan.json")
    replayed = _deep_step(path)
    torch.manual_seed(1)
    want = made(batch)
    torch.manual_seed(1)
    got = replayed(batch)
    assert replayed.plan == made.plan
    assert str(replayed.graph) == str(made.graph)
    assert torch.equal(want.loss, got.loss)
    with fixtures.seeded(0):
        other = Deep(layers=5)
    step = sg.compile_train_step(other, torch.optim.AdamW(other.parameters()), path, loss_fn=fixtures.mean_square)
    with pytest.raises(
        PlanMismatchError, match=r"plan.json' was made for another step. .*Parameters here: .* elements"
    ) as error:
        step.prepare(batch)
    assert error.value.differing == ("buffers", "parameters")
    with pytest.raises(
        PlanMismatchError, match=r"Batch here: batch f32\[16,64\], .*; in the plan: batch f32\[32,64\], "
    ):
        _deep_step(path).prepare(fixtures.rows(0, 16, 64))
    with pytest.raises(sg.PlanError, match="made elsewhere"):
        _deep_step(path, 1000).prepare(batch)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"peak_bytes": 1, "at": "", "by_category": {}, "seconds": 1.0, "extra_seconds": 0.0, "seconds_by_stage": {}},
    ],
)
def test_what_a_saved_plan_needs_is_worked_out_again(tmp_path: Any, told: Any) -> None:
    """A file can come from another machine, another version or an editor; the peak that is told is that of what runs."""
    batch = fixtures.rows(0, 32, 64)
    made = _deep_step("sqrt")
    made.prepare(batch)
    values = json.loads(made.plan.to_json())
    (tmp_path / "plan.json").write_text(json.dumps({**values, "prediction": told}))
    replayed = _deep_step(tmp_path / "plan.json")
    replayed.prepare(batch)
    found, want = replayed.plan.prediction, made.plan.prediction
    assert (found.peak_bytes, found.at, found.by_category) == (want.peak_bytes, want.at, want.by_category)
    assert found.seconds == pytest.approx(want.seconds, rel=0.01), "the planner counts all views of what runs again"
    assert found.extra_seconds == pytest.approx(want.extra_seconds, rel=0.05)
    (note,) = replayed.plan.notes
    assert note == ("made without a prediction" if told is None else "made where the peak was 1 bytes")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda v: v.update(version=99), "version"),
        (lambda v: v.update(code="import os"), "unknown fields: code"),
        (lambda v: v["repeats"].append({"operator": 1, "before": "b", "results": []}), "1 is not of type str"),
        (lambda v: v.update(strategy="magic"), "strategy"),
        (lambda v: v.update(repeats=3), "list"),
        (lambda v: v.update(budget_bytes=True), "True is not of type int"),
    ],
)
def test_broken_plans_are_refused(tmp_path: Any, change: Any, told: str) -> None:
    values = json.loads(Plan("sqrt", repeats=(Repeat("a", "b", (0,)),)).to_json())
    change(values)
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(sg.ConfigError, match=told):
        _deep_step(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_files_that_are_no_plans(tmp_path: Any, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(sg.ConfigError, match="holds no plan"):
        _deep_step(str(tmp_path / "plan.json"))
    with pytest.raises(sg.ConfigError, match="cannot be read"):
        _deep_step(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [(1000, 1000), ("8GiB", 8 * 2**30), ("500 MB", 500_000_000), ("1.5kb", 1500), ("7 B", 7), ("1200", 1200)],
)
def test_budgets_are_read(given: Any, bytes_: int) -> None:
    assert parse_bytes(given) == bytes_


LOSSES: dict[str, Any] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft margin": lambda a, b: F.soft_margin_loss(a, b.sign()),
    "binary cross entropy": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "binary cross entropy with logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    "poisson nll": lambda a, b: F.poisson_nll_loss(a, b.abs()),
    "kl": lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
    "cross entropy": lambda a, b: F.cross_entropy(a, b.argmax(1)),
    "multi margin": lambda a, b: F.multi_margin_loss(a, b.argmax(1)),
    "hinge": lambda a, b: F.hinge_embedding_loss(a, b.sign()),
    "cosine": lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(a.shape[0])),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.case("B55", "B56")
def test_a_loss_holds_no_more_than_its_own_bytes(name: str) -> None:
    """CPU kernels of some losses shrink the elementwise loss to one element and keep its memory."""
    batch = (fixtures.rows(0, 256, 64), fixtures.rows(1, 256, 64))

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)])

    eager_model, model = oracle.twin(make)
    loss = LOSSES[name](eager_model(batch[0]), batch[1])

    def compiled(budget: int) -> sg.TrainStep:
        return sg.compile_train_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), criterion=LOSSES[name], memory_budget=budget
        )

    with pytest.raises(sg.PlanError) as error:
        compiled(1).prepare(batch)
    step = compiled(error.value.least_bytes)
    result, _ = peak_of_step(step, batch)
    assert torch.equal(result.loss, loss.detach())
    assert result.loss.untyped_storage().nbytes() == result.loss.nbytes
    _, peak = peak_of_step(step, batch)
    assert peak <= error.value.least_bytes + 512


class Shared(torch.nn.Module):
    """Blocks that run twice, under tied embeddings: under autocast, shared casts live through both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 48, padding_idx=0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(48),
                torch.nn.Linear(48, 192),
                torch.nn.GELU(),
                torch.nn.Linear(192, 48),
                torch.nn.Dropout(0.1),
            )
            for _ in range(3)
        )
        self.head = torch.nn.Linear(48, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for _ in range(2):
            for block in self.blocks:
                hidden = hidden + block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.case("B56")
def test_the_least_budget_that_is_told_is_one_that_works(precision: str) -> None:
    """Also where the rows of the blocks miss a plan's peak; and peaks and times follow the budget there too."""
    ids = torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(0))

    def planned(budget: int) -> Plan:
        with fixtures.seeded(0):
            model = Shared()
        step = sg.compile_train_step(
            model,
            torch.optim.AdamW(model.parameters(), fused=True),
            loss_fn=lambda m, b: F.cross_entropy(m(b).flatten(0, 1), b.flatten()),
            precision=precision,
            memory_budget=budget,
        )
        step.prepare(ids)
        return step.plan

    with pytest.raises(sg.PlanError) as error:
        planned(1)
    least = error.value.least_bytes
    with pytest.raises(sg.PlanError):
        planned(least - 1)
    before = (0, float("inf"))
    for budget in np.linspace(least, 1.4 * least, 12):
        found = planned(int(budget)).prediction
        assert found is not None
        assert before[0] <= found.peak_bytes <= budget
        assert found.seconds <= before[1]
        before = (found.peak_bytes, found.seconds)


def test_a_replayed_plan_is_held_against_the_budget_of_every_later_step(tmp_path: Any) -> None:
    """The first graph has no optimizer state yet; the budget is for those that have."""
    batch = fixtures.rows(0, 32, 64)
    made = _deep_step("sqrt")
    made.prepare(batch)
    path, peak = made.plan.save(tmp_path / "plan.json"), made.plan.prediction.peak_bytes
    _deep_step(path, peak).prepare(batch)
    with pytest.raises(sg.PlanError, match="made elsewhere") as error:
        _deep_step(path, peak - 1).prepare(batch)
    assert error.value.least_bytes == peak


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda repeats, names: repeats[0].update(results=[99]), r"takes results \[99\]"),
        (lambda repeats, names: repeats[0].update(results=[-1]), r"takes results \[-1\]"),
        (lambda repeats, names: repeats[0].update(operator=repeats[0]["before"]), "not of forward"),
        (lambda repeats, names: repeats[0].update(before=repeats[0]["operator"]), "not of backward"),
        (lambda repeats, names: repeats[0].update(operator=names["empty_like"]), "memory that is written"),
        (lambda repeats, names: repeats[0].update(operator=names["bernoulli_"]), "draws"),
        (lambda repeats, names: repeats[0].update(operator="nowhere"), "does not have"),
    ],
)
def test_a_plan_that_was_edited_into_what_cannot_run_is_refused(tmp_path: Any, change: Any, told: str) -> None:
    batch = fixtures.rows(0, 32, 64)
    made = _deep_step("sqrt")
    made.prepare(batch)
    calls = [n.meta["key"] for n in made.graph.calls if str(n.meta["phase"]) == "forward"]
    names = {key.family: key.name for key in calls}
    values = json.loads(made.plan.to_json())
    change(values["repeats"], names)
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(PlanMismatchError, match=told):
        _deep_step(tmp_path / "plan.json").prepare(batch)


class Sequence(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(8, 16, num_layers=2, batch_first=True), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def test_what_an_lstm_packs_for_its_backward_counts() -> None:
    """Its fake kernel does not tell how much that is, nor that the gradients of its two biases are two; its backward ends the
    process when the buffer holds zeros. The same in every capture, and to the byte."""
    batch = torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(0))
    told = set()
    for _ in range(3):
        model = Sequence()
        step = sg.compile_train_step(
            model, torch.optim.AdamW(model.parameters(), fused=True), "none", loss_fn=fixtures.mean_square, max_norm=0.1
        )
        for _ in range(2):
            step(batch)
        predicted = step.plan.prediction
        assert peak_of_step(step, batch)[1] == predicted.peak_bytes
        assert not step.plan.notes
        told.add((predicted.peak_bytes, str(step.graph)))
    assert len(told) == 1
    with pytest.raises(sg.PlanError, match="at least"):
        sg.compile_train_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=fixtures.mean_square, memory_budget=1
        ).prepare(batch)


class Queue(torch.nn.Module):
    """Forward writes a buffer that is larger than all activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)]
        )
        self.register_buffer("queue", torch.zeros(2000, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        self.queue[: x.shape[0]] = hidden.detach()
        return hidden + self.queue.mean(0)


@pytest.mark.case("B55")
def test_the_first_step_of_a_capture_keeps_to_the_budget_as_well() -> None:
    """Its copy of written buffers, by which a failing step is undone, is left out where there is no room for it."""
    batches = [fixtures.rows(n, 256 - 16 * (n // 2), 64) for n in range(4)]

    def compiled(budget: int | None) -> sg.TrainStep:
        model = oracle.twin(Queue)[1]
        return sg.compile_train_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=fixtures.mean_square, memory_budget=budget
        )

    with pytest.raises(sg.PlanError) as error:
        compiled(1).prepare(batches[0])
    step, free = compiled(error.value.least_bytes), compiled(None)
    for batch in batches:
        _, peak = peak_of_step(step, batch)
        assert peak <= error.value.least_bytes + 8192, "the random state"
        free(batch)
    assert step.captures == 2
    assert torch.equal(step.model.queue, free.model.queue)
