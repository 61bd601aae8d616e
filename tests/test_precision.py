"""``precision="bf16"``: the numbers of a loop by hand under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle, zoo
from .portrait import assert_same, portrait

FAST_ZOO = ["gpt2", "llama", "bert", "resnet"]


def under_autocast(loss_fn: fixtures.LossFn) -> fixtures.LossFn:
    """The loss as a loop by hand computes it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    return loss


def compare(
    build: Callable[[], nn.Module], loss_fn: fixtures.LossFn, batches: list[Any], optimizer: str, **clip: Any
) -> sg.TrainStep:
    eager, graph = oracle.twin(build)
    make = oracle.OPTIMIZERS[optimizer]
    eager_optimizer, graph_optimizer = make(eager.parameters()), make(graph.parameters())
    want = oracle.eager_steps(eager, eager_optimizer, under_autocast(loss_fn), batches, **clip)
    step = sg.compile_train_step(graph, graph_optimizer, loss_fn=loss_fn, precision="bf16", **clip)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph, graph_optimizer, batches))
    return step


@pytest.mark.parametrize(
    "clip", [{}, {"max_norm": 0.05}, {"clip_value": 0.01}, {"max_norm": 0.05, "norm_type": 1.0}], ids=str
)
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw_forloop", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("name", ["MLP", "TIED", "DROP", "BN"])
@pytest.mark.feature("AMP-1", "AMP-10", "AMP-11", "AMP-13")
def test_fixtures_are_bitwise(name: str, optimizer: str, clip: dict[str, float]) -> None:
    make = fixtures.FIXTURES[name]
    step = compare(lambda: make().model, make().loss_fn, fixtures.batches(make, 5), optimizer, **clip)
    assert any(n.meta["val"].dtype is torch.bfloat16 for n in step.graph.calls if isinstance(n.meta["val"], Tensor))
    assert step.verify(make().batch).equal


@pytest.mark.parametrize(
    "name",
    [name if name in FAST_ZOO else pytest.param(name, marks=pytest.mark.slow) for name in zoo.ZOO if name != "mixtral"],
)
def test_zoo_is_bitwise(name: str) -> None:
    entry = zoo.ZOO[name]
    batches = [entry.batch(seed) for seed in range(5)]
    compare(entry.build, lambda m, batch: m(**batch).loss, batches, "adamw_fused", max_norm=1.0)


class Twice(nn.Module):
    """One layer used twice: with one cast for both, its gradients are summed in 16 bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw_fused"])
def test_a_shared_layer_is_cast_once(optimizer: str) -> None:
    step = compare(Twice, lambda m, x: m(x).float().square().mean(), fixtures.inputs(4, 8), optimizer)
    casts = [n for n in step.captured_graph.calls if "_to_copy" in str(n.target) and n.args[0].op == "placeholder"]
    of_parameters = [n for n in casts if str(n.args[0].meta["val"].shape) in ("torch.Size([8, 8])", "torch.Size([8])")]
    assert len(of_parameters) == 2, "weight and bias, once each"


@pytest.mark.case("B09")
def test_both_norms_are_reported_and_the_update_is_clipped() -> None:
    fixture = fixtures.mlp()
    x, y = fixture.batch
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=1.0, momentum=0.9)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, precision="bf16", max_norm=1.0)
    result = step((x, y * 100))
    assert result.grad_norm.item() > 1.0
    assert result.grad_norm.dtype is torch.float32
    assert 0.0 < result.clip_factor.item() < 1.0
    seen = torch.cat([entries["momentum_buffer"].flatten() for entries in optimizer.state.values()])
    assert seen.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_a_loss_in_16_bit_stays_one_and_a_criterion_gives_fp32() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 4)
    plain = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).mean(), precision="bf16")
    assert plain(x).loss.dtype is torch.bfloat16
    step = sg.compile_train_step(model, optimizer, criterion=nn.CrossEntropyLoss(), precision="bf16")
    assert step((x, torch.tensor([0, 1, 2, 0, 1]))).loss.dtype is torch.float32
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.feature("AMP-9")
def test_autocast_around_the_call_is_overridden() -> None:
    make = fixtures.FIXTURES["MLP"]
    eager, graph = make(), make()
    optimizers = [torch.optim.SGD(f.model.parameters(), lr=0.1) for f in (eager, graph)]
    step = sg.compile_train_step(graph.model, optimizers[1], loss_fn=graph.loss_fn, precision="bf16")
    with torch.autocast("cpu", torch.float16):
        loss = under_autocast(eager.loss_fn)(eager.model, eager.batch)
        got = step(graph.batch).loss
    loss.backward()
    optimizers[0].step()
    assert torch.equal(loss.detach(), got)
    assert all(torch.equal(a, b) for a, b in zip(eager.model.parameters(), graph.model.parameters(), strict=True))


def test_in_the_fast_tier() -> None:
    fixture = fixtures.FIXTURES["GPT"]()
    optimizer = torch.optim.AdamW(fixture.model.parameters(), fused=True)
    step = sg.compile_train_step(
        fixture.model, optimizer, loss_fn=fixture.loss_fn, precision="bf16", numerics="fast", max_norm=1.0
    )
    for number in range(3):
        torch.manual_seed(number)
        report = step.verify(fixture.batch)
        assert report.ok, str(report)
        assert report.tolerance >= 0.15
        assert step(fixture.batch).applied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_without_masters_are_updated_as_they_are(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(
        model, optimizer, loss_fn=lambda m, x: m(x).float().square().mean(), precision="bf16", master_weights=False
    )
    assert step(torch.randn(3, 4)).applied
    assert model.weight.dtype is dtype
    assert all(entries["momentum_buffer"].dtype is dtype for entries in optimizer.state.values())


@pytest.mark.case("B17")
def test_fp16_parameters_under_a_loss_scale_need_masters() -> None:
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = portrait(model, optimizer)
    with pytest.raises(sg.ConfigError, match=r"weight, bias.*master_weights=True"):
        sg.compile_train_step(model, optimizer, precision="fp16", master_weights=False)
    assert_same(before, portrait(model, optimizer))


@pytest.mark.feature("AMP-8")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_scale_without_fp16_is_an_error(precision: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(sg.ConfigError, match=r'loss_scale=1024.* belongs to precision="fp16"'):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), precision=precision, loss_scale=1024.0)


class Pair(nn.Module):
    """Returns a dict of tensors, one of them in 16 bit under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        return {"hidden": hidden, "count": torch.tensor(3)}


@pytest.mark.feature("AMP-20")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_outputs_in_float32_on_request(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    scale = {"loss_scale": 1024} if precision == "fp16" else {}
    x = fixtures.rows(1, 3, 4)

    def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        output = model(batch)
        return output["hidden"].mean(), output["hidden"]

    for wide in (False, True):
        eager, graph = oracle.twin(Pair)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, graph)]
        step = sg.compile_train_step(
            graph, optimizers[1], loss_fn=loss_fn, precision=precision, fp32_outputs=wide, **scale
        )
        result = step(x)
        with torch.autocast("cpu", dtype, enabled=precision != "fp32"):
            hidden = eager(x)["hidden"]
            loss = (hidden.float() if wide else hidden).mean()
        assert result.aux.dtype is (torch.float32 if wide else dtype)
        assert torch.equal(result.loss, loss.detach())
        (loss * scale.get("loss_scale", 1)).backward()
        for param in eager.parameters():
            param.grad /= scale.get("loss_scale", 1)
        optimizers[0].step()
        assert all(torch.equal(p, q) for p, q in zip(eager.parameters(), graph.parameters(), strict=True))
        assert step.verify(x).equal
        assert not graph._forward_hooks


def test_outputs_in_float32_is_yes_or_no() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(sg.ConfigError, match="fp32_outputs"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), fp32_outputs=torch.float32)


class Scales(nn.Module):
    """Takes a tensor, whole numbers and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, rows: Tensor, *, scale: Tensor) -> Tensor:
        assert not rows.is_floating_point()
        return (self.layer(x)[rows] * scale).float().square().mean()


@pytest.mark.feature("AMP-20")
@pytest.mark.parametrize("master_weights", [True, False])
def test_inputs_are_cast_on_request(master_weights: bool) -> None:
    eager, graph = (m.bfloat16() for m in oracle.twin(Scales))
    batch = {"x": fixtures.rows(1, 3, 4), "rows": torch.tensor([0, 2]), "scale": torch.rand(4)}
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.1)
    with pytest.raises(sg.CaptureError):
        sg.compile_train_step(graph, optimizer)(batch)
    step = sg.compile_train_step(graph, optimizer, input_dtype=torch.bfloat16, master_weights=master_weights)
    result = step(batch)
    loss = eager(batch["x"].bfloat16(), batch["rows"], scale=batch["scale"].bfloat16())
    loss.backward()
    assert torch.equal(result.loss, loss.detach())
    for mine, theirs in zip(graph.parameters(), eager.parameters(), strict=True):
        gradient = theirs.grad.float() if master_weights else theirs.grad
        expected = (theirs.detach().float() if master_weights else theirs.detach()).sub(gradient, alpha=0.1)
        assert torch.equal(mine, expected.bfloat16())
    assert step.verify(batch).equal
    assert step(batch).applied
    assert step.captures == 1
    assert not graph._forward_pre_hooks


@pytest.mark.parametrize("wrong", [torch.int64, "bf16", True])
def test_inputs_are_cast_to_floating_dtypes_only(wrong: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(sg.ConfigError, match="input_dtype must be a floating dtype"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), input_dtype=wrong)
