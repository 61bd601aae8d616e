"""Hyperparameters, modes and batches that change between two steps: each step uses what holds then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import stepgraph as sg

from . import fixtures, oracle
from .fixtures import rows
from .side_by_side import SideBySide, adamw, mlp_pair, sgd

# B47: hyperparameters

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (t + 1)),
    "plateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=5),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=6),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=False),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 3)], [2]),
}


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.case("B47", "B26")
@pytest.mark.feature("API-7")
def test_schedules_are_followed_with_one_capture_and_no_warning(schedule: str, form: dict[str, bool]) -> None:
    eager, graph = fixtures.mlp(), fixtures.mlp()
    batches = fixtures.batches(fixtures.mlp, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager_optimizer, optimizer = (adamw(**form)(f.model) for f in (eager, graph))
        want = oracle.eager_steps(
            eager.model,
            eager_optimizer,
            eager.loss_fn,
            batches,
            max_norm=1.0,
            scheduler=SCHEDULES[schedule](eager_optimizer),
            checkpoints=(1, 2, 3, 4, 5),
        )
        step = sg.compile_train_step(graph.model, optimizer, loss_fn=graph.loss_fn, max_norm=1.0)
        scheduler = SCHEDULES[schedule](optimizer)
        got = oracle.graph_steps(
            step, graph.model, optimizer, batches, scheduler=scheduler, checkpoints=(1, 2, 3, 4, 5)
        )
    oracle.assert_bitwise(want, got)
    assert step.captures == 1
    assert len({snapshot.groups[0]["lr"] for snapshot in got.values()}) > 1, "the schedule did something"


@pytest.mark.case("B47")
def test_scheduler_that_was_made_before_the_step_was_compiled() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = LambdaLR(optimizer, lambda t: 1 / (t + 1))
        step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
        for t in range(5):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / (t + 1))
            before = {n: p.detach().clone() for n, p in fixture.model.named_parameters()}
            eager = fixtures.mlp()
            eager.model.load_state_dict(before)
            eager.loss_fn(eager.model, fixture.batch).backward()
            step(fixture.batch)
            for name, parameter in fixture.model.named_parameters():
                grad = eager.model.get_parameter(name).grad
                assert torch.equal(parameter, before[name].add(grad, alpha=-0.1 / (t + 1)))
            scheduler.step()
    assert step.captures == 1


@pytest.mark.case("B47")
def test_scheduler_before_the_first_step_still_warns_as_in_eager() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda t: 1.0)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    step.prepare(fixture.batch)
    step.verify(fixture.batch)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.case("B47")
def test_lr_by_hand(form: dict[str, bool]) -> None:
    pair = mlp_pair(adamw(**form))
    batch = fixtures.mlp().batch
    for lr in (0.25, 0.5, 0.0, 1e-8, 3, 0.25):
        pair.both(lambda _, o, lr=lr: o.param_groups[0].update(lr=lr))
        pair.run(batch)
    assert pair.step.captures == 1


@pytest.mark.parametrize("form", [{"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.case("B47")
def test_lr_as_a_tensor(form: dict[str, bool]) -> None:
    pair = mlp_pair(lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1), **form))
    batch = fixtures.mlp().batch
    for lr in (0.1, 0.5, 0.25):
        pair.both(lambda _, o, lr=lr: o.param_groups[0]["lr"].fill_(lr))
        pair.run(batch)
    pair.both(lambda _, o: o.param_groups[0].update(lr=torch.tensor(0.05)))
    pair.run(batch)
    assert pair.step.captures == 1


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.case("B47")
def test_weight_decay_retraces_the_update_only_where_it_crosses_zero(
    kind: type[torch.optim.Optimizer], form: dict[str, bool]
) -> None:
    pair = mlp_pair(lambda m: kind(m.parameters(), lr=0.1, weight_decay=0.1, **form))
    batch = fixtures.mlp().batch
    pair.run(batch, steps=2)
    traces = pair.step.update_traces
    for value in (0.2, 0.01, 1.0):
        pair.both(lambda _, o, value=value: o.param_groups[0].update(weight_decay=value))
        pair.run(batch)
        assert pair.step.update_traces == traces, "another value is no reason to trace"
    pair.both(lambda _, o: o.param_groups[0].update(weight_decay=0.0))
    pair.run(batch)
    at_zero = pair.step.update_traces
    assert at_zero <= traces + 1
    for value in (0.3, 0, 0.5, 0.0):
        pair.both(lambda _, o, value=value: o.param_groups[0].update(weight_decay=value))
        pair.run(batch)
    assert pair.step.update_traces == at_zero, "both forms are kept"
    assert pair.step.captures == 1


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (torch.optim.AdamW, "betas", [(0.5, 0.9), (0.0, 0.9), (0.9, 0.999), (0.1, 0.0)]),
        (torch.optim.AdamW, "eps", [1e-4, 1e-12, 0.1]),
        (torch.optim.SGD, "momentum", [0.5, 0.99, 0.0, 0.9]),
        (torch.optim.SGD, "dampening", [0.5, 0.0, 0.1]),
    ],
)
@pytest.mark.case("B47")
def test_every_other_hyperparameter(
    kind: type[torch.optim.Optimizer], name: str, values: list[Any], form: dict[str, bool]
) -> None:
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    pair = mlp_pair(lambda m: kind(m.parameters(), lr=0.1, **extra, **form))
    batch = fixtures.mlp().batch
    pair.run(batch, steps=2)
    for value in values:
        pair.both(lambda _, o, value=value: o.param_groups[0].update({name: value}))
        pair.run(batch, steps=2)
    assert pair.step.captures == 1


@pytest.mark.parametrize("flag", ["maximize", "foreach", "nesterov"])
@pytest.mark.case("B47")
def test_flags_of_a_group_that_change(flag: str) -> None:
    pair = mlp_pair(sgd(momentum=0.9, foreach=False))
    batch = fixtures.mlp().batch
    for value in (False, True, False, True):
        pair.both(lambda _, o, value=value: o.param_groups[0].update({flag: value}))
        pair.run(batch)
    assert pair.step.captures == 1


@pytest.mark.case("B47", "B41")
def test_groups_change_apart_from_each_other() -> None:
    pair = mlp_pair(lambda m: torch.optim.AdamW(oracle.two_groups(m, lr=0.1)))
    batch = fixtures.mlp().batch
    for lr, decay in ((0.1, 0.0), (0.2, 0.3), (0.0, 0.0), (0.05, 0.1)):
        pair.both(lambda _, o, lr=lr, decay=decay: o.param_groups[1].update(lr=lr, weight_decay=decay))
        pair.run(batch)
    assert pair.step.captures == 1


# B48: modes


class DropNorm(nn.Module):
    """DROP and BN in one."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = fixtures.drop().model[0]
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.drop(x)))


@pytest.mark.case("B48")
def test_train_eval_train_eval() -> None:
    """The steps themselves are taken in both modes; two graphs serve them all."""
    batch = rows(0, 6, 4)
    # the eager twin has no checkpointing, which would update the BatchNorm's statistics twice if it held one
    pair = SideBySide(DropNorm, fixtures.mean_square, sgd())

    def random_operators() -> int:
        return sum(n for op, n in pair.step.graph.op_counts().items() if "bernoulli" in op)

    for round_number in range(2):
        pair.both(lambda m, _: m.train())
        pair.run(batch, steps=2)
        assert random_operators() == 1
        pair.both(lambda m, _: m.eval())
        statistics = {n: b.clone() for n, b in pair.model.named_buffers()}
        pair.run(batch)
        assert random_operators() == 0
        assert all(torch.equal(b, statistics[n]) for n, b in pair.model.named_buffers())
        with torch.no_grad():
            assert torch.equal(pair.model(batch), pair.model(batch))
        assert pair.step.captures == 2, f"round {round_number}"
    assert pair.model.norm.num_batches_tracked == 4


@pytest.mark.case("B48")
def test_mode_of_a_single_module() -> None:
    pair = SideBySide(DropNorm, fixtures.mean_square, sgd())
    batch = rows(0, 6, 4)
    for training in (True, False, True):
        pair.both(lambda m, _, training=training: m.norm.train(training))
        pair.run(batch)
    assert pair.step.captures == 2


@pytest.mark.case("B48")
def test_evaluation_between_steps_sees_the_new_weights() -> None:
    fixture = fixtures.bn()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    losses = []
    for _ in range(3):
        step(fixture.batch)
        fixture.model.eval()
        with torch.no_grad():
            losses.append(fixture.loss_fn(fixture.model, fixture.batch).item())
        fixture.model.train()
    assert len(set(losses)) == 3
    assert step.captures == 1


# B50: shapes, layouts and numbers of the batch


def error_per_row(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().sum() / x.shape[0]


def length_in_python(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return sum((model(x[i]) - y[i]).square().sum() for i in range(len(x))) * (1.0 / len(y))


@pytest.mark.parametrize("loss_fn", [error_per_row, length_in_python])
@pytest.mark.case("B50")
def test_last_smaller_batch(loss_fn: fixtures.LossFn) -> None:
    pair = SideBySide(lambda: fixtures.mlp().model, loss_fn, adamw())
    for rows_count in (4, 3, 1, 8, 4, 3):
        pair.run(fixtures.mlp(rows_count, rows=rows_count).batch)
    assert pair.step.captures == 4


@pytest.mark.case("B50")
def test_other_sequence_length() -> None:
    pair = SideBySide(lambda: fixtures.gpt().model, fixtures.own_loss, adamw(lr=0.01))
    for length in (8, 5, 8, 1 + 1):
        ids = torch.randint(1, 50, (2, length), generator=torch.Generator().manual_seed(length))
        pair.run({"input_ids": ids, "labels": ids.clone()})
    assert pair.step.captures == 3


@pytest.mark.case("B50")
def test_dtype_and_structure_of_the_batch() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        values = batch.values() if isinstance(batch, dict) else batch
        return sum(model(v.float()).square().mean() for v in values)

    pair = SideBySide(lambda: fixtures.mlp().model, loss_fn, adamw())
    x = rows(0, 3, 8)
    for batch in ([x], [x, x * 2], (x,), {"a": x}, {"b": x}, [x.double()], [(x * 9).long()], [x]):
        pair.run(batch)
    assert pair.step.captures == 7


@pytest.mark.parametrize("loss_fn", [fixtures.squared_error, lambda m, b: m(b[0] * b[0].t().t()).square().mean()])
@pytest.mark.case("B50")
def test_batches_that_are_not_contiguous(loss_fn: fixtures.LossFn) -> None:
    pair = SideBySide(lambda: fixtures.mlp().model, loss_fn, adamw())
    x, y = rows(0, 6, 8), rows(1, 6, 4)
    layouts = [
        x,
        x.t().contiguous().t(),
        rows(2, 6, 16)[:, ::2],
        rows(3, 12, 8)[6:],
        rows(4, 1, 8).expand(6, 8),
        rows(5, 8).expand(6, 8),
        x,
    ]
    for layout in layouts:
        kept = layout.clone()
        pair.run((layout, y))
        assert torch.equal(layout, kept)


@pytest.mark.case("B50")
def test_views_that_depend_on_the_layout() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        flat = x.view(-1) if x.is_contiguous() else x.t().reshape(-1).flip(0)
        return model(flat.reshape(6, 8)).square().mean()

    pair = SideBySide(lambda: fixtures.mlp().model, loss_fn, adamw())
    x = rows(0, 6, 8)
    for batch in (x, x.t().contiguous().t(), x):
        pair.run(batch)


@pytest.mark.case("B50")
def test_python_values_in_the_batch() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        loss = model(batch["x"]).square().mean() * batch["scale"]
        if batch.get("flip"):
            loss = -loss
        return loss + len(batch["name"])

    pair = SideBySide(lambda: fixtures.mlp().model, loss_fn, adamw())
    x = rows(0, 3, 8)
    batches = [
        {"x": x, "scale": 1, "flip": None, "name": "a"},
        {"x": x, "scale": 2, "flip": None, "name": "a"},
        {"x": x, "scale": 2.0, "flip": True, "name": "a"},
        {"x": x, "scale": True, "flip": False, "name": "abc"},
        {"x": x, "scale": 0.0, "flip": False, "name": "abc"},
        {"x": x, "scale": -0.0, "flip": False, "name": "abc"},
    ]
    for batch in batches + batches[:2]:
        pair.run(batch)
    assert pair.step.captures >= 5


@pytest.mark.case("B50")
def test_zero_and_minus_zero_are_two_numbers() -> None:
    model = nn.Linear(1, 1, bias=False)
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, b: (m(b[0]) ** 2).sum() * b[1]
    )
    losses = [step((torch.ones(1, 1), value)).loss for value in (0.0, -0.0)]
    assert [torch.signbit(loss).item() for loss in losses] == [False, True]


@pytest.mark.case("B50", "B47")
@pytest.mark.parametrize("what", ["rows", "number"])
def test_many_captures_warn_and_name_what_varies(what: str) -> None:
    model = nn.Linear(4, 1)
    step = sg.compile_train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda m, b: m(b["inputs"]["x"]).square().mean() * b["weight"],
    )

    def batch(i: int) -> dict[str, Any]:
        return {
            "inputs": {"x": rows(0, 2 + i if what == "rows" else 2, 4), "same": torch.ones(2)},
            "weight": 1.0 if what == "rows" else float(i + 1),
        }

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(12):
            step(batch(i))
            step(batch(i))
    ours = [w for w in caught if issubclass(w.category, sg.StepGraphWarning)]
    assert len(ours) == 1, "once, not at every capture"
    text = str(ours[0].message)
    assert ("inputs.x" if what == "rows" else "weight") in text
    assert "same" not in text
    assert ("weight" not in text) or what == "number"
    assert "captures so far" in text
    assert ours[0].filename == __file__, "points at the call of the step"
    assert 3 <= int(text.split()[0]) <= 12, "more than a handful"
