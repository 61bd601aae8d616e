"""`step.verify`: says bitwise equal where it is, names the first wrong node where it is not, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import stepgraph as sg
from stepgraph.graph import InputRole
from stepgraph.runtime import Executor

from . import fixtures, oracle, zoo
from .fixtures import rows

aten = torch.ops.aten


def compiled(
    fixture: fixtures.Fixture, optimizer: str = "adamw_forloop", *, max_norm: float | None = 0.1, **options: Any
) -> sg.TrainStep:
    built = oracle.OPTIMIZERS[optimizer]([p for p in fixture.model.parameters() if p.requires_grad])
    return sg.compile_train_step(fixture.model, built, loss_fn=fixture.loss_fn, max_norm=max_norm, **options)


def remembered(step: sg.TrainStep) -> Callable[[], None]:
    """Returns a check that everything about model and optimizer is as it is now: objects, values and random streams."""
    model, optimizer = step.model, step.optimizer

    def all_of() -> tuple[list[Any], list[Any]]:
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [v for m in model.modules() for v in m.__dict__.values() if isinstance(v, Tensor)]
        tensors += [p.grad for p in model.parameters()]
        tensors += [v for entries in optimizer.state.values() for v in entries.values()]
        plain = {
            path + "." + name: copy.deepcopy(value)
            for path, module in model.named_modules()
            for name, value in module.__dict__.items()
            if isinstance(value, (bool, int, float, str))
        }
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        values = [plain, groups, torch.get_rng_state().tolist(), list(map(id, optimizer.state))]
        values += [None if t is None else (t.dtype, t.shape, oracle.bits(t).tolist()) for t in tensors]
        return tensors, values

    tensors, values = all_of()

    def check() -> None:
        tensors_now, values_now = all_of()
        assert len(tensors) == len(tensors_now)
        assert all(a is b for a, b in zip(tensors, tensors_now, strict=True)), "the very same objects"
        assert values == values_now

    return check


# Equal


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_nesterov", "adamw_forloop", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("name", fixtures.FIXTURES)
def test_bitwise_equal_on_fixtures(name: str, optimizer: str) -> None:
    fixture = fixtures.FIXTURES[name]()
    step = compiled(fixture, optimizer)
    for number in range(3):
        check = remembered(step)
        report = step.verify(fixture.batch)
        assert report.equal, str(report)
        assert (report.first, report.differences) == (None, [])
        assert str(report).startswith("bitwise equal to eager")
        assert report.compared["parameters"] == len(list(fixture.model.parameters()))
        assert report.compared["buffers"] == len(list(fixture.model.buffers()))
        assert (report.compared["loss"], report.compared["random streams"]) == (1, 1)
        check()
        assert step(fixture.batch).step == number + 1, "verifying is no step"
    assert step.captures == 1


@pytest.mark.parametrize("options", [{"max_norm": None}, {"nonfinite": "ignore"}, {"nonfinite": "raise"}], ids=str)
def test_bitwise_equal_under_every_option(options: dict[str, Any]) -> None:
    fixture = fixtures.mlp()
    assert compiled(fixture, **options).verify(fixture.batch).equal


def test_verifying_does_not_disturb_a_run() -> None:
    plain, verified = fixtures.drop(), fixtures.drop()
    steps = [compiled(plain), compiled(verified)]
    batches = fixtures.batches(fixtures.drop, 5)
    want = oracle.graph_steps(steps[0], plain.model, steps[0].optimizer, batches)

    def step(batch: Any) -> Any:
        steps[1].verify(batch)
        result = steps[1](batch)
        steps[1].verify(batch)
        return result

    oracle.assert_bitwise(want, oracle.graph_steps(step, verified.model, steps[1].optimizer, batches))


class Busy(nn.Module):
    """Buffers, plain tensors, Python counters and an old gradient, all of which a forward run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.plain = torch.zeros(4)
        self.calls = 0
        self.linear.bias.grad = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.n += 1
        self.replaced = self.replaced + 2
        self.plain.add_(x.mean(0))
        return self.norm(nn.functional.dropout(self.linear(x), 0.5)) + self.plain + self.n


@pytest.mark.filterwarnings("ignore::stepgraph.StepGraphWarning")
def test_everything_is_undone() -> None:
    fixture = fixtures.Fixture(Busy(), rows(0, 6, 4), fixtures.mean_square)
    step = compiled(fixture)
    check, batch = remembered(step), fixture.batch.clone()
    assert step.verify(fixture.batch).equal
    check()
    assert torch.equal(fixture.batch, batch)


def test_everything_is_undone_where_eager_fails() -> None:
    class Fragile(Busy):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.fails:
                raise ValueError("no")
            return out

    model = Fragile()
    step = compiled(fixtures.Fixture(model, None, fixtures.mean_square))
    batch = rows(0, 6, 4)
    with pytest.warns(sg.StepGraphWarning):
        step(batch)
    Fragile.fails = True
    check = remembered(step)
    with pytest.raises(ValueError, match="no"):
        step.verify(batch)
    check()


def test_loss_that_closes_over_the_model_and_an_optimizer_with_attributes() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.factor = 2.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"] * self.factor)

    model = fixtures.bn().model
    step = sg.compile_train_step(model, Own(model.parameters()), loss_fn=lambda _, x: fixtures.mean_square(model, x))
    check = remembered(step)
    report = step.verify(fixtures.bn().batch)
    assert report.equal, str(report)
    check()


# One wrong node


class Differences(nn.Module):
    """Operators whose operands matter, in several modules."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.activation, self.drop = nn.Tanh(), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.left(x) - self.right(x))
        return self.norm(self.drop(hidden)).softmax(-1) * 3.0


def differences_fixture() -> fixtures.Fixture:
    with fixtures.seeded(0):
        return fixtures.Fixture(Differences(), rows(0, 5, 4), fixtures.mean_square)


def only(step: sg.TrainStep, family: str, phase: str, place: int = 0) -> fx.Node:
    found = [n for n in step.graph.calls if n.meta["key"].family == family and str(n.meta["phase"]) == phase]
    assert len(found) > place, f"{family} in {sorted({n.meta['key'].family for n in step.graph.calls})}"
    return found[place]


def rebuilt(step: sg.TrainStep, batch: Any) -> None:
    _, variant, _ = step._captures.find(batch)
    variant.executor = Executor(variant.graph)


def assert_named(step: sg.TrainStep, batch: Any, node: fx.Node) -> None:
    """`verify` finds exactly `node`, and everything is as before."""
    rebuilt(step, batch)
    check = remembered(step)
    report = step.verify(batch)
    assert not report.equal
    assert report.first == str(node.meta["key"]), str(report)
    assert report.differences
    assert report.first in str(report)
    assert "differs from eager" in str(report)
    check()


def retarget(target: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.target = target

    return change


def with_arg(position: int, value: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        assert node.args[position] != value
        node.update_arg(position, value)

    return change


def with_kwarg(name: str, value: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        assert node.kwargs[name] != value
        node.update_kwarg(name, value)

    return change


def swap(a: int, b: int) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        left, right = node.args[a], node.args[b]
        node.update_arg(a, right)
        node.update_arg(b, left)

    return change


def negated(node: fx.Node) -> None:
    """The same operator with its result negated."""
    target = node.target
    node.target = lambda *args, **kwargs: torch.neg(target(*args, **kwargs))


WRONG: dict[str, tuple[str, str, Callable[[fx.Node], None]]] = {
    "forward_operator": ("tanh", "forward", retarget(aten.sigmoid.default)),
    "forward_constant": ("div_", "forward", with_arg(1, 0.25)),
    "forward_probability": ("bernoulli_", "forward", lambda node: setattr(node, "args", (node.args[0], 0.25))),
    "forward_epsilon": ("native_layer_norm", "forward", with_arg(4, 0.5)),
    "forward_dimension": ("_softmax", "forward", with_arg(1, 0)),
    "forward_operands": ("sub", "forward", swap(0, 1)),
    "forward_scalar": ("mul", "forward", with_arg(1, 3.25)),
    "forward_negated": ("mul", "forward", negated),
    "backward_operator": ("tanh_backward", "backward", retarget(aten.sigmoid_backward.default)),
    "backward_negated": ("tanh_backward", "backward", negated),
    "backward_operands": ("tanh_backward", "backward", swap(0, 1)),
    "backward_softmax": ("_softmax_backward_data", "backward", with_arg(2, 0)),
    "backward_sum": ("sum", "backward", negated),
    "norm_order": ("linalg_vector_norm", "norm", with_arg(1, 1.0)),
    "norm_epsilon": ("add", "norm", with_arg(1, 1e-2)),
    "clip_threshold": ("mul", "norm", with_arg(1, 0.2)),
    "clip_limit": ("clamp", "norm", with_kwarg("max", 1e-3)),
    "clip_operator": ("reciprocal", "norm", retarget(aten.neg.default)),
    "update_decay": ("mul_", "update", with_arg(1, 0.5)),
    "update_operator": ("sqrt", "update", retarget(aten.exp.default)),
    "update_constant": ("lerp_", "update", with_arg(2, 0.75)),
    "update_step": ("addcdiv_", "update", swap(1, 2)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_one_wrong_node_is_named(wrong: str) -> None:
    family, phase, change = WRONG[wrong]
    fixture = differences_fixture()
    step = compiled(fixture)
    for _ in range(2):
        step(fixture.batch)
    assert step.verify(fixture.batch).equal
    node = only(step, family, phase)
    change(node)
    assert_named(step, fixture.batch, node)


@pytest.mark.parametrize("place", range(6))
def test_later_nodes_of_one_family_are_told_apart(place: int) -> None:
    """The six parameters' updates look alike."""
    fixture = differences_fixture()
    step = compiled(fixture)
    for _ in range(2):
        step(fixture.batch)
    node = only(step, "addcdiv_", "update", place)
    node.update_arg(1, node.args[2])
    assert_named(step, fixture.batch, node)


def test_swapped_inputs_of_the_same_shape() -> None:
    fixture = differences_fixture()
    step = compiled(fixture)
    for _ in range(2):
        step(fixture.batch)
    params = step.graph.input_nodes(InputRole.PARAM)
    left, right = params["left.weight"], params["right.weight"]
    node = next(n for n in step.graph.calls if left in n.all_input_nodes)
    node.replace_input_with(left, right)
    assert_named(step, fixture.batch, node)


def test_a_hyperparameter_mixed_up() -> None:
    fixture = differences_fixture()
    step = compiled(fixture, "sgd_momentum")
    for _ in range(2):
        step(fixture.batch)
    node = only(step, "add_", "update", 1)
    node.update_kwarg("alpha", -0.5)
    assert_named(step, fixture.batch, node)


@pytest.mark.parametrize("optimizer", ["adamw_foreach", "sgd_nesterov_foreach"])
def test_wrong_node_in_a_foreach_update(optimizer: str) -> None:
    fixture = fixtures.mlp()
    step = compiled(fixture, optimizer)
    for _ in range(2):
        step(fixture.batch)
    node = [n for n in step.graph.calls if str(n.meta["phase"]) == "update" and "foreach" in n.meta["key"].family][-1]
    assert "_foreach_add" in str(node.target)
    swap(0, 1)(node) if "addcdiv" not in str(node.target) else swap(1, 2)(node)
    assert_named(step, fixture.batch, node)


def test_wrong_node_in_a_fused_update() -> None:
    fixture = fixtures.mlp()
    step = compiled(fixture, "adamw_fused")
    for _ in range(2):
        step(fixture.batch)
    node = only(step, "fused_adamw_", "update")
    swap(2, 3)(node)
    assert_named(step, fixture.batch, node)


UNPAIRED = {"empty_like", "empty", "empty_strided", "new_empty", "getitem", "nonfinite_code", "gate"}


@pytest.mark.parametrize("name", ["MLP", *(pytest.param(n, marks=pytest.mark.slow) for n in ("BN", "DROP", "TIED"))])
def test_every_node_made_wrong_is_named(name: str) -> None:
    """Each operator in turn gives another result; whatever eager runs too is named, the rest is at least noticed."""
    fixture = fixtures.FIXTURES[name]()
    step = compiled(fixture)
    for _ in range(2):
        step(fixture.batch)
    for node in step.graph.calls:
        value = node.meta["val"]
        if node in step.graph.output_values and node.meta["key"].family == "detach":
            continue  # what the step hands out; eager's loop has no such call within the step
        if not isinstance(value, Tensor) or not value.is_floating_point() or node.meta["key"].family in UNPAIRED:
            continue
        target, perturbed = node.target, node.meta["trace_index"] is None and str(node.meta["phase"]) == "backward"

        def wrong(*args: Any, _target: Any = target, **kwargs: Any) -> Any:
            out = _target(*args, **kwargs)
            return out.mul_(1.5).add_(0.25) if _target._schema.is_mutable else out * 1.5 + 0.25

        node.target = wrong
        rebuilt(step, fixture.batch)
        report = step.verify(fixture.batch)
        node.target = target
        if report.equal:
            assert not node.users or node.meta["key"].family in ("detach", "view"), f"{node.meta['key']} is not noticed"
        elif not perturbed:
            assert report.first == str(node.meta["key"]), f"{node.meta['key']}: {report}"
    rebuilt(step, fixture.batch)
    assert step.verify(fixture.batch).equal


@pytest.mark.parametrize("change", ["dropped_write", "another_random_draw"])
def test_effects_that_are_wrong_are_noticed(change: str) -> None:
    fixture = fixtures.bn() if change == "dropped_write" else fixtures.drop()
    step = compiled(fixture)
    step.prepare(fixture.batch)
    if change == "dropped_write":
        node = only(step, "native_batch_norm", "forward")
        node.update_arg(3, None)
        node.update_arg(4, None)
        rebuilt(step, fixture.batch)
        report = step.verify(fixture.batch)
        assert not report.equal
        assert any("running_mean" in line for line in report.differences)
    else:
        node = only(step, "bernoulli_", "forward")
        with step.graph.graph.inserting_before(node):
            extra = step.graph.graph.call_function(aten.rand.default, ([2],))
        extra.meta.update(node.meta)
        rebuilt(step, fixture.batch)
        report = step.verify(fixture.batch)
        assert not report.equal
        assert any("random stream" in line for line in report.differences)


# Python state, and what eager does only outside of a trace


class Scaled(nn.Module):
    """Multiplies by a number that is in an object of the user's own, which no step can watch."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(scale=2.0, flip=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.settings.scale
        return -x if self.settings.flip else x


def scaled() -> fixtures.Fixture:
    with fixtures.seeded(0):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Scaled()), nn.Linear(4, 1))
    return fixtures.Fixture(model, rows(0, 3, 4), fixtures.mean_square)


def test_python_state_that_changed_since_capture_is_found() -> None:
    fixture = scaled()
    step = compiled(fixture)
    step(fixture.batch)
    assert step.verify(fixture.batch).equal
    fixture.model[1][1].settings.scale = 3.0
    check = remembered(step)
    report = step.verify(fixture.batch)
    assert not report.equal
    node = next(n for n in step.graph.calls if n.meta["key"].module == "1.1")
    assert report.first == str(node.meta["key"])
    assert node.meta["key"].family == "mul"
    assert "test_verify.py" in report.detail, "the source line"
    check()
    fixture.model[1][1].settings.scale = 2.0
    assert step.verify(fixture.batch).equal


def test_python_branch_that_changed_since_capture_is_found() -> None:
    fixture = scaled()
    step = compiled(fixture)
    step(fixture.batch)
    fixture.model[1][1].settings.flip = True
    report = step.verify(fixture.batch)
    assert not report.equal
    assert report.first is not None
    assert report.first.startswith(("1.1/", "2/")), "in the module that changed, or the first that reads it"


def test_number_that_a_closure_changed_is_found() -> None:
    factor = 1.0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return fixtures.squared_error(model, batch) * factor

    fixture = fixtures.mlp()
    step = compiled(fixtures.Fixture(fixture.model, fixture.batch, loss_fn))
    step(fixture.batch)
    factor = 2.0
    report = step.verify(fixture.batch)
    assert not report.equal
    assert any(line.startswith("loss") for line in report.differences)
    assert report.first is not None
    assert report.first.startswith("(root)/mul")


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("qwen3", 0.0),
        pytest.param("qwen3", 0.1, marks=pytest.mark.slow),
        pytest.param("llama", 0.0, marks=pytest.mark.slow),
        pytest.param("mixtral", 0.1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.case("B61")
def test_mask_of_ones_is_equal_or_the_attention_is_named(
    name: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager reads the mask and leaves it out where it is all ones; a trace cannot read it. Kernels may agree all the same."""
    monkeypatch.setattr(zoo, "DROPOUT", dropout)
    entry = zoo.ZOO[name]
    model = entry.build()
    batch = entry.batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    step = sg.compile_train_step(model, torch.optim.AdamW(model.parameters()), max_norm=1.0)
    report = step.verify(batch)
    if not report.equal:
        assert report.first is not None
        assert "attn" in report.first, str(report)


# verify="first"


@pytest.mark.parametrize("name", ["MLP", "DROP", "BN"])
def test_first_step_is_verified_once(name: str) -> None:
    make = fixtures.FIXTURES[name]
    plain, verified = make(), make()
    steps = [compiled(plain), compiled(verified, verify="first")]
    assert steps[1].last_verification is None
    batches = fixtures.batches(make, 5)
    want = oracle.graph_steps(steps[0], plain.model, steps[0].optimizer, batches)
    calls: list[int] = []
    original = steps[1].verify
    steps[1].verify = lambda batch: (calls.append(1), original(batch))[1]
    oracle.assert_bitwise(want, oracle.graph_steps(steps[1], verified.model, steps[1].optimizer, batches))
    assert calls == [1]
    assert steps[1].last_verification.equal
    assert "bitwise equal" in steps[1].report()
    assert steps[0].last_verification is None


def test_first_step_that_differs_warns_and_goes_on() -> None:
    fixture = scaled()
    step = compiled(fixture, verify="first")
    step.prepare(fixture.batch)
    fixture.model[1][1].settings.scale = 3.0
    with pytest.warns(sg.StepGraphWarning, match="1.1/mul") as caught:
        result = step(fixture.batch)
    assert caught[0].filename == __file__
    assert result.applied
    assert not step.last_verification.equal
    step(fixture.batch)
    assert "differs from eager" in step.report()


# Batches whose loss is not finite


@pytest.mark.parametrize("nonfinite", ["ignore", "skip", "raise"])
@pytest.mark.case("B07")
def test_batch_that_is_skipped(nonfinite: str) -> None:
    """Eager would update by NaN. Under `ignore` so does the graph; otherwise all but the update is compared."""
    fixture = fixtures.mlp()
    step = compiled(fixture, nonfinite=nonfinite)
    x, y = fixture.batch
    batch = (x.clone(), y)
    batch[0][0, 0] = float("nan")
    check = remembered(step)
    report = step.verify(batch)
    assert report.equal, str(report)
    check()
    assert ("the update is skipped" in str(report)) is (nonfinite != "ignore")
    assert (report.compared["parameters"] == 0) is (nonfinite != "ignore")
