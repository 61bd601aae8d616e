"""Code, losses, outputs and batches that cannot be captured are refused by name, place and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .fixtures import rows
from .portrait import assert_same, portrait
from .refusals import assert_says


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
    assert_says(caught.value, module="inner", marker=function.__name__, file=__file__)
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
    batches = fixtures.inputs(3, 4)
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
    assert_says(caught.value, module="inner", marker="own_backward", file=__file__)
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
    assert_says(caught.value, module="", marker=loss_fn.__name__ if has_line else None, file=__file__)
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
    assert_says(caught.value, module="", marker="matrix_output", file=__file__)
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


def conditional(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: h * 3, (x,))  # conditional


def test_higher_order_operators_are_refused_by_name() -> None:
    model = Body(conditional)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=fixtures.mean_square)
    with pytest.raises(sg.CaptureError, match="higher-order operator cond") as caught:
        step(rows(0, 3, 4))
    assert_says(caught.value, module="inner", marker="conditional", file=__file__)


def compiled_function(module: nn.Module, x: Tensor) -> Tensor:
    return torch.compile(torch.nn.functional.gelu, backend="eager")(x)


def compiled_submodule() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize("build", [compiled_submodule, lambda: Body(compiled_function)], ids=["submodule", "function"])
def test_code_under_torch_compile_is_captured_as_if_it_were_not(build: Callable[[], nn.Module]) -> None:
    eager, graph = oracle.twin(build)
    batches = fixtures.inputs(3, 4)
    eager_optimizer, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, graph))
    step = sg.compile_train_step(graph, optimizer, loss_fn=fixtures.mean_square)
    with torch.compiler.set_stance("force_eager"):
        want = oracle.eager_steps(eager, eager_optimizer, fixtures.mean_square, batches)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph, optimizer, batches))
