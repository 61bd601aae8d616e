"""What may change between two steps: hyperparameters, modes, shapes, state, membership. Each step uses what holds then."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def refusal_of(run: Callable[[], Any]) -> str | None:
    """What stepgraph says where it refuses to run; None where it runs."""
    try:
        run()
    except sg.StepGraphError as error:
        return str(error)
    return None


class SideBySide:
    """Eager and the graph on twins, step after step, with the same thing done to both in between."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss_fn: fixtures.LossFn,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        max_norm: float | None = 1.0,
    ) -> None:
        self.eager, self.model = oracle.twin(build)
        self.eager_optimizer, self.optimizer = optimizer(self.eager), optimizer(self.model)
        self.loss_fn, self.max_norm = loss_fn, max_norm
        self.step = sg.compile_train_step(self.model, self.optimizer, loss_fn=loss_fn, max_norm=max_norm)
        self.count = 0

    def run(self, batch: Any, steps: int = 1) -> None:
        """The same steps in both, which then agree in every bit."""
        for _ in range(steps):
            self.count += 1
            (want,) = oracle.eager_steps(
                self.eager,
                self.eager_optimizer,
                self.loss_fn,
                [batch],
                max_norm=self.max_norm,
                checkpoints=(1,),
                seed=self.count,
            ).values()
            (got,) = oracle.graph_steps(
                self.step, self.model, self.optimizer, [batch], checkpoints=(1,), seed=self.count
            ).values()
            oracle.assert_bitwise(want, got)

    def both(self, change: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        """Does the same to both."""
        change(self.eager, self.eager_optimizer)
        change(self.model, self.optimizer)


def mlp_pair(optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> SideBySide:
    return SideBySide(lambda: fixtures.mlp().model, fixtures.squared_error, optimizer, **options)


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options})


def sgd(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


# B47: hyperparameters

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (t + 1)),
    "plateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=5),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=6),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=False),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 3)], [2]),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
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


@pytest.mark.parametrize("form", FORMS, ids=str)
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


@pytest.mark.parametrize("form", FORMS, ids=str)
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


@pytest.mark.parametrize("form", FORMS, ids=str)
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


# State and membership


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.case("B47", "B53")
def test_optimizer_load_state_dict_between_steps(form: dict[str, bool]) -> None:
    pair = mlp_pair(adamw(weight_decay=0.1, **form))
    batch = fixtures.mlp().batch
    pair.run(batch, steps=2)
    saved = copy.deepcopy(pair.eager_optimizer.state_dict())
    empty = adamw(weight_decay=0.1, **form)(fixtures.mlp().model).state_dict()
    pair.run(batch, steps=2)
    pair.both(lambda _, o: o.load_state_dict(copy.deepcopy(saved)))
    pair.run(batch, steps=2)
    pair.both(lambda _, o: o.load_state_dict(copy.deepcopy(empty)))
    pair.run(batch, steps=2)
    pair.both(lambda _, o: o.state.clear())
    pair.run(batch, steps=2)
    assert pair.step.captures == 1


@pytest.mark.case("B47")
def test_optimizer_state_written_by_hand() -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch)

    def change(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for entries in optimizer.state.values():
            entries["exp_avg"] = torch.ones_like(entries["exp_avg"])
            entries["step"].fill_(7.0)

    pair.both(change)
    pair.run(batch, steps=2)

    def replace_by_an_equal_one(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for entries in optimizer.state.values():
            entries["step"] = entries["step"].clone()

    pair.both(replace_by_an_equal_one)
    pair.run(batch, steps=2)

    def forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        del optimizer.state[model[0].weight]

    pair.both(forget)
    pair.run(batch, steps=2)


@pytest.mark.case("B40")
def test_model_load_state_dict_between_steps() -> None:
    pair = SideBySide(lambda: fixtures.bn().model, fixtures.mean_square, adamw())
    batch = fixtures.bn().batch
    pair.run(batch, steps=2)
    other = fixtures.bn(seed=5).model.state_dict()
    pair.both(lambda m, _: m.load_state_dict(other))
    pair.run(batch, steps=2)
    assert pair.step.captures == 1


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.case("B38", "B37")
def test_freeze_and_unfreeze(form: dict[str, bool]) -> None:
    pair = mlp_pair(adamw(weight_decay=0.1, **form))
    batch = fixtures.mlp().batch
    pair.both(lambda m, _: m[0].requires_grad_(False))
    start = pair.model[0].weight.detach().clone()
    pair.run(batch, steps=2)
    assert torch.equal(pair.model[0].weight, start)
    pair.both(lambda m, _: m[0].requires_grad_(True))
    pair.run(batch, steps=2)
    assert not torch.equal(pair.model[0].weight, start)
    pair.both(lambda m, _: m[2].bias.requires_grad_(False))
    pair.run(batch, steps=2)
    pair.both(lambda m, _: m.requires_grad_(True))
    pair.run(batch, steps=2)
    assert pair.step.captures == 3


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.case("B38", "B41")
def test_add_param_group(form: dict[str, bool]) -> None:
    pair = mlp_pair(lambda m: torch.optim.AdamW(m[2].parameters(), lr=0.1, **form), max_norm=None)

    def run(steps: int) -> None:
        for _ in range(steps):  # without clipping, since eager's norm would count what no group holds
            pair.count += 1
            for optimizer, step in ((pair.eager_optimizer, None), (pair.optimizer, pair.step)):
                if step is None:
                    pair.loss_fn(pair.eager, batch).backward()
                    optimizer.step()
                    pair.eager.zero_grad(set_to_none=True)
                else:
                    last = step(batch)
            zero = torch.zeros(())
            assert last.applied
            oracle.assert_bitwise(
                oracle.snapshot(pair.eager, pair.eager_optimizer, 0, zero, zero),
                oracle.snapshot(pair.model, pair.optimizer, 0, zero, zero),
            )

    batch = fixtures.mlp().batch
    start = pair.model[0].weight.detach().clone()
    run(2)
    assert torch.equal(pair.model[0].weight, start)
    pair.both(lambda m, o: o.add_param_group({"params": list(m[0].parameters()), "lr": 0.01, "weight_decay": 0.5}))
    run(3)
    assert not torch.equal(pair.model[0].weight, start)
    removed = pair.model[0].weight.detach().clone()
    pair.both(lambda _, o: o.param_groups.pop())
    pair.both(lambda m, o: [o.state.pop(p) for p in m[0].parameters()])
    run(2)
    assert torch.equal(pair.model[0].weight, removed)


def test_group_with_a_foreign_parameter_is_refused_when_it_appears() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    step(fixture.batch)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises((sg.ConfigError, sg.GuardError), match="does not belong to the\\s+model"):
        step(fixture.batch)


@pytest.mark.case("B42")
def test_model_to_another_dtype() -> None:
    def convert(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        model.to(dtype)
        optimizer.load_state_dict(optimizer.state_dict())  # casts the state, as eager needs it too

    pair = SideBySide(
        lambda: fixtures.bn().model, lambda m, x: fixtures.mean_square(m, x.to(m[0].weight.dtype)), adamw()
    )
    batch = fixtures.bn().batch
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16):
        pair.both(lambda m, o, dtype=dtype: convert(m, o, dtype))
        pair.run(batch, steps=2)
        assert all(p.dtype is dtype for p in pair.model.parameters())
    assert pair.model[1].num_batches_tracked == 8


# Autocast


def autocast_inside(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fixtures.squared_error(model, batch)


class Twice(nn.Module):
    """One layer used twice, whose gradients autocast sums in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()).softmax(-1))


@pytest.mark.parametrize("build", [Twice, lambda: fixtures.mlp().model])
def test_autocast_inside_the_loss(build: Callable[[], nn.Module]) -> None:
    pair = SideBySide(build, autocast_inside, adamw())
    for batch in fixtures.batches(fixtures.mlp, 3):
        pair.run(batch)
    assert any(
        "bfloat16" in str(n.meta["val"].dtype) for n in pair.step.graph.calls if isinstance(n.meta["val"], Tensor)
    )


@pytest.mark.parametrize("build", [Twice, lambda: fixtures.mlp().model])
def test_autocast_around_the_call_is_another_capture(build: Callable[[], nn.Module]) -> None:
    """Autocast around a step acts on forward and loss, like autocast around those in eager."""
    eager, graph = oracle.twin(build)
    eager_optimizer, optimizer = adamw()(eager), adamw()(graph)
    step = sg.compile_train_step(graph, optimizer, loss_fn=fixtures.squared_error, max_norm=1.0)
    for number, batch in enumerate(fixtures.batches(fixtures.mlp, 6)):
        enabled = number % 2 == 1
        loss_fn = autocast_inside if enabled else fixtures.squared_error
        want = oracle.eager_steps(eager, eager_optimizer, loss_fn, [batch], max_norm=1.0, checkpoints=(1,))
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = step(batch)
        got = oracle.snapshot(graph, optimizer, 1, result.loss, result.grad_norm)
        oracle.assert_bitwise(want[1], got)
    assert step.captures == 2


def test_a_step_under_no_grad_or_inference_mode() -> None:
    """A training step trains, whatever grad mode the caller is in, or says that it cannot."""
    for mode in (torch.no_grad, torch.inference_mode):
        for captured_before in (True, False):
            fixture, eager = fixtures.mlp(), fixtures.mlp()
            step = sg.compile_train_step(
                fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
            )
            if captured_before:
                step.prepare(fixture.batch)
            start = fixture.model[0].weight.detach().clone()
            with mode():
                refusal = refusal_of(lambda: step(fixture.batch))  # noqa: B023
            if refusal is not None:
                assert "grad" in refusal
                assert torch.equal(fixture.model[0].weight, start)
                continue
            oracle.eager_steps(
                eager.model,
                torch.optim.SGD(eager.model.parameters(), lr=0.1),
                eager.loss_fn,
                [eager.batch],
                checkpoints=(1,),
            )
            assert torch.equal(fixture.model[0].weight, eager.model[0].weight)


# Objects that are replaced


def test_replaced_parameter_is_named() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    step(fixture.batch)
    before = {n: p.detach().clone() for n, p in fixture.model.named_parameters()}
    old = fixture.model[2].bias
    fixture.model[2].bias = nn.Parameter(torch.zeros(4))
    for call in (step, step.prepare, step.verify):
        with pytest.raises(sg.GuardError, match=r"2\.bias") as caught:
            call(fixture.batch)
        assert "compile the step again" in str(caught.value)
    fixture.model[2].bias = old
    assert all(torch.equal(p, before[n]) for n, p in fixture.model.named_parameters())
    assert step(fixture.batch).applied


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict(fixtures.mlp(seed=3).model.state_dict(), assign=True),
        lambda m: m.__setitem__(0, nn.Linear(8, 16)),
        lambda m: m[0].register_parameter("weight", None),
        lambda m: delattr(m[0], "bias"),
    ],
    ids=["assign", "module", "none", "deleted"],
)
def test_every_way_to_replace_a_parameter(change: Callable[[nn.Module], Any]) -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    step(fixture.batch)
    change(fixture.model)
    with pytest.raises(sg.GuardError, match=r"'0'|0\.(weight|bias)"):
        step(fixture.batch)


def test_parameter_or_module_added_later_is_noticed() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Growing()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=fixtures.mean_square)
    x = rows(0, 3, 4)
    step(x)
    model.layers.append(nn.Linear(4, 4))
    want = fixtures.mean_square(model, x)
    losses = []
    refusal = refusal_of(lambda: losses.append(step(x).loss))
    assert torch.equal(losses[0], want) if refusal is None else "layers" in refusal


def test_tied_weight_that_is_untied_is_noticed() -> None:
    fixture = fixtures.tied()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    step(fixture.batch)
    fixture.model.head.weight = nn.Parameter(fixture.model.embedding.weight.detach().clone())
    with pytest.raises(sg.GuardError, match=r"head\.weight"):
        step(fixture.batch)


def test_parameter_data_replaced_in_place_is_followed() -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch, steps=2)

    def change(model: nn.Module, _: torch.optim.Optimizer) -> None:
        model[0].weight.data = torch.full((16, 8), 0.1)
        with torch.no_grad():
            model[2].weight.zero_()

    pair.both(change)
    pair.run(batch, steps=2)
    assert pair.step.captures == 1


def test_parameter_data_of_another_shape_is_noticed() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1))
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, b: m(b).sum() / m[0].weight.shape[0]
    )
    ids = torch.tensor([0, 1, 2])
    step(ids)
    model[0].weight.data = torch.randn(10, 4)
    with torch.no_grad():
        want = model(ids).sum() / 10
    losses = []
    refusal = refusal_of(lambda: losses.append(step(ids).loss))
    assert torch.equal(losses[0], want) if refusal is None else "0.weight" in refusal


def test_parameter_data_of_another_layout_is_followed() -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch)

    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        optimizer.state.clear()

    pair.both(change)
    pair.run(batch, steps=2)


class Settings(nn.Module):
    """Reads plain attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale, self.flip, self.mode, self.shift = 2.0, False, "sum", None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale
        x = -x if self.flip else x
        x = x if self.shift is None else x + self.shift
        return x.sum() if self.mode == "sum" else x.square().mean()


@pytest.mark.case("B48")
def test_plain_attributes_that_change_are_followed() -> None:
    """As `training` is: another value is another capture, and the first one is used again."""
    pair = SideBySide(Settings, fixtures.own_output, adamw())
    batch = rows(0, 3, 4)
    pair.run(batch)
    for name, value in (("scale", 3.0), ("flip", True), ("mode", "mean"), ("shift", 0.5), ("scale", 2.0)):
        pair.both(lambda m, _, name=name, value=value: setattr(m, name, value))
        pair.run(batch)
    pair.both(lambda m, _: m.__dict__.update(scale=2.0, flip=False, mode="sum", shift=None))
    pair.run(batch)
    assert pair.step.captures == 6


# Hooks and other things added after compilation


ADDITIONS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "gradient": lambda m, _: m[0].weight.register_hook(lambda g: g * 0.5),
    "forward": lambda m, _: m[0].register_forward_hook(lambda mod, a, out: out * 2),
    "forward_pre": lambda m, _: m.register_forward_pre_hook(lambda mod, a: (a[0] * 2,)),
    "full_backward": lambda m, _: m[0].register_full_backward_hook(lambda mod, gi, go: None),
    "full_backward_pre": lambda m, _: m[2].register_full_backward_pre_hook(lambda mod, go: (go[0] * 2,)),
    "post_accumulate": lambda m, _: m[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    "step_pre": lambda _, o: o.register_step_pre_hook(lambda *a: None),
    "step_post": lambda _, o: o.register_step_post_hook(lambda *a: None),
}


@pytest.mark.parametrize("addition", ADDITIONS)
def test_hooks_added_later_act_as_in_eager_or_are_refused(addition: str) -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch)
    pair.both(ADDITIONS[addition])
    refusal = refusal_of(lambda: pair.run(batch))
    assert refusal is None or "hook" in refusal


def test_a_post_accumulate_hook_is_noticed_at_once_and_for_as_long_as_it_is_there() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    step(fixture.batch)
    handle = fixture.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    for _ in range(2):
        with pytest.raises(sg.GuardError, match="post-accumulate-grad hook"):
            step(fixture.batch)
    handle.remove()
    assert step(fixture.batch).applied


def test_hooks_that_come_and_go() -> None:
    pair = mlp_pair(sgd())
    batch = fixtures.mlp().batch
    pair.run(batch)
    handles: list[Any] = []
    pair.both(lambda m, _: handles.append(m[0].weight.register_hook(lambda g: g * 2)))
    pair.run(batch)
    pair.both(lambda m, _: handles.append(m[2].register_forward_hook(lambda mod, a, out: out * 3)))
    pair.run(batch)
    for handle in handles:
        handle.remove()
    pair.run(batch)
    assert pair.step.captures == 3


def test_functional_loss_that_reads_a_global_setting() -> None:
    """The default dtype takes part in what forward computes, and is guarded."""
    pair = SideBySide(
        lambda: fixtures.mlp(dtype=torch.float64).model,
        lambda m, x: F.mse_loss(m(x).to(torch.get_default_dtype()), torch.zeros(3, 4, dtype=torch.get_default_dtype())),
        adamw(),
    )
    x = rows(0, 3, 8).double()
    pair.run(x)
    torch.set_default_dtype(torch.float64)
    try:
        pair.run(x)
    finally:
        torch.set_default_dtype(torch.float32)
    pair.run(x)
    assert pair.step.captures == 2
