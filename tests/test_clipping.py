"""The norm of all gradients, clipping by it, and what happens where it is not finite: bit for bit what eager does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import stepgraph as sg

from . import fixtures, oracle

UPDATES = ["sgd", "sgd_nesterov", "adam", "adam_foreach", "adamw_forloop", "adamw_foreach", "adamw_fused"]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def compare(
    make: Callable[..., fixtures.Fixture],
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    max_norm: float | None,
    *,
    batches: list[Any] | None = None,
    **options: Any,
) -> tuple[dict[int, oracle.Snapshot], sg.TrainStep]:
    """Five steps of eager and of the graph, equal in every bit; returns eager's snapshots and the step."""
    build = oracle.OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    eager, graph = make(**options), make(**options)
    batches = batches or fixtures.batches(make, 5, **options)
    eager_optimizer, graph_optimizer = build(trained(eager.model)), build(trained(graph.model))
    want = oracle.eager_steps(eager.model, eager_optimizer, eager.loss_fn, batches, max_norm=max_norm)
    step = sg.compile_train_step(
        graph.model, graph_optimizer, loss_fn=graph.loss_fn, max_norm=max_norm, master_weights=False
    )
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph.model, graph_optimizer, batches))
    return want, step


def gradients(fixture: fixtures.Fixture) -> dict[str, Tensor]:
    """What eager's backward gives; the model is left without gradients."""
    torch.manual_seed(0)
    fixture.loss_fn(fixture.model, fixture.batch).backward()
    found = {name: p.grad for name, p in fixture.model.named_parameters() if p.grad is not None}
    fixture.model.zero_grad(set_to_none=True)
    return found


def seen_by_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of SGD's first step with momentum, which keeps them as they were handed over."""
    return [entries["momentum_buffer"] for entries in optimizer.state.values()]


@pytest.mark.case("B01")
@pytest.mark.feature("CLIP-1", "CLIP-7", "CLIP-13")
def test_norm_is_one_plain_number_and_the_oracle_s() -> None:
    _, step = compare(fixtures.mlp, lambda p: torch.optim.SGD(p, lr=0.1), 0.5)
    fixture = fixtures.mlp(seed=9)
    norm = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn, max_norm=0.5
    )(fixture.batch).grad_norm
    assert type(norm) is Tensor
    assert norm.shape == ()
    assert not norm.requires_grad
    flat = torch.cat([g.flatten().double() for g in gradients(fixtures.mlp(seed=9)).values()])
    assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-6), "of the concatenation, not one per parameter"
    assert step.captures == 1


@pytest.mark.parametrize("name", fixtures.FIXTURES)
@pytest.mark.parametrize("max_norm", [None, 0.01, 1.0, 1e6])
@pytest.mark.case("B01")
@pytest.mark.feature("CLIP-1", "CLIP-3")
def test_every_fixture_at_every_threshold(name: str, max_norm: float | None) -> None:
    compare(fixtures.FIXTURES[name], "sgd_momentum", max_norm)


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("name", ["MLP", "TIED", "ODD"])
@pytest.mark.feature("CLIP-3")
def test_every_update_sees_the_clipped_gradients(name: str, optimizer: str) -> None:
    compare(fixtures.FIXTURES[name], optimizer, 0.05)


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 0.999, 1.0, 1.5, 1e9])
@pytest.mark.feature("CLIP-1", "CLIP-3", "CLIP-20")
def test_factor_is_max_norm_over_norm_and_at_most_one(max_norm: float) -> None:
    eager, fixture = fixtures.mlp(), fixtures.mlp()
    plain = gradients(eager)
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=max_norm)
    result = step(fixture.batch)
    norm = get_total_norm(list(plain.values()))
    assert torch.equal(result.grad_norm, norm)
    assert torch.equal(result.clip_factor, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    assert (result.clip_factor == 1.0) == (max_norm >= norm + 1e-6)
    for seen, grad in zip(seen_by_optimizer(optimizer), plain.values(), strict=True):
        assert torch.equal(seen, grad * result.clip_factor), "uniformly scaled: the direction stays"


@pytest.mark.feature("CLIP-16", "CLIP-20")
def test_pre_and_post_clip_norms_are_reported() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=0.25)
    assert step.grad_norm() is None
    result = step(fixture.batch)
    post_clip = get_total_norm(seen_by_optimizer(optimizer)).item()
    assert (result.grad_norm * result.clip_factor).item() == pytest.approx(post_clip, rel=1e-6)
    assert step.grad_norm() is result.grad_norm
    for batch in fixtures.batches(fixtures.mlp, 3):
        assert step(batch).grad_norm is step.grad_norm()


@pytest.mark.parametrize("off", [None, 0, 0.0])
@pytest.mark.feature("CLIP-20", "CLIP-16")
def test_without_clipping_the_norm_is_still_reported(off: float | None) -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=off)
    result = step(fixture.batch)
    assert result.clip_factor is None
    assert torch.equal(result.grad_norm, get_total_norm(seen_by_optimizer(optimizer)))


@pytest.mark.feature("CLIP-1")
def test_threshold_may_be_any_real_number() -> None:
    for max_norm in (1, 2.5, torch.tensor(0.5).item()):
        compare(fixtures.mlp, "sgd", max_norm)


# B03: a tied weight is one parameter with one gradient


class ThriceTied(nn.Module):
    """One weight under four names: embedding, head, and a module that is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.again = self.mix
        self.heads = nn.ModuleList([nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)])
        for head in self.heads:
            head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.again(self.mix(self.embedding(ids)).tanh())
        return self.heads[0](hidden) + 0.5 * self.heads[1](hidden)


def thrice_tied(seed: int = 0) -> fixtures.Fixture:
    plain = fixtures.tied(seed)
    with fixtures.seeded(seed):
        return fixtures.Fixture(ThriceTied(), plain.batch, fixtures.next_token_error)


@pytest.mark.parametrize("make", [fixtures.tied, thrice_tied])
@pytest.mark.case("B03")
@pytest.mark.feature("CLIP-7")
def test_tied_weight_counts_once(make: Callable[..., fixtures.Fixture]) -> None:
    plain = gradients(make())
    fixture = make()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=1.0)
    result = step(fixture.batch)
    norm = get_total_norm(list(plain.values()))
    assert torch.equal(result.grad_norm, norm)
    if make is fixtures.tied:
        (grad,) = plain.values()
        assert result.grad_norm.item() == pytest.approx(grad.double().norm().item(), rel=1e-6)
        assert result.grad_norm.item() != pytest.approx(math.sqrt(2) * grad.norm().item(), rel=0.1)
    assert len(optimizer.state) == len(plain), "one state entry for each logical parameter"
    compare(make, "adamw_foreach", 1.0)
    compare(make, "sgd", 1.0)


# B07: a norm that is not finite


class Roots(nn.Module):
    """Gradients [1, inf, 0] for `a` and [1, 2] for `b`, with a finite loss, unless the batch moves `a` off zero."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.a = nn.Parameter(torch.tensor([1.0, 0.0, 3.0]))

    def forward(self, offset: Tensor) -> Tensor:
        a = self.a + offset
        return a[0] + a[1].sqrt() + 0 * a[2] + (self.b * torch.tensor([1.0, 2.0])).sum()


AT_ROOT = torch.zeros(3)
OFF_ROOT = torch.tensor([0.0, 4.0, 0.0])


def roots(optimizer: str, **options: Any) -> tuple[Roots, torch.optim.Optimizer, sg.TrainStep]:
    model = Roots()
    built = oracle.OPTIMIZERS[optimizer](model.parameters())
    return model, built, sg.compile_train_step(model, built, **options)


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.case("B07")
def test_skip_leaves_every_bit_and_names_the_parameter(optimizer: str, max_norm: float | None) -> None:
    model, built, step = roots(optimizer, max_norm=max_norm)
    before = oracle.snapshot(model, built, 0, torch.zeros(()), torch.zeros(()))
    for _ in range(2):
        result = step(AT_ROOT)
        assert result.skipped
        assert not result.applied
        assert "a is not finite" in result.skip_reason
        assert torch.isfinite(result.loss)
        assert result.grad_norm.isinf()
        oracle.assert_bitwise(before, oracle.snapshot(model, built, 0, torch.zeros(()), torch.zeros(())))
    assert not built.state, "a skipped first step creates no state"
    step(OFF_ROOT)
    fresh_model, fresh, fresh_step = roots(optimizer, max_norm=max_norm)
    fresh_step(OFF_ROOT)
    oracle.assert_bitwise(
        oracle.snapshot(fresh_model, fresh, 1, torch.zeros(()), torch.zeros(())),
        oracle.snapshot(model, built, 1, torch.zeros(()), torch.zeros(())),
    )


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.case("B07")
def test_a_skip_in_the_middle_is_as_if_it_had_not_been(optimizer: str) -> None:
    runs = []
    for batches in ([OFF_ROOT, AT_ROOT, OFF_ROOT], [OFF_ROOT, OFF_ROOT]):
        model, built, step = roots(optimizer, max_norm=1.0)
        with torch.no_grad():
            model.a[1] = 0
        for batch in batches:
            if batch is AT_ROOT:
                # exactly at the root again, whatever the steps so far did to the parameter
                assert step(-model.a.detach() * torch.tensor([0.0, 1.0, 0.0])).skipped
            else:
                assert step(batch).applied
        runs.append(oracle.snapshot(model, built, 0, torch.zeros(()), torch.zeros(())))
    oracle.assert_bitwise(*runs)


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.case("B07")
def test_raise_names_the_parameter_and_leaves_every_bit(optimizer: str) -> None:
    model, built, step = roots(optimizer, max_norm=1.0, nonfinite="raise")
    before = oracle.snapshot(model, built, 0, torch.zeros(()), torch.zeros(()))
    with pytest.raises(sg.NonFiniteError, match="a is not finite") as caught:
        step(AT_ROOT)
    assert caught.value.parameter == "a"
    oracle.assert_bitwise(before, oracle.snapshot(model, built, 0, torch.zeros(()), torch.zeros(())))
    assert step(OFF_ROOT).applied


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.case("B07")
def test_ignore_does_what_eager_does(optimizer: str, max_norm: float | None) -> None:
    eager = Roots()
    eager_optimizer = oracle.OPTIMIZERS[optimizer](eager.parameters())
    want = oracle.eager_steps(
        eager, eager_optimizer, fixtures.own_output, [AT_ROOT], max_norm=max_norm, checkpoints=(1,)
    )
    model, built, step = roots(optimizer, max_norm=max_norm, nonfinite="ignore")
    oracle.assert_bitwise(want, oracle.graph_steps(step, model, built, [AT_ROOT], checkpoints=(1,)))
    assert not model.a.isfinite().all()
    assert step(AT_ROOT).applied


@pytest.mark.case("B07")
def test_ignore_clips_to_the_gradients_that_eager_makes_of_it() -> None:
    model, built, step = roots("sgd_momentum", max_norm=1.0, nonfinite="ignore")
    assert step(AT_ROOT).clip_factor == 0
    a, b = (built.state[p]["momentum_buffer"] for p in (model.a, model.b))
    assert torch.equal(a.nan_to_num(nan=7.0), torch.tensor([0.0, 7.0, 0.0]))
    assert torch.equal(b, torch.zeros(2))


class Slopes(nn.Module):
    """Parameters whose gradients are the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.a * a).sum() + (self.b * b).sum()


@pytest.mark.case("B07")
def test_norm_that_overflows_is_no_silent_no_op() -> None:
    batch = (torch.full((3,), 1e20), torch.full((2,), 1e20))
    eager = Slopes()
    eager(*batch).backward()
    assert clip_grad_norm_(eager.parameters(), 1.0).isinf()
    assert not any(p.grad.any() for p in eager.parameters()), "eager's step would be a no-op"

    model = Slopes()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), max_norm=1.0)
    result = step(batch)
    assert result.skipped
    assert "norm overflows" in result.skip_reason
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), max_norm=1.0, nonfinite="raise")
    with pytest.raises(sg.NonFiniteError, match="norm overflows"):
        step(batch)
    assert not any(p.any() for p in model.parameters())

    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=1e-20))
    assert step(batch).applied, "without clipping the gradients are finite and used as they are"
    assert torch.allclose(model.a, torch.full((3,), -1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.case("B07")
def test_loss_that_is_not_finite_skips_though_gradients_are(bad: float, max_norm: float | None) -> None:
    model = Slopes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, batch: m(*batch[:2]) + batch[2], max_norm=max_norm)
    a, b = torch.ones(3), torch.ones(2)
    result = step((a, b, torch.tensor(bad)))
    assert result.skipped
    assert "loss" in result.skip_reason
    assert not optimizer.state
    assert step((a, b, torch.tensor(1.0))).applied


@pytest.mark.parametrize(("where", "name"), [(0, "a"), (1, "b")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.case("B07")
def test_the_offending_parameter_is_named(where: int, name: str, bad: float) -> None:
    model = Slopes()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), nonfinite="raise")
    batch = [torch.ones(3), torch.ones(2)]
    batch[where][1] = bad
    with pytest.raises(sg.NonFiniteError) as caught:
        step(tuple(batch))
    assert caught.value.parameter == name


@pytest.mark.case("B07")
def test_buffers_of_a_skipped_step_keep_what_forward_wrote() -> None:
    fixture = fixtures.bn()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn, max_norm=1.0
    )
    bad = fixture.batch.clone()
    bad[0, 0] = float("nan")
    assert step(bad).skipped
    eager = fixtures.bn()
    eager.model(bad)
    for (name, buffer), (_, want) in zip(fixture.model.named_buffers(), eager.model.named_buffers(), strict=True):
        assert torch.equal(oracle.bits(buffer), oracle.bits(want)), name


# B26: a schedule that is gated on `applied`


@pytest.mark.case("B26", "B07")
@pytest.mark.feature("API-7")
def test_schedule_gated_on_applied_counts_updates_only() -> None:
    model = Roots()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: max(0.0, 1 - t / 3))
    step = sg.compile_train_step(model, optimizer, max_norm=1.0)
    applied = 0
    for skip in (False, True, True, False, True, False):
        offset = torch.tensor([0.0, 4.0, 0.0]) if not skip else -model.a.detach() * torch.tensor([0.0, 1.0, 0.0])
        result = step(offset)
        assert result.skipped is skip
        if result.applied:
            applied += 1
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 - applied / 3))
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert step.captures == 1


# B09: the logged norm is above the limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.case("B09")
@pytest.mark.feature("CLIP-3", "CLIP-20")
def test_both_values_are_reported_and_the_optimizer_sees_a_unit_norm(dtype: torch.dtype) -> None:
    fixture = fixtures.mlp(dtype=dtype)
    x, y = fixture.batch
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.01, momentum=0.9)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=1.0)
    result = step((x, y * 100))
    assert result.grad_norm > 1
    assert 0 < result.clip_factor < 1
    slack = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    seen = torch.cat([g.flatten().double() for g in seen_by_optimizer(optimizer)]).norm().item()
    assert seen <= 1 + slack
    assert seen > 0.98
    batches = [(x, y * 100) for x, y in fixtures.batches(fixtures.mlp, 5, dtype=dtype)]
    compare(fixtures.mlp, "sgd_momentum", 1.0, batches=batches, dtype=dtype)


# B38: frozen base, small trainable parts


@pytest.mark.parametrize("optimizer", ["adamw_forloop", "adamw_foreach", "adamw_fused", "sgd"])
@pytest.mark.case("B38")
@pytest.mark.feature("CLIP-26")
def test_lora_clips_by_the_trainable_parts_alone(optimizer: str) -> None:
    want, step = compare(fixtures.lora, optimizer, 0.1)
    base = fixtures.lora().model.base
    for name in ("weight", "bias"):
        assert torch.equal(want[5].params[f"base.{name}"], getattr(base, name))
        assert torch.equal(getattr(step.model.base, name), getattr(base, name))
        assert getattr(step.model.base, name).grad is None
        assert getattr(step.model.base, name) not in step.optimizer.state
    plain = gradients(fixtures.lora())
    assert list(plain) == ["A", "B"]
    assert torch.equal(want[1].grad_norm, get_total_norm(list(plain.values())))


@pytest.mark.case("B38")
@pytest.mark.feature("CLIP-26")
def test_optimizer_that_also_holds_frozen_parameters() -> None:
    def build(_: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(models.pop(0).parameters(), lr=0.01, weight_decay=0.1)

    eager, graph = fixtures.lora(), fixtures.lora()
    models = [eager.model, graph.model]
    batches = fixtures.batches(fixtures.lora, 5)
    eager_optimizer, graph_optimizer = build(None), build(None)
    want = oracle.eager_steps(eager.model, eager_optimizer, eager.loss_fn, batches, max_norm=0.1)
    step = sg.compile_train_step(graph.model, graph_optimizer, loss_fn=graph.loss_fn, max_norm=0.1)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph.model, graph_optimizer, batches))
    assert torch.equal(graph.model.base.weight, fixtures.lora().model.base.weight)


# B42: dtypes that are mixed within one model


class MixedDtypes(nn.Module):
    """The MLP in bf16, with a scale and a shift in fp32 between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16).bfloat16()
        self.scale = nn.Parameter(torch.ones(16))
        self.shift = nn.Parameter(torch.randn(16))
        self.last = nn.Linear(16, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.bfloat16()).float() * self.scale + self.shift
        return self.last(hidden.tanh().bfloat16()).float()


def mixed(seed: int = 0) -> fixtures.Fixture:
    plain = fixtures.mlp(seed)
    with fixtures.seeded(seed):
        return fixtures.Fixture(MixedDtypes(), plain.batch, fixtures.squared_error)


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.case("B42")
@pytest.mark.feature("CLIP-7")
def test_mixed_dtypes(optimizer: str, max_norm: float | None) -> None:
    want, step = compare(mixed, optimizer, max_norm)
    dtypes = {name: p.dtype for name, p in step.model.named_parameters()}
    assert dtypes == {name: p.dtype for name, p in mixed().model.named_parameters()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert want[1].grad_norm.dtype == torch.float32
