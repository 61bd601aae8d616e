"""Capture changes nothing, also where it fails, and what cannot be captured is refused by name, place and remedy."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import stepgraph as sg

from . import fixtures, oracle, zoo


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# What must be as before


def portrait(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Everything that a capture could disturb, in a form that can be compared."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            found[f"{path}.{name}"] = describe(value)
    if optimizer is not None:
        found["optimizer"] = {k: describe(v) for k, v in optimizer.__dict__.items()}
        found["state"] = [(id(p), describe(entries)) for p, entries in optimizer.state.items()]
        found["groups"] = describe(optimizer.param_groups)
    found["random"] = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(numpy.random.get_state()),
    ]
    found["torch"] = [
        nn.Module.__call__,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.utils.checkpoint.CheckpointFunction.__dict__.get("apply"),
        torch._fused_adamw_,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
    ]
    return found


def describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        contents = None if value.is_meta else oracle.bits(value).tolist()
        hooks = [list((h or {}).items()) for h in (value._backward_hooks, value._post_accumulate_grad_hooks)]
        grad = None if not value.is_leaf or value.grad is None else (id(value.grad), describe(value.grad))
        return type(value), id(value), value._version, value.requires_grad, value.stride(), hooks, grad, contents
    if isinstance(value, dict):
        return id(value), type(value), [(key, describe(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return id(value), type(value), [describe(entry) for entry in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return id(value)


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    assert not changed, f"changed: {sorted(changed)}"


class Everything(nn.Module):
    """Dropout, BatchNorm, counters, plain tensors, containers, hooks, a region and an old gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("lazy", None)
        self.register_buffer("replaced", torch.zeros(4), persistent=False)
        self.plain = torch.ones(4)
        self.listed = [torch.ones(4), 3, [torch.zeros(1)]]
        self.mapped = {"a": torch.ones(4), "b": {"c": []}}
        self.names = {"x"}
        self.calls = 0
        self.first.weight.register_hook(lambda g: g * 2)
        self.norm.register_forward_hook(lambda m, args, out: out + 1)
        self.first.weight.grad = torch.ones(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=False)
        hidden = self.norm(F.dropout(hidden, 0.5)) * self.listed[0] + self.mapped["a"] + self.plain
        self.n += 1
        self.replaced = self.replaced + hidden.detach().mean(0)
        self.plain *= 1.5
        return self.last(hidden)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.case("B54")
def test_capture_changes_nothing(optimizer: str, with_state: bool) -> None:
    model = Everything()
    built = OPTIMIZERS[optimizer](model)
    batch = rows(0, 6, 4)
    if with_state:
        fixtures.mean_square(model, batch).backward()
        built.step()
    before, kept = portrait(model, built), batch.clone()
    step = sg.compile_train_step(model, built, loss_fn=fixtures.mean_square, max_norm=1.0)
    step.prepare(batch)
    step.report()
    str(step.graph)
    assert_same(before, portrait(model, built))
    assert torch.equal(batch, kept)
    assert batch._version == 0


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.case("B54")
def test_adamw_on_a_small_linear(form: dict[str, bool]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **form)
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    step.prepare(torch.ones(3, 2))
    assert_same(before, portrait(model, optimizer))
    assert not optimizer.state
    for count in (1.0, 2.0):
        step(torch.ones(3, 2))
        for entries in optimizer.state.values():
            assert isinstance(entries["step"], Tensor)
            assert entries["step"] == count
    assert step.captures == 1


@pytest.mark.parametrize(
    "name", ["gpt2", "mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "t5", "resnet", "mamba"))]
)
@pytest.mark.case("B54", "B61")
def test_capture_of_real_models_changes_nothing(name: str) -> None:
    model = zoo.ZOO[name].build()
    optimizer = torch.optim.AdamW(model.parameters())
    before = portrait(model, optimizer)
    sg.compile_train_step(model, optimizer, max_norm=1.0).prepare(zoo.ZOO[name].batch())
    assert_same(before, portrait(model, optimizer))


class Failing(Everything):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "hook":
            self.last.weight.register_hook(self._hook)

    def _hook(self, grad: Tensor) -> Tensor:
        raise ValueError("in a hook")

    def forward(self, x: Tensor) -> Tensor:
        self.mapped["b"]["c"].append(1)
        self.names.add("y")
        self.extra = "attribute"
        if self.where == "start":
            raise ValueError("at the start")
        out = super().forward(x)
        if self.where == "end":
            raise KeyboardInterrupt
        if self.where == "data":
            assert out.sum() > 0
        if self.where == "region":
            out = checkpoint(self._region, out, use_reentrant=False)
        if self.where == "backward":
            out = FailsInBackward.apply(out)
        if self.where == "shape":
            return out
        return out.square().mean()

    def _region(self, x: Tensor) -> Tensor:
        self.listed.append(x)
        raise RuntimeError("in a region")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in backward")


class FailingSGD(torch.optim.SGD):
    """Creates state, writes parameters, and then fails."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = torch.ones_like(p)
                p.add_(1)
        raise ValueError("in step")


@pytest.mark.filterwarnings("ignore::stepgraph.StepGraphWarning")
@pytest.mark.parametrize("where", ["start", "end", "data", "region", "backward", "hook", "shape", "optimizer"])
@pytest.mark.case("B54")
def test_failing_capture_changes_nothing(where: str) -> None:
    model = Failing(where)
    optimizer = (FailingSGD if where == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(model, optimizer, max_norm=1.0)
    batch = rows(0, 6, 4)
    before = portrait(model, optimizer)
    for call in (step.prepare, step, step.verify):
        with pytest.raises(KeyboardInterrupt if where == "end" else sg.StepGraphError):
            call(batch)
        assert_same(before, portrait(model, optimizer))
    assert step.captures == 0
    model.where = "nowhere"
    model.last.weight._backward_hooks.clear() if where == "hook" else None
    if where != "optimizer":
        assert step(batch).applied, "and a later step works"


@pytest.mark.case("B54")
def test_failing_capture_can_be_followed_by_eager() -> None:
    model, twin = Failing("data"), Everything()
    twin.load_state_dict(model.state_dict())
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(sg.CaptureError):
        step(rows(0, 6, 4))
    losses = []
    for module in (model, twin):
        torch.manual_seed(0)
        losses.append(Everything.forward(module, rows(0, 6, 4)))
    assert torch.equal(*losses)


# prepare


def as_meta(batch: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), batch)


def as_fake(batch: Any) -> Any:
    mode = FakeTensorMode()
    return torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, batch)


@pytest.mark.parametrize("kind", [lambda batch: batch, as_meta, as_fake], ids=["real", "meta", "fake"])
@pytest.mark.parametrize("name", ["MLP", "TIED", "BN", "DROP", "GPT"])
@pytest.mark.case("B54")
def test_prepare_runs_nothing_and_the_step_reuses_it(name: str, kind: Callable[[Any], Any]) -> None:
    make = fixtures.FIXTURES[name]
    fixture, eager = make(), make()
    optimizer = torch.optim.AdamW(fixture.model.parameters(), lr=0.01)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=1.0)
    before = portrait(fixture.model, optimizer)
    graph = step.prepare(kind(fixture.batch))
    assert graph is step.graph
    assert step.captures == 1
    assert step.grad_norm() is None
    assert_same(before, portrait(fixture.model, optimizer))
    batches = fixtures.batches(make, 5)
    got = oracle.graph_steps(step, fixture.model, optimizer, batches)
    assert step.captures == 1, "the prepared graph was used"
    eager_optimizer = torch.optim.AdamW(eager.model.parameters(), lr=0.01)
    oracle.assert_bitwise(oracle.eager_steps(eager.model, eager_optimizer, eager.loss_fn, batches, max_norm=1.0), got)


@pytest.mark.parametrize("kind", [as_meta, as_fake], ids=["meta", "fake"])
def test_prepare_with_layouts_and_constants(kind: Callable[[Any], Any]) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model(batch["x"]).square().mean() * batch["scale"]

    batch = {"x": rows(0, 8, 3).t(), "scale": 2.0}
    fixture = fixtures.mlp()
    step = sg.compile_train_step(fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=loss_fn)
    step.prepare(kind(batch))
    with torch.no_grad():
        want = loss_fn(fixture.model, batch)
    assert torch.equal(step(batch).loss, want)
    assert step.captures == 1


def test_nothing_is_captured_before_it_is_needed() -> None:
    model = Failing("start")
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    assert step.captures == 0
    with pytest.raises(sg.ConfigError, match="prepare"):
        _ = step.graph


# Python's own randomness


class Coin(nn.Module):
    """Python's and numpy's random numbers decide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.a if random.random() < 0.5 else self.b
        return chosen(x) * (1.0 + numpy.random.rand())


@pytest.mark.case("B54", "B61")
def test_python_s_random_streams_are_as_before() -> None:
    model = Coin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random.seed(0)
    numpy.random.seed(0)
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    with pytest.warns(sg.StepGraphWarning, match="draws from random and numpy.random"):
        step.prepare(rows(0, 3, 4))
    assert_same(before, portrait(model, optimizer))


# What is refused


def line_of(marker: str) -> int:
    """Number of the line of this file that ends with the comment `# marker`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, start=1) if line.endswith(f"# {marker}")]
    return number


def assert_says(error: sg.CaptureError, *, module: str | None, marker: str | None) -> None:
    """Module path, source line and remedy are there, and in the message."""
    assert error.module_path == module
    if marker is not None:
        assert error.source_line is not None
        filename, _, number = error.source_line.rpartition(":")
        assert os.path.samefile(filename, __file__)
        assert int(number) == line_of(marker)
        assert error.source_line in str(error)
    assert error.remedy
    assert error.remedy in str(error)
    assert (module or "(root)") in str(error)


class Body(nn.Module):
    """A model with one inner module, whose forward is the given function."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner = Inner(function)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inner(x))


class Inner(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.function(self, self.linear(x))


def branch(module: nn.Module, x: Tensor) -> Tensor:
    if x.sum() > 0:  # branch
        return x * 2
    return x


def loop(module: nn.Module, x: Tensor) -> Tensor:
    while x.norm() > 1:  # loop
        x = x / 2
    return x


def item(module: nn.Module, x: Tensor) -> Tensor:
    scale = float(x.max())  # item
    return x if scale > 1 else x * scale


def integer(module: nn.Module, x: Tensor) -> Tensor:
    for _ in range(int(x.argmax())):  # integer
        x = x + 1
    return x


def array(module: nn.Module, x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy())  # array


def asserted(module: nn.Module, x: Tensor) -> Tensor:
    assert (x < 1e9).all()  # asserted
    return x


def wrong_shape(module: nn.Module, x: Tensor) -> Tensor:
    return x @ torch.ones(3, 3)  # wrong_shape


def python_error(module: nn.Module, x: Tensor) -> Tensor:
    return x * module.no_such_thing  # python_error


def own_backward(module: nn.Module, x: Tensor) -> Tensor:
    x.sum().backward(retain_graph=True)  # own_backward
    return x


INSIDE = [branch, loop, item, integer, array, asserted, wrong_shape, python_error]


@pytest.mark.parametrize("function", INSIDE, ids=lambda f: f.__name__)
@pytest.mark.case("B54", "B61")
def test_code_that_cannot_be_traced(function: Callable[[nn.Module, Tensor], Any]) -> None:
    model = Body(function)
    optimizer = torch.optim.AdamW(model.parameters())
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    before = portrait(model, optimizer)
    with pytest.raises(sg.CaptureError) as caught:
        step(rows(0, 3, 4))
    assert_says(caught.value, module="inner", marker=function.__name__)
    assert_same(before, portrait(model, optimizer))
    if function in (branch, loop, item, integer, asserted):
        assert "value of a tensor" in str(caught.value)
    assert caught.value.__cause__ is not None, "the original error is chained"


def plain_item(module: nn.Module, x: Tensor) -> Tensor:
    return x * x.detach().max().item()


def plain_list(module: nn.Module, x: Tensor) -> Tensor:
    return x * sum(x.detach()[0].tolist())


@pytest.mark.parametrize("function", [plain_item, plain_list], ids=lambda f: f.__name__)
@pytest.mark.case("B61")
def test_numbers_that_nothing_branches_on_are_followed(function: Callable[[nn.Module, Tensor], Any]) -> None:
    eager, graph = oracle.twin(lambda: Body(function))
    batches = [rows(seed, 3, 4) for seed in range(5)]
    eager_optimizer, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, graph))
    step = sg.compile_train_step(graph, optimizer, loss_fn=fixtures.mean_square)
    want = oracle.eager_steps(eager, eager_optimizer, fixtures.mean_square, batches)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph, optimizer, batches))


@pytest.mark.case("B61")
def test_models_that_call_backward_themselves_are_refused() -> None:
    model = Body(own_backward)
    optimizer = torch.optim.SGD(model.parameters())
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    before = portrait(model, optimizer)
    with pytest.raises(sg.CaptureError) as caught:
        step(rows(0, 3, 4))
    assert_says(caught.value, module="inner", marker="own_backward")
    assert_same(before, portrait(model, optimizer))


def loss_branches(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return loss if loss < 10 else loss * 0  # loss_branches


def loss_detached(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).detach().square().mean()  # loss_detached


def loss_without_grad(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).sum()  # loss_without_grad


def loss_in_numbers(model: nn.Module, x: Tensor) -> float:
    return len(model(x))  # loss_in_numbers


def loss_of_many(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square()  # loss_of_many


def loss_of_integers(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) > 0).sum()  # loss_of_integers


def loss_of_nothing(model: nn.Module, x: Tensor) -> None:
    model(x)


def loss_triple(model: nn.Module, x: Tensor) -> Any:
    out = model(x)
    return out.sum(), out, out


LOSSES: list[tuple[Callable[[nn.Module, Tensor], Any], str]] = [
    (loss_branches, "value of a tensor"),
    (loss_detached, "does not require grad"),
    (loss_without_grad, "does not require grad"),
    (loss_in_numbers, "is a int"),
    (loss_of_many, r"shape \[3, 1\]"),
    (loss_of_integers, "does not require grad"),
    (loss_of_nothing, "NoneType"),
    (loss_triple, "tuple of 3"),
]


@pytest.mark.parametrize(("loss_fn", "says"), LOSSES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.case("B54")
def test_losses_that_are_none(loss_fn: Callable[[nn.Module, Tensor], Any], says: str) -> None:
    model = Body(lambda m, x: x)
    optimizer = torch.optim.AdamW(model.parameters())
    step = sg.compile_train_step(model, optimizer, loss_fn=loss_fn)
    before = portrait(model, optimizer)
    with pytest.raises(sg.CaptureError, match=says) as caught:
        step(rows(0, 3, 4))
    has_line = loss_fn not in (loss_in_numbers, loss_of_nothing, loss_triple)
    assert_says(caught.value, module="", marker=loss_fn.__name__ if has_line else None)
    assert_same(before, portrait(model, optimizer))


class MatrixOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()  # matrix_output


def test_output_that_is_no_loss() -> None:
    model = MatrixOutput()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(sg.CaptureError, match=r"shape \[3, 4\]") as caught:
        step(rows(0, 3, 4))
    assert_says(caught.value, module="", marker="matrix_output")
    assert "loss_fn" in caught.value.remedy


def test_output_without_a_loss() -> None:
    fixture = fixtures.gpt()
    step = sg.compile_train_step(fixture.model, torch.optim.SGD(fixture.model.parameters()))
    with pytest.raises(sg.CaptureError, match="carries no loss") as caught:
        step({"input_ids": fixture.batch["input_ids"]})
    assert "labels" in caught.value.remedy


@pytest.mark.parametrize(
    "batch",
    [
        lambda x: {"x": x, "z": x},
        lambda x: {"y": x},
        lambda x: (x, x),
        lambda x: (),
        lambda x: {"x": "text"},
        lambda x: {"x": None},
        lambda x: {"x": x[:, :2]},
    ],
)
@pytest.mark.case("B50", "B54")
def test_batch_of_another_structure(batch: Callable[[Tensor], Any]) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).mean()

    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sg.compile_train_step(model, optimizer)
    x = rows(0, 3, 4)
    step({"x": x})
    before = portrait(model, optimizer)
    with pytest.raises(sg.CaptureError) as caught:
        step(batch(x))
    assert caught.value.remedy
    assert "eager" in caught.value.remedy or "loss_fn" in caught.value.remedy
    assert_same(before, portrait(model, optimizer))
    assert step({"x": x}).applied


@pytest.mark.parametrize("batch", [{"x": object}, [set()], bytearray(b"x"), {"x": numpy.zeros(3)}], ids=repr)
def test_batch_with_what_cannot_be_compared(batch: Any) -> None:
    model = nn.Linear(4, 1)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=lambda m, b: m(b).sum())
    with pytest.raises(sg.StepGraphError):
        step(batch)


@pytest.mark.parametrize("batch", [torch.ones(3), {"a": torch.ones(3)}, (torch.ones(3),), [torch.ones(3)] * 3])
def test_criterion_wants_pairs(batch: Any) -> None:
    model = nn.Linear(4, 1)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), criterion=nn.MSELoss())
    with pytest.raises(sg.CaptureError, match="inputs, targets") as caught:
        step(batch)
    assert "loss_fn" in caught.value.remedy


# Models and optimizers that are refused before anything is traced


@pytest.fixture
def model() -> nn.Module:
    return fixtures.mlp().model


def test_optimizer_with_a_foreign_parameter(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(3, 2))]}], lr=0.1)
    with pytest.raises(sg.ConfigError, match=r"group 1 \(shape \[3, 2\]\) does not belong") as caught:
        sg.compile_train_step(model, optimizer)
    assert "model.parameters()" in str(caught.value)


def test_optimizer_with_none_of_the_model_s_parameters(model: nn.Module) -> None:
    other = fixtures.mlp().model
    with pytest.raises(sg.ConfigError, match="does not belong"):
        sg.compile_train_step(model, torch.optim.SGD(other.parameters()))
    optimizer = torch.optim.SGD(other.parameters())
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(sg.ConfigError, match="none of the model's parameters"):
        sg.compile_train_step(model, optimizer)


def test_optimizer_whose_parameters_all_are_frozen(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    model.requires_grad_(False)
    with pytest.raises(sg.StepGraphError, match="require grad"):
        sg.compile_train_step(model, optimizer, loss_fn=fixtures.squared_error)(fixtures.mlp().batch)


def test_optimizer_of_parameters_that_the_loss_does_not_use(model: nn.Module) -> None:
    both = nn.ModuleList([model, nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(both[1].parameters())
    step = sg.compile_train_step(both, optimizer, loss_fn=lambda m, b: fixtures.squared_error(m[0], b))
    with pytest.raises(sg.CaptureError, match="depends on none of the parameters") as caught:
        step(fixtures.mlp().batch)
    assert "optimizer" in caught.value.remedy


def test_post_accumulate_hook(model: nn.Module) -> None:
    model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(sg.CaptureError, match=r"'2\.weight' has a post-accumulate-grad hook") as caught:
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    assert_says(caught.value, module="2", marker=None)
    assert "register_hook" in caught.value.remedy


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"body": nn.ModuleDict({"table": kind(5, 4, sparse=True)})})
    with pytest.raises(sg.CaptureError, match="sparse gradients") as caught:
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    assert_says(caught.value, module="body.table", marker=None)
    assert "sparse=False" in caught.value.remedy


class FunctionalSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterDict({"weight": nn.Parameter(torch.randn(5, 4))})

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table["weight"], sparse=True).square().mean()


def test_sparse_gradient_of_a_function() -> None:
    model = FunctionalSparse()
    optimizer = torch.optim.SGD(model.parameters())
    step = sg.compile_train_step(model, optimizer)
    before = portrait(model, optimizer)
    with pytest.raises(sg.CaptureError, match="sparse") as caught:
        step(torch.tensor([1, 2]))
    assert "table.weight" in str(caught.value)
    assert "sparse=False" in caught.value.remedy
    assert_same(before, portrait(model, optimizer))


def test_parameters_on_two_devices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, device="meta")))
    with pytest.raises(sg.CaptureError, match="2 devices") as caught:
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    assert_says(caught.value, module="1.0", marker=None)
    for part in ("0.weight", "1.0.weight", "cpu", "meta", "model.to(device)"):
        assert part in str(caught.value)


def test_model_on_an_unknown_device() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(sg.ConfigError, match="meta"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()))


class MyTensor(torch.Tensor):
    """A tensor subclass."""


def test_tensor_subclass_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.randn(16, 8).as_subclass(MyTensor))
    assert isinstance(model[0].weight, MyTensor)
    with pytest.raises(sg.CaptureError, match=r"'0\.weight' is a MyTensor") as caught:
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    assert_says(caught.value, module="0", marker=None)


def test_lazy_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(sg.CaptureError, match=r"'1\.weight' is lazy") as caught:
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    assert_says(caught.value, module="1", marker=None)


def test_lbfgs(model: nn.Module) -> None:
    with pytest.raises(sg.ConfigError, match="LBFGS"):
        sg.compile_train_step(model, torch.optim.LBFGS(model.parameters()))


WRAPPERS = ["DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule", "DeepSpeedEngine"]


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_model(model: nn.Module, name: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    Wrapper.__name__ = name
    with pytest.raises(sg.ConfigError, match=f"{name}.*pass the module itself"):
        sg.compile_train_step(Wrapper(model), torch.optim.SGD(model.parameters()))


def test_wrapper_of_torch_itself(model: nn.Module) -> None:
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        with pytest.raises(sg.ConfigError, match="pass the module itself"):
            sg.compile_train_step(wrapped, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_optimizer_step_hooks(model: nn.Module, kind: str) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *a: None)
    with pytest.raises(sg.ConfigError, match="step hooks"):
        sg.compile_train_step(model, optimizer)


def test_optimizer_whose_step_was_replaced(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda closure=None: None
    with pytest.raises(sg.ConfigError, match="replaced"):
        sg.compile_train_step(model, optimizer)


class Branching(torch.optim.Optimizer):
    """Looks at the gradient's value."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.abs().max() > 1e-3:  # branching_step
                    p.add_(p.grad, alpha=-group["lr"])


class Counting(torch.optim.SGD):
    """Keeps a Python number in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.add_(p.grad, alpha=-0.1 / self.state[p]["step"])


class Remembering(torch.optim.SGD):
    """Keeps a number on itself."""

    def step(self, closure: Any = None) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        super().step()


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Branching, "value of a tensor"), (Counting, "state"), (Remembering, "steps")],
    ids=lambda v: getattr(v, "__name__", ""),
)
@pytest.mark.case("B54")
def test_optimizers_that_cannot_be_traced(model: nn.Module, kind: Any, says: str) -> None:
    optimizer = kind(model.parameters())
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.squared_error)
    before = portrait(model, optimizer)
    with pytest.raises(sg.StepGraphError, match=says) as caught:
        step(fixtures.mlp().batch)
    assert kind.__name__ in str(caught.value) or says == "steps"
    if kind is Branching:
        assert caught.value.source_line.endswith(f":{line_of('branching_step')}")
        assert "model" not in str(caught.value).splitlines()[0]
    assert_same(before, portrait(model, optimizer))


def test_loss_fn_and_criterion(model: nn.Module) -> None:
    with pytest.raises(sg.ConfigError, match="loss_fn and criterion"):
        sg.compile_train_step(
            model, torch.optim.SGD(model.parameters()), loss_fn=fixtures.squared_error, criterion=nn.MSELoss()
        )


@pytest.mark.parametrize("name", ["loss_fn", "criterion"])
def test_loss_that_cannot_be_called(model: nn.Module, name: str) -> None:
    with pytest.raises(sg.ConfigError, match=f"{name} must be callable"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), **{name: 3})


def test_things_that_are_no_model_or_optimizer(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(sg.ConfigError, match="nn.Module"):
        sg.compile_train_step(model.forward, optimizer)
    with pytest.raises(sg.ConfigError, match="torch.optim.Optimizer"):
        sg.compile_train_step(model, "adam")
    with pytest.raises(sg.ConfigError, match="no parameters"):
        sg.compile_train_step(nn.Tanh(), optimizer)


NOT_YET: list[tuple[str, Any]] = [
    ("plan", "ddp"),
    ("plan", "zero1"),
    ("plan", "zero2"),
    ("plan", "zero3"),
    ("plan", "sqrt"),
    ("plan", Path("plan.json")),
    ("precision", "bf16"),
    ("precision", "fp16"),
    ("master_weights", False),
    ("loss_scale", 1024.0),
    ("norm_type", 1.0),
    ("norm_type", float("inf")),
    ("error_if_nonfinite", True),
    ("clip_value", 1.0),
    ("accumulate", 4),
    ("memory_budget", "8GiB"),
    ("memory_budget", 1 << 30),
    ("mesh", "a mesh"),
    ("reduce_dtype", torch.bfloat16),
    ("numerics", "fast"),
    ("lowering", "inductor"),
    ("log", "steps.csv"),
]


@pytest.mark.parametrize(("name", "value"), NOT_YET, ids=str)
def test_what_this_version_does_not_do_is_said(model: nn.Module, name: str, value: Any) -> None:
    with pytest.raises(sg.NotYetError, match=f"{name}=.*not implemented yet"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), **{name: value})


def test_weight_is_said_not_to_be_there(model: nn.Module) -> None:
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=fixtures.squared_error)
    with pytest.raises(sg.NotYetError, match="weight"):
        step(fixtures.mlp().batch, weight=2.0)


BAD: list[tuple[str, Any]] = [
    ("precision", "fp64"),
    ("precision", None),
    ("nonfinite", "stop"),
    ("numerics", "loose"),
    ("lowering", "triton"),
    ("verify", "always"),
    ("verify", True),
    ("max_norm", -1.0),
    ("max_norm", float("nan")),
    ("max_norm", float("inf")),
    ("max_norm", "1.0"),
    ("max_norm", True),
    ("accumulate", 0),
    ("accumulate", -2),
    ("accumulate", 1.5),
    ("norm_type", -1.0),
    ("norm_type", "two"),
    ("clip_value", -1.0),
    ("plan", "zero4"),
    ("memory_budget", -5),
    ("memory_budget", "lots"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_choices(model: nn.Module, name: str, value: Any) -> None:
    with pytest.raises(sg.ConfigError, match=name):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), **{name: value})


def test_defaults_may_be_spelled_out(model: nn.Module) -> None:
    fixture = fixtures.mlp()
    result = sg.compile_train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        "none",
        loss_fn=fixture.loss_fn,
        precision="fp32",
        master_weights=True,
        loss_scale=None,
        max_norm=0,
        norm_type=2,
        error_if_nonfinite=False,
        clip_value=0,
        nonfinite="skip",
        accumulate=1,
        memory_budget=None,
        mesh=None,
        reduce_dtype=None,
        numerics="exact",
        lowering="eager",
        verify="off",
        log=None,
    )(fixture.batch)
    assert result.applied


# Python state


class Remembers(nn.Module):
    """Stores a tensor, or a number, in Python."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layer = nn.Linear(4, 1)
        self.last: Any = None
        self.history: list[Any] = []
        self.nested: dict[str, list[Any]] = {"outputs": []}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.what == "attribute":
            self.last = out.detach()
        elif self.what == "list":
            self.history.append(out.detach())
        elif self.what == "nested":
            self.nested["outputs"].append(out.detach())
        elif self.what == "number":
            self.calls += 1
        return out.square().mean()


@pytest.mark.parametrize("what", ["attribute", "list", "nested"])
@pytest.mark.case("B54", "B49")
def test_tensors_left_in_python_are_refused(what: str) -> None:
    model = Remembers(what)
    optimizer = torch.optim.SGD(model.parameters())
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer)
    with pytest.raises(
        sg.CaptureError, match={"attribute": "last", "list": "history", "nested": "nested"}[what]
    ) as caught:
        step(rows(0, 3, 4))
    assert "aux" in caught.value.remedy
    assert_same(before, portrait(model, optimizer))


@pytest.mark.case("B54")
def test_numbers_left_in_python_warn_and_stay() -> None:
    model = Remembers("number")
    optimizer = torch.optim.SGD(model.parameters())
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer)
    with pytest.warns(sg.StepGraphWarning, match="calls"):
        step.prepare(rows(0, 3, 4))
    assert_same(before, portrait(model, optimizer))
    assert "calls" in step.report()


@pytest.mark.parametrize("name", ["flush", "plan", "find_nonfinite", "full_params", "state_dict", "save", "load"])
def test_methods_that_are_not_there_yet_say_so(name: str) -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=fixture.loss_fn)
    assert not hasattr(step, name)
    with pytest.raises(sg.NotYetError, match=f"TrainStep.{name} .*not implemented yet"):
        getattr(step, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = step.nonsense
