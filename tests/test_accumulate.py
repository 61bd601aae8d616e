"""``accumulate``, ``weight`` and ``flush``: windows of micro-batches are those of a loop by hand."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, zoo
from .amp_loop import INF, pair, poisoned, same_update


def windows(batches: list[Any], size: int) -> list[list[Any]]:
    return [batches[i : i + size] for i in range(0, len(batches), size)]


# Every pair of values of these appears in some row: 3 precisions, 4 optimizers, windows of 3 and 4, 5 ways to clip.
PAIRWISE = [
    ("fp32", "sgd_momentum", 4, {}),
    ("fp32", "adamw_forloop", 3, {"max_norm": 0.05}),
    ("fp32", "adamw_foreach", 4, {"max_norm": 0.05, "norm_type": INF}),
    ("fp32", "adamw_fused", 3, {"max_norm": 0.5, "norm_type": 1.0}),
    ("fp32", "sgd_momentum", 3, {"clip_value": 0.01}),
    ("bf16", "adamw_fused", 4, {}),
    ("bf16", "sgd_momentum", 4, {"max_norm": 0.05}),
    ("bf16", "adamw_forloop", 3, {"max_norm": 0.05, "norm_type": INF}),
    ("bf16", "adamw_foreach", 4, {"max_norm": 0.5, "norm_type": 1.0}),
    ("bf16", "adamw_fused", 3, {"clip_value": 0.01}),
    ("fp16", "adamw_foreach", 3, {}),
    ("fp16", "adamw_fused", 4, {"max_norm": 0.05}),
    ("fp16", "sgd_momentum", 3, {"max_norm": 0.05, "norm_type": INF}),
    ("fp16", "adamw_forloop", 4, {"max_norm": 0.5, "norm_type": 1.0}),
    ("fp16", "adamw_foreach", 4, {"clip_value": 0.01}),
    ("fp16", "adamw_forloop", 3, {"clip_value": 0.01}),
    ("fp32", "adamw_foreach", 3, {"max_norm": 0.05}),
    ("bf16", "adamw_foreach", 3, {"max_norm": 0.05}),
]


@pytest.mark.parametrize(("precision", "optimizer", "size", "clip"), PAIRWISE, ids=str)
@pytest.mark.parametrize("name", ["MLP", "TIED", "DROP", "BN"])
@pytest.mark.feature("MB-2", "CLIP-19", "AMP-4")
def test_windows_are_those_of_the_loop_by_hand(
    name: str, precision: str, optimizer: str, size: int, clip: dict[str, float]
) -> None:
    make = fixtures.FIXTURES[name]
    loop, step = pair(lambda: make().model, make().loss_fn, optimizer, precision, accumulate=size, **clip)
    batches = fixtures.batches(make, 6 * size)
    batches[2 * size + 1] = poisoned(batches[2 * size + 1], INF)
    for number, window in enumerate(windows(batches, size), start=1):
        same_update(loop, step, number, window)
    assert step.verify(make().batch).equal


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [2, 4])
def test_windows_of_a_power_of_two_equal_a_loss_divided_early(size: int, precision: str) -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(
        lambda: make().model,
        make().loss_fn,
        "adamw_fused",
        precision,
        accumulate=size,
        divide_early=True,
        init_scale=2.0**8,  # far from where the larger of the two sums overflows
        max_norm=0.05,
    )
    for number, window in enumerate(windows(fixtures.batches(make, 5 * size), size), start=1):
        same_update(loop, step, number, window)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_zoo_windows_are_those_of_the_loop_by_hand(name: str, precision: str) -> None:
    entry = zoo.ZOO[name]
    loop, step = pair(
        entry.build, lambda m, batch: m(**batch).loss, "adamw_fused", precision, accumulate=2, max_norm=1.0
    )
    for number, window in enumerate(windows([entry.batch(seed) for seed in range(6)], 2), start=1):
        same_update(loop, step, number, window)


@pytest.mark.case("B25")
def test_a_last_short_window_is_divided_by_what_it_holds() -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=4, max_norm=0.05)
    batches = fixtures.batches(make, 10)
    for number, window in enumerate(windows(batches, 4)[:2], start=1):
        same_update(loop, step, number, window)
    loop.update(batches[8:])
    losses = [step(batch).loss for batch in batches[8:]]
    result = step.flush()
    assert result is not None
    assert (result.applied, result.step) == (True, 3)
    assert result.loss.item() == pytest.approx(sum(loss.item() for loss in losses) / 2)
    assert result.aux is None
    assert step.flush() is None
    for mine, theirs in zip(step.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.case("B26")
def test_a_schedule_counts_updates() -> None:
    make = fixtures.FIXTURES["MLP"]
    _, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=4)
    lr = step.optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda t: 1 - t / 3)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in fixtures.batches(make, 12):
            result = step(batch)
            seen.append(result.step)
            if result.applied:
                scheduler.step()
    assert seen == [1] * 4 + [2] * 4 + [3] * 4
    assert lr > 0
    assert step.optimizer.param_groups[0]["lr"] == 0


class Classifier(nn.Module):
    """One linear layer over 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), y)


@pytest.mark.case("B23")
def test_weights_make_a_mean_over_tokens_of_means() -> None:
    torch.manual_seed(1)
    model, whole = Classifier(), Classifier()
    whole.load_state_dict(model.state_dict())
    x, y = fixtures.rows(1, 5, 3), torch.tensor([0, 1, 2, 3, 4])
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=2)
    step((x[:4], y[:4]), weight=4)
    assert step((x[4:], y[4:]), weight=1).applied
    whole(x, y).backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - theirs.grad, rtol=1e-5, atol=1e-6)


@given(st.lists(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
@settings(deadline=None, max_examples=40)
def test_any_windows_and_weights_are_those_of_the_loop(all_weights: list[list[float]], weighted: bool) -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=4, max_norm=0.05)
    batches = iter(fixtures.batches(make, 16))
    for weights in all_weights:
        window = [next(batches) for _ in weights]
        loop.update(window, weights if weighted else None)
        for batch, weight in zip(window, weights, strict=True):
            result = step(batch, weight) if weighted else step(batch)
        if len(weights) < 4:
            result = step.flush()
        assert result is not None
        assert result.applied
        assert torch.equal(result.grad_norm, loop.outcomes[-1].snapshot.grad_norm)
        for mine, theirs in zip(step.model.parameters(), loop.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weighted_windows_are_those_of_the_loop(precision: str) -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "adamw_fused", precision, accumulate=3, max_norm=0.05)
    for number, window in enumerate(windows(fixtures.batches(make, 15), 3), start=1):
        same_update(loop, step, number, window, [3.0, 0.7, 11.0])


class Scalars(nn.Module):
    """Parameters without dimensions, in single and double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.f32 = nn.Parameter(torch.tensor(0.3))
        self.f64 = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.row = nn.Parameter(torch.tensor([0.1, 0.2], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.f32 * x).double() * self.f64).square().mean() + self.row.square().sum()


def test_weights_and_sums_keep_the_dtype_of_each_gradient() -> None:
    loop, step = pair(Scalars, lambda m, x: m(x), "sgd_momentum", accumulate=3, max_norm=0.05)
    for number, window in enumerate(windows(fixtures.inputs(4, steps=9), 3), start=1):
        same_update(loop, step, number, window, [0.1, 0.7, 3.3])


def test_batches_of_other_shapes_share_a_window() -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "adamw_fused", accumulate=3)
    batches = [
        (x[:rows], y[:rows])
        for (x, y), rows in zip(fixtures.batches(make, 9), (4, 2, 3, 2, 4, 1, 3, 3, 2), strict=True)
    ]
    for number, window in enumerate(windows(batches, 3), start=1):
        same_update(loop, step, number, window)


class Routes(nn.Module):
    """Uses one of two layers, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(x).square().mean()


@pytest.mark.parametrize("routes", ["lr", "rl", "ll", "lrl", "rrl"])
def test_parameters_that_take_part_in_some_micro_batches_only(routes: str) -> None:
    loop, step = pair(Routes, lambda m, batch: m(*batch), "sgd_momentum", accumulate=len(routes), max_norm=0.1)
    batches = fixtures.inputs(3, 4, steps=3 * len(routes))
    for number, window in enumerate(windows(batches, len(routes)), start=1):
        same_update(loop, step, number, [(x, r == "l") for x, r in zip(window, routes, strict=True)])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_one_bad_micro_batch_skips_and_clears_its_window(where: str, position: int, precision: str) -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", precision, accumulate=3)
    batches = fixtures.batches(make, 9)
    x, y = batches[3 + position]
    batches[3 + position] = (x, y * INF) if where == "loss" else poisoned((x, y), INF)
    outcomes = [same_update(loop, step, n, window) for n, window in enumerate(windows(batches, 3), start=1)]
    assert not outcomes[1].applied
    assert outcomes[-1].applied


def test_weight_0_leaves_a_batch_out() -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=3)
    a, b, c = fixtures.batches(make, 3)
    nothing = (c[0], c[1] * float("nan"))
    for window in ([a, nothing, b], [nothing, a, b], [a, b, nothing], [a, nothing, nothing]):
        weights = [0.0 if batch is nothing else 2.0 for batch in window]
        kept = [batch for batch in window if batch is not nothing]
        loop.update(kept, [2.0] * len(kept))
        results = [step(batch, weight) for batch, weight in zip(window, weights, strict=True)]
        assert [r.applied for r in results] == [False, False, True]
        for mine, theirs in zip(step.model.parameters(), loop.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    before = [p.clone() for p in step.model.parameters()]
    results = [step(nothing, 0) for _ in range(3)]
    assert results[-1].skipped
    assert "sum to 0" in results[-1].skip_reason
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


def test_one_batch_is_an_update_whatever_its_weight() -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=1)
    (a, b) = fixtures.batches(make, 2)
    loop.update([a])
    assert step(a, weight=17.0).applied
    assert step(b, weight=0).skipped
    assert step.flush() is None
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), loop.model.parameters(), strict=True))


@pytest.mark.parametrize("weight", [-1, float("nan"), INF, True, "2", torch.tensor(2.0)], ids=repr)
def test_what_is_no_weight_is_refused(weight: Any) -> None:
    make = fixtures.FIXTURES["MLP"]
    _, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=2)
    with pytest.raises(sg.ConfigError, match="weight must be"):
        step(make().batch, weight)


def test_weights_go_to_all_of_a_window_or_to_none() -> None:
    make = fixtures.FIXTURES["MLP"]
    _, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=3)
    step(make().batch)
    with pytest.raises(sg.ConfigError, match="with a weight, unlike"):
        step(make().batch, 2.0)
    step.flush()
    step(make().batch, 2.0)
    with pytest.raises(sg.ConfigError, match="without a weight, unlike"):
        step(make().batch)


@pytest.mark.feature("MB-4")
def test_batch_norm_is_said_not_to_be_the_large_batch() -> None:
    model = fixtures.FIXTURES["BN"]().model
    with pytest.warns(sg.StepGraphWarning, match="normalises each micro-batch"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)


@pytest.mark.parametrize("halves", [torch.bfloat16, torch.float16])
def test_sums_in_16_bit_are_refused_without_masters(halves: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(halves)
    with pytest.raises(sg.ConfigError, match=r"weight, bias.*master_weights=True"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), accumulate=2, master_weights=False)


def test_masters_sum_in_float32() -> None:
    with fixtures.seeded(0):
        eager = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    graph = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    graph.load_state_dict(eager.state_dict())

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    masters = [nn.Parameter(p.detach().float()) for p in eager.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    step = sg.compile_train_step(graph, torch.optim.SGD(graph.parameters(), lr=0.1), loss_fn=loss_fn, accumulate=3)
    for window in windows([x.bfloat16() for x in fixtures.inputs(4, 8, steps=9)], 3):
        for x in window:
            loss_fn(eager, x).backward()
            for master, param in zip(masters, eager.parameters(), strict=True):
                master.grad = param.grad.float() if master.grad is None else master.grad + param.grad.float()
                param.grad = None
            step(x)
        for master in masters:
            master.grad /= 3
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, param in zip(masters, eager.parameters(), strict=True):
                param.copy_(master)
        assert all(torch.equal(p, q) for p, q in zip(eager.parameters(), graph.parameters(), strict=True))
    assert step.verify(fixtures.rows(1, 4, 8).bfloat16()).equal


def test_the_first_window_makes_the_state_and_verify_leaves_a_window_alone() -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "adamw_fused", accumulate=3)
    a, b, c = fixtures.batches(make, 3)
    step(a)
    step(b)
    assert step.verify(a).equal
    assert step.find_nonfinite(a).is_finite
    assert not step.optimizer.state
    loop.update([a, b, c])
    assert step(c).applied
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), loop.model.parameters(), strict=True))


def test_an_error_in_a_micro_batch_ends_its_window() -> None:
    make = fixtures.FIXTURES["TIED"]
    loop, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=2)
    batch = make().batch
    ids, targets = batch
    step(batch)
    step(batch)
    loop.update([batch, batch])
    step(batch)
    with pytest.raises(Exception, match="index"):
        step((ids + 10_000, targets))
    loop.update([batch, batch])
    step(batch)
    step(batch)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), loop.model.parameters(), strict=True))


def test_the_fast_tier_accumulates_too() -> None:
    make = fixtures.FIXTURES["MLP"]
    fixture = make()
    step = sg.compile_train_step(
        fixture.model,
        torch.optim.AdamW(fixture.model.parameters()),
        loss_fn=fixture.loss_fn,
        numerics="fast",
        accumulate=2,
        max_norm=0.05,
    )
    for batch in fixtures.batches(make, 4):
        step(batch)
    report = step.verify(fixture.batch)
    assert report.ok, str(report)


@pytest.mark.case("B13")
@pytest.mark.feature("CLIP-17")
def test_gradients_are_unscaled_once_a_window() -> None:
    make = fixtures.FIXTURES["MLP"]
    data = fixtures.batches(make, 8)
    norms = []
    for scale in (1.0, 1024.0):
        fixture = make()
        step = sg.compile_train_step(
            fixture.model,
            torch.optim.SGD(fixture.model.parameters(), lr=0.1),
            loss_fn=fixture.loss_fn,
            precision="fp16",
            loss_scale=scale,
            accumulate=4,
            max_norm=1.0,
        )
        norms.append([r.grad_norm.item() for r in map(step, data) if r.applied])
        kernel = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
        assert sum(n.target is kernel for n in step.graph.calls) == 1
    assert len(norms[0]) == 2
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.case("B21")
@pytest.mark.parametrize("size", [1, 2])
def test_a_nan_is_counted_and_poisons_nothing(size: int) -> None:
    make = fixtures.FIXTURES["MLP"]
    fixture = make()
    step = sg.compile_train_step(
        fixture.model,
        torch.optim.AdamW(fixture.model.parameters()),
        loss_fn=lambda m, b: fixture.loss_fn(m, b[:2]) + b[2],
        accumulate=size,
    )
    results = []
    for number, (x, y) in enumerate(fixtures.batches(make, 5 * size)):
        results.append(step((x, y, torch.tensor(float("nan") if number == 2 * size else 0.0))))
    ended = results[size - 1 :: size]
    assert [r.skipped for r in ended] == [False, False, True, False, False]
    assert ended[2].skip_reason == "the loss is not finite"
    assert "1 skipped" in step.report()
    assert all(bool(p.isfinite().all()) for p in fixture.model.parameters())
    assert next(iter(step.optimizer.state.values()))["step"].item() == 4


class Aliased(nn.Module):
    """Two parameters that get one gradient, one that is used through an expanded view, one under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4) * 2)
        self.wide = nn.Parameter(torch.ones(1, 4))
        self.body = fixtures.Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + (self.a + self.b) * self.wide.expand(x.shape)).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_aliased_gradients_and_checkpoints_in_a_window(precision: str) -> None:
    loop, step = pair(Aliased, lambda m, x: m(x), "adamw_foreach", precision, accumulate=3)
    for number, window in enumerate(windows(fixtures.inputs(3, 4, steps=12), 3), start=1):
        same_update(loop, step, number, window)


def test_a_parameter_that_is_frozen_within_a_window_keeps_what_it_has() -> None:
    loop, step = pair(Routes, lambda m, batch: m(*batch), "sgd_momentum", accumulate=3, max_norm=0.1)
    data = fixtures.inputs(3, 4, steps=9)
    for start in (0, 3, 6):
        for model in (loop.model, step.model):
            model.right.requires_grad_(True)
        for position, x in enumerate(data[start : start + 3]):
            if position == 2:
                for model in (loop.model, step.model):
                    model.right.requires_grad_(False)
            loop.loss_fn(loop.model, (x, position != 1)).backward()
            result = step((x, position != 1))
        params = [p for p in loop.model.parameters() if p.grad is not None]
        for param in params:
            param.grad.div_(3)
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        assert result.applied
        assert all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), step.model.parameters(), strict=True))


def test_hyperparameters_are_read_when_the_window_ends() -> None:
    make = fixtures.FIXTURES["MLP"]
    loop, step = pair(lambda: make().model, make().loss_fn, "adamw_fused", accumulate=2)
    data = fixtures.batches(make, 6)
    for number, window in enumerate(windows(data, 2), start=1):
        for position, batch in enumerate(window):
            for optimizer in (loop.optimizer, step.optimizer):
                optimizer.param_groups[0]["lr"] = 0.01 * number + 0.001 * position
            step(batch)
        loop.update(window)
        assert all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), step.model.parameters(), strict=True))
    assert step.captures == 1


@pytest.mark.feature("MB-1", "MB-5")
def test_a_window_holds_gradients_and_no_more_activations_than_one_micro_batch() -> None:
    make = fixtures.FIXTURES["MLP"]
    _, step = pair(lambda: make().model, make().loss_fn, "sgd_momentum", accumulate=4)
    data = fixtures.batches(make, 4)
    for batch in data[:3]:
        step(batch)
    window = step._state.window
    sizes = {name: p.numel() * p.element_size() for name, p in step.model.named_parameters()}
    assert {name: g.untyped_storage().nbytes() for name, g in window.gradients.items()} == sizes
    step(data[3])
    assert not window.gradients
