"""Models, optimizers and options that are refused before a step is traced, or while the optimizer is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.device import require_supported

from . import fixtures
from .portrait import assert_same, portrait
from .refusals import assert_says


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
    with pytest.raises(sg.StepGraphError, match="requires grad"):
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
    with pytest.raises(sg.ConfigError, match="'xla:1'. stepgraph runs on cpu and cuda"):
        require_supported(torch.device("xla:1"), "parameter 'weight'")
    model = nn.Linear(2, 2, device="meta")
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=lambda m, x: m(x).sum())
    with pytest.raises(sg.ConfigError, match="meta device"):
        step(torch.ones(1, 2))


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


def test_optimizer_whose_step_was_replaced(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda closure=None: None
    with pytest.raises(sg.ConfigError, match="replaced"):
        sg.compile_train_step(model, optimizer)


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
    ("mesh", "a mesh"),
    ("reduce_dtype", torch.bfloat16),
]


@pytest.mark.parametrize(("name", "value"), NOT_YET, ids=str)
def test_what_this_version_does_not_do_is_said(model: nn.Module, name: str, value: Any) -> None:
    with pytest.raises(sg.NotYetError, match=f"{name}=.*not implemented yet"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), **{name: value})


BAD: list[tuple[str, Any]] = [
    ("precision", "fp64"),
    ("precision", None),
    ("loss_scale", 1024.0),
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
    ("norm_type", 0.5),
    ("norm_type", True),
    ("norm_type", float("nan")),
    ("clip_value", -1.0),
    ("clip_value", float("inf")),
    ("clip_value", "0.1"),
    ("plan", "zero4"),
    ("plan", Path("plan.json")),
    ("memory_budget", -5),
    ("memory_budget", 0),
    ("memory_budget", True),
    ("memory_budget", 1.5),
    ("memory_budget", "8 parsecs"),
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


@pytest.mark.parametrize("name", ["full_params"])
def test_methods_that_are_not_there_yet_say_so(name: str) -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=fixture.loss_fn)
    assert not hasattr(step, name)
    with pytest.raises(sg.NotYetError, match=f"TrainStep.{name} .*not implemented yet"):
        getattr(step, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = step.nonsense
