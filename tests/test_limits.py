"""What code may do around and inside a step beyond computing: followed, or refused with an address. Never silently dropped."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle

X = torch.linspace(-1, 1, 12).reshape(3, 4)
KEPT: list[Any] = []


class Forward(nn.Module):
    """A linear layer whose forward runs ``extra(self, hidden)``."""

    def __init__(self, extra: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("memory", torch.zeros(3, 4))
        self.factor = 2.0
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        out = self.extra(self, hidden)
        return hidden if out is None else out


def compiled(model: nn.Module, **options: Any) -> sg.TrainStep:
    """A step with the mean square of the output as loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square, **options)


def seeds(module: Forward, hidden: Tensor) -> Tensor:
    torch.manual_seed(0)
    return hidden + torch.randn_like(hidden)


def forks(module: Forward, hidden: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return hidden + torch.randn_like(hidden)


def keeps_in_a_list(module: Forward, hidden: Tensor) -> None:
    KEPT.append(hidden.detach())


def assigns_data(module: Forward, hidden: Tensor) -> None:
    module.layer.bias.data = module.layer.bias.data * 0.5


def registers_a_hook(module: Forward, hidden: Tensor) -> None:
    module.layer.weight.register_hook(lambda grad: grad * 2)


def uses_a_generator(module: Forward, hidden: Tensor) -> Tensor:
    return hidden + torch.rand(3, 4, generator=torch.Generator().manual_seed(0))


CLOSED_OVER = torch.zeros(3, 4)


def writes_what_it_closes_over(module: Forward, hidden: Tensor) -> Tensor:
    return hidden + CLOSED_OVER.add_(1.0)


def calls_a_data_dependent_operator(module: Forward, hidden: Tensor) -> Tensor:
    return hidden[torch.unique(hidden.detach().round().long()) * 0]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (seeds, r"manual_seed\(\) is called inside the step"),
        (forks, r"set_rng_state\(\) is called inside the step"),
        (keeps_in_a_list, "is kept outside of the model"),
        (assigns_data, "forward assigns layer.bias.data"),
        (registers_a_hook, "forward registers a hook"),
        (uses_a_generator, "uses a Generator"),
        (writes_what_it_closes_over, "neither to the model nor to the batch is written in place"),
    ],
)
def test_what_a_graph_cannot_follow_is_refused(extra: Callable[[Any, Tensor], Any], says: str) -> None:
    KEPT.clear()
    model = Forward(extra)
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    step = compiled(model)
    with pytest.raises(sg.CaptureError, match=says) as caught:
        step(X)
    KEPT.clear()
    assert caught.value.remedy
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.extra = lambda module, hidden: None
    assert step.verify(X).equal, "after a refusal the step works as soon as the cause is gone"


def draws_from_python(module: Forward, hidden: Tensor) -> Tensor:
    return hidden * random.random()


def draws_from_numpy(module: Forward, hidden: Tensor) -> Tensor:
    return hidden * float(np.random.rand())


@pytest.mark.parametrize("extra", [draws_from_python, draws_from_numpy])
def test_draws_from_other_streams_are_reported(extra: Callable[[Any, Tensor], Any]) -> None:
    step = compiled(Forward(extra))
    with pytest.warns(sg.StepGraphWarning, match="what it drew at capture is a constant"):
        step.prepare(X)


def test_scripted_modules_are_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(sg.CaptureError, match="ScriptModule"):
        compiled(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@dataclass
class Outputs:
    """An object that holds a tensor and is no pytree."""

    value: Tensor


def test_aux_that_hides_tensors_is_refused() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(m: nn.Module, x: Tensor) -> tuple[Tensor, Outputs]:
        out = m(x)
        return out.square().mean(), Outputs(out)

    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=loss_fn)
    with pytest.raises(sg.CaptureError, match="aux holds a Outputs"):
        step(X)


def test_results_are_detached() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(m: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return m(x).square().mean(), {"weight": m.weight}  # type: ignore[dict-item]

    result = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=loss_fn)(X)
    assert type(result.aux["weight"]) is Tensor
    assert not result.aux["weight"].requires_grad


class Opaque:
    """A batch whose contents cannot be seen."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_opaque_batches_are_refused() -> None:
    with pytest.raises(sg.ConfigError, match="holds a Opaque, whose contents"):
        compiled(nn.Linear(4, 4))(Opaque(X))


def test_batches_that_hold_the_model_s_tensors_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(sg.ConfigError, match="parameter or buffer of the model itself"):
        compiled(model)(model.weight)


def test_tensors_of_a_batch_that_share_memory() -> None:
    """Captured apart and called with one tensor twice: the write to the first is seen through the second."""

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = batch
        before = second.sin()
        first.mul_(2)
        return (m(before) + m(second.sin())).square().mean()

    def batches() -> list[tuple[Tensor, Tensor]]:
        shared, whole = X.clone(), torch.cat([X, X])
        return [(X.clone(), X.clone()), (shared, shared), (whole[:3], whole[1:4]), (X.clone(), X.clone())]

    eager_model, graph_model = oracle.twin(lambda: nn.Linear(4, 4))
    every = range(1, 5)
    eager = oracle.eager_steps(
        eager_model, torch.optim.SGD(eager_model.parameters(), lr=0.1), loss_fn, batches(), checkpoints=every
    )
    optimizer = torch.optim.SGD(graph_model.parameters(), lr=0.1)
    step = sg.compile_train_step(graph_model, optimizer, loss_fn=loss_fn)
    oracle.assert_bitwise(eager, oracle.graph_steps(step, graph_model, optimizer, batches(), checkpoints=every))
    assert all(step.verify(batch).equal for batch in batches())


def test_old_spectral_norm_binds_an_alias_of_its_parameter() -> None:
    eager_model, graph_model = oracle.twin(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh()))
    eager = oracle.eager_steps(
        eager_model, torch.optim.SGD(eager_model.parameters(), lr=0.1), fixtures.mean_square, [X] * 5
    )
    optimizer = torch.optim.SGD(graph_model.parameters(), lr=0.1)
    step = sg.compile_train_step(graph_model, optimizer, loss_fn=fixtures.mean_square)
    oracle.assert_bitwise(eager, oracle.graph_steps(step, graph_model, optimizer, [X] * 5))
    assert torch.equal(graph_model[0].weight, eager_model[0].weight)  # type: ignore[arg-type]


def scales(module: Forward, hidden: Tensor) -> Tensor:
    return hidden * module.factor


def test_numbers_on_modules_are_followed() -> None:
    model = nn.Sequential(Forward(scales), nn.Dropout(0.5))
    step = compiled(model)
    step(X)
    model[0].factor = 3.0  # type: ignore[assignment]
    assert step.verify(X).equal
    model[1].p = 0.1  # type: ignore[assignment]
    assert step.verify(X).equal
    model[0].factor, model[1].p = 2.0, 0.5  # type: ignore[assignment]
    step(X)
    assert step.captures == 3, "going back costs nothing"


def uses_a_mask(module: Forward, hidden: Tensor) -> Tensor:
    return hidden if module.mask is None else hidden * module.mask  # type: ignore[operator]


def test_a_tensor_that_appears_later_is_followed() -> None:
    model = Forward(uses_a_mask)
    model.mask = None  # type: ignore[assignment]
    step = compiled(model)
    step(X)
    model.mask = torch.tensor([1.0, 0.0, 1.0, 0.0])  # type: ignore[assignment]
    assert step.verify(X).equal
    step(X)
    model.mask = torch.tensor([0.0, 1.0, 0.0, 1.0])  # type: ignore[assignment]
    assert step.verify(X).equal
    step(X)
    assert step.captures == 2, "another tensor of the same kind is an input"


def counts(module: Forward, hidden: Tensor) -> None:
    module.count = getattr(module, "count", 0) + 1  # type: ignore[assignment]


def test_counters_do_not_cause_captures() -> None:
    model = Forward(counts)
    model.count = 0  # type: ignore[assignment]
    step = compiled(model)
    with pytest.warns(sg.StepGraphWarning, match="changes Python state"):
        step(X)
    for _ in range(3):
        model(X)
        step(X)
    assert step.captures == 1


def test_a_hook_in_the_place_of_another_is_noticed() -> None:
    model = nn.Linear(4, 4)
    step = compiled(model)
    for factor in (0.5, 0.25, 0.125):
        handles = [
            model.weight.register_hook(lambda grad, factor=factor: grad * factor),
            model.register_forward_hook(lambda module, inputs, out, factor=factor: out * factor),
        ]
        assert step.verify(X).equal
        step(X)
        for handle in handles:
            handle.remove()
    assert step.verify(X).equal


def test_verify_undoes_models_with_expanded_buffers() -> None:
    model = Forward(lambda module, hidden: hidden * module.expanded)
    model.register_buffer("expanded", torch.ones(1, 4).expand(3, 4))
    step = compiled(model)
    step(X)
    before = oracle.snapshot(model, step.optimizer, 1, torch.zeros(()), torch.zeros(()))
    assert step.verify(X).equal
    oracle.assert_bitwise(before, oracle.snapshot(model, step.optimizer, 1, torch.zeros(()), torch.zeros(())))


def test_a_step_is_not_copied() -> None:
    step = compiled(nn.Linear(4, 4))
    step(X)
    for action in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="bound to live tensors"):
            action(step)


def test_grad_mode_around_the_call_does_not_matter() -> None:
    eager_model, graph_model = oracle.twin(lambda: nn.Linear(4, 4))
    step = compiled(graph_model)
    with torch.no_grad():
        step(X)
    step(X)
    optimizer = torch.optim.AdamW(eager_model.parameters(), lr=0.01)
    oracle.eager_steps(eager_model, optimizer, fixtures.mean_square, [X] * 5, checkpoints=(5,))
    for _ in range(3):
        step(X)
    assert all(torch.equal(a, b) for a, b in zip(eager_model.parameters(), graph_model.parameters(), strict=True))


def test_captures_in_two_threads() -> None:
    """A capture replaces functions of torch for its time; other threads go on with the originals, or wait."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            for _ in range(4):
                work()
        except BaseException as error:
            errors.append(error)

    def plain() -> None:
        model = fixtures.drop().model
        fixtures.mean_square(model, fixtures.drop().batch).backward()

    def compiles() -> None:
        fixture = fixtures.drop()
        assert compiled(fixture.model).verify(fixture.batch).compared["parameters"] == 4

    threads = [threading.Thread(target=run, args=(work,)) for work in (compiles, plain, compiles)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []


def test_wrong_arguments_are_told_apart_from_those_to_come() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(sg.ConfigError, match="did you mean loss_fn=") as caught:
        sg.compile_train_step(model, optimizer, fixtures.mean_square)  # type: ignore[arg-type]
    assert not isinstance(caught.value, sg.NotYetError)
    with pytest.raises(sg.ConfigError, match=r"criterion is the class MSELoss; pass an instance, MSELoss\(\)"):
        sg.compile_train_step(model, optimizer, criterion=nn.MSELoss)
    for wrong in ({"accumulate": 0}, {"accumulate": 1.5}, {"norm_type": "2"}, {"norm_type": 0.0}):
        with pytest.raises(sg.ConfigError, match=f"{next(iter(wrong))} must be") as caught:
            sg.compile_train_step(model, optimizer, **wrong)  # type: ignore[arg-type]
        assert not isinstance(caught.value, sg.NotYetError)
    step = sg.compile_train_step(model, optimizer, criterion=nn.MSELoss())
    with pytest.raises(sg.ConfigError, match=r"as one: step\(\(x, y\)\)"):
        step(X, X)  # type: ignore[arg-type]
    assert repr(step).startswith("TrainStep(Linear, SGD")
    assert sg.__version__


def test_errors_of_a_running_step_name_the_node() -> None:
    model = nn.Embedding(4, 4)
    step = compiled(model)
    step(torch.tensor([0, 1]))
    with pytest.raises(IndexError) as caught:
        step(torch.tensor([0, 9]))
    if sys.version_info >= (3, 11):  # earlier errors take no notes
        assert any("(root)/embedding#0@forward" in note for note in caught.value.__notes__)


def test_a_counter_that_forward_does_not_read_is_ignored() -> None:
    model = Forward(lambda module, hidden: None)
    step = compiled(model)
    for i in range(12):
        model.global_step = i  # type: ignore[assignment]
        step(X)
    assert step.captures <= 3


def binds_the_first(module: Forward, hidden: Tensor) -> Tensor:
    module.memory = hidden.detach()
    return hidden + module.other  # type: ignore[operator]


def binds_both_to_one(module: Forward, hidden: Tensor) -> Tensor:
    out = hidden + module.memory + module.other  # type: ignore[operator]
    module.memory = module.other = hidden.detach()
    return out


@pytest.mark.parametrize("extra", [binds_the_first, binds_both_to_one])
@pytest.mark.parametrize("tied", [False, True])
def test_buffers_that_are_one_tensor_and_part(extra: Callable[[Any, Tensor], Any], tied: bool) -> None:
    def build() -> nn.Module:
        model = Forward(extra)
        model.register_buffer("other", model.memory if tied else torch.ones(3, 4))
        return model

    eager_model, graph_model = oracle.twin(build)
    eager = oracle.eager_steps(
        eager_model, torch.optim.SGD(eager_model.parameters(), lr=0.1), fixtures.mean_square, [X] * 5
    )
    optimizer = torch.optim.SGD(graph_model.parameters(), lr=0.1)
    step = sg.compile_train_step(graph_model, optimizer, loss_fn=fixtures.mean_square)
    oracle.assert_bitwise(eager, oracle.graph_steps(step, graph_model, optimizer, [X] * 5))
    assert (graph_model.memory is graph_model.other) is (eager_model.memory is eager_model.other)


def test_buffers_tied_between_steps() -> None:
    model = Forward(lambda module, hidden: hidden + module.memory.add_(1.0) * module.other)
    model.register_buffer("other", torch.ones(3, 4))
    step = compiled(model)
    step(X)
    model.memory = model.other
    assert step.verify(X).equal
    step(X)


def uses_a_list(module: Forward, hidden: Tensor) -> Tensor:
    for tensor in module.tensors:  # type: ignore[union-attr]
        hidden = hidden * tensor
    return hidden


def test_a_list_of_tensors_that_grows_and_shrinks() -> None:
    model = Forward(uses_a_list)
    model.tensors = [torch.full((4,), 2.0)]  # type: ignore[assignment]
    step = compiled(model)
    step(X)
    model.tensors.append(torch.full((4,), 3.0))  # type: ignore[union-attr, operator]
    assert step.verify(X).equal
    step(X)
    del model.tensors[:]  # type: ignore[arg-type]
    assert step.verify(X).equal


class Tagged(Tensor):
    """A subclass of tensors."""


def test_batches_of_tensor_subclasses_are_refused() -> None:
    with pytest.raises(sg.ConfigError, match="holds a Tagged; pass plain tensors"):
        compiled(nn.Linear(4, 4))(X.as_subclass(Tagged))


def test_gradients_that_share_memory_are_clipped_once() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.stack([self.a, self.b]).sum(0)

    model = Stacked()
    step = compiled(model, max_norm=0.1)
    report = step.verify(X)
    assert report.equal
    assert "share memory" in str(report)
    assert "a, b share memory" in step.report()


def test_a_process_group_of_several_ranks_is_refused_rather_than_ignored() -> None:
    """A rank of a group that nobody has joined yet: world size 2, no communication."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        with pytest.raises(sg.NotYetError, match="process group of 2 ranks"):
            compiled(nn.Linear(4, 4))
    finally:
        torch.distributed.destroy_process_group()
    assert compiled(nn.Linear(4, 4))(X).applied


def test_a_forward_that_is_patched_later_is_followed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    step = compiled(model)
    step(X)
    original = model[1].forward
    model[1].forward = lambda x: original(x) * 2  # type: ignore[method-assign]
    assert step.verify(X).equal
    del model[1].forward
    assert step.verify(X).equal
    assert step.captures == 2
