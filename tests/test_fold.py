"""The pass ``fold``: the update reads multiples of gradients, none is scaled in memory, and results stay within tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stepgraph as sg
from stepgraph.graph import OutputRole, Phase, StepGraph, effects_of, family_of, gradients_of
from stepgraph.graph.ops import FUSED_KERNELS
from stepgraph.passes import run_passes, training_passes
from stepgraph.runtime import norm_lowering

from . import fixtures, oracle
from .graphs import of_fixture

aten = torch.ops.aten
CLIPS: dict[str, dict[str, Any]] = {
    "l2": {"max_norm": 0.1},
    "l1": {"max_norm": 0.1, "norm_type": 1.0},
    "inf": {"max_norm": 0.01, "norm_type": float("inf")},
    "value": {"clip_value": 0.001},
    "off": {},
}


def folded(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> sg.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    options = {"numerics": "fast", "criterion": nn.MSELoss(), **options}
    return sg.compile_train_step(model, optimizer(model.parameters(), lr=1e-2), **options)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(count)]


def writes_to_gradients(graph: StepGraph) -> list[str]:
    grads = set(gradients_of(graph))
    norm_calls = [n for n in graph.calls if n.meta["phase"] is Phase.NORM and effects_of(n).writes]
    return [n.meta["key"].name for n in norm_calls if not grads.isdisjoint(n.all_input_nodes)]


def has_changed(step: sg.TrainStep) -> bool:
    [line] = [line for line in step.report().splitlines() if line.startswith("  pass fold")]
    return "no change" not in line


def assert_close_to_eager(step: sg.TrainStep, data: list[Any]) -> None:
    for batch in data:
        report = step.verify(batch)
        assert report.ok, str(report)
        assert report.equal or report.tolerance > 0
        assert step(batch).applied


@pytest.mark.feature("CLIP-18")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_folded_steps_are_within_the_tolerance(precision: str, clip: str) -> None:
    step = folded(precision=precision, **CLIPS[clip])
    assert_close_to_eager(step, batches(3))
    assert has_changed(step) == ((precision, clip) != ("fp32", "off"))
    assert not writes_to_gradients(step.graph)


@pytest.mark.parametrize("clip", CLIPS)
def test_folded_windows_give_what_windows_give_by_hand(clip: str) -> None:
    """Three micro-batches with weights, the last flushed, beside the same step without ``fold`` and in the exact tier."""
    results = []
    for numerics in ("fast", "exact"):
        step = folded(numerics=numerics, precision="fp16", accumulate=4, **CLIPS[clip])
        for number, batch in enumerate(batches(7)):
            step(batch, weight=1.0 + number % 3)
        result = step.flush()
        assert result is not None
        assert result.applied
        results.append((step, result))
    (fast, fast_result), (exact, exact_result) = results
    assert has_changed(fast)
    assert not writes_to_gradients(fast.graph)
    torch.testing.assert_close(fast_result.grad_norm, exact_result.grad_norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(fast_result.clipped_norm, exact_result.clipped_norm, rtol=1e-5, atol=0)
    for mine, theirs in zip(fast.model.parameters(), exact.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_gradient_is_read_once_for_the_norm_and_once_for_the_update() -> None:
    graph = of_fixture("MLP").rewritten(max_norm=1.0, scales_loss=True, for_compiler=True, folds=True)
    for grad in gradients_of(graph):
        readers = [(n.meta["phase"], family_of(n.target)) for n in grad.users]
        assert sorted(readers) == [
            (Phase.NORM, "_foreach_norm"),
            (Phase.NORM, "mul"),
            (Phase.NORM, "nonfinite_code"),  # looks at it only where the norm is not finite
        ]


def test_one_multiplication_for_unscale_average_and_clip() -> None:
    graph = of_fixture("MLP").last_of_window(scales_loss=True, for_compiler=True, folds=True)
    grads = gradients_of(graph)
    scalings = [n for grad in grads for n in grad.users if family_of(n.target) in ("mul", "div", "mul_", "div_")]
    assert len(scalings) == len(grads)
    assert len({n.args[1] for n in scalings}) == 1, "one number for all"


@pytest.mark.parametrize("kernel", FUSED_KERNELS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fused_kernels_take_the_factor(kernel: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where the fast tier leaves the update to fused kernels."""
    monkeypatch.setattr("stepgraph.runtime.compiled.compiles_updates", lambda device: False)
    built = {
        "_fused_sgd_": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, fused=True),
        "_fused_adam_": lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.1, fused=True),
        "_fused_adamw_": lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
        "_fused_adagrad_": lambda p, lr: torch.optim.Adagrad(p, lr, fused=True),
    }[kernel]
    options = {"precision": "fp16", "max_norm": 0.1, "lowering": "eager", "accumulate": accumulate}
    step, exact = folded(built, **options), folded(built, **options, numerics="exact")
    for batch in batches(6):
        step(batch)
        exact(batch)
    assert has_changed(step)
    assert not writes_to_gradients(step.graph)
    twins = [family_of(n.target) for n in step.graph.calls if n.meta["phase"] is Phase.UPDATE]
    assert f"{kernel.strip('_')}_scaled_" in twins
    for mine, theirs in zip(step.model.parameters(), exact.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if accumulate == 1:
        assert_close_to_eager(step, batches(2))


@pytest.mark.parametrize("foreach", [False, True])
def test_other_updates_are_left_alone_where_nothing_is_compiled(foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.runtime.compiled.compiles_updates", lambda device: False)
    step = folded(
        lambda p, lr: torch.optim.AdamW(p, lr, foreach=foreach), precision="fp16", max_norm=0.1, lowering="eager"
    )
    assert_close_to_eager(step, batches(2))
    assert not has_changed(step)


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_DISABLE", "fold")
    step = folded(precision="fp16", max_norm=0.1)
    assert_close_to_eager(step, batches(2))
    assert "pass fold" not in step.report()
    assert writes_to_gradients(step.graph)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_skipped_update_changes_no_bit(numerics: str) -> None:
    step = folded(numerics=numerics, precision="fp16", max_norm=0.1)
    inputs, targets = batches(1)[0]
    for _ in range(3):
        step((inputs, targets))
    before = [p.clone() for p in step.model.parameters()]
    states = [{k: v.clone() for k, v in s.items()} for s in step.optimizer.state.values()]
    result = step((inputs * float("inf"), targets))
    assert result.skipped
    assert result.loss_scale == 2.0**15
    assert all(map(torch.equal, before, step.model.parameters()))
    for saved, now in zip(states, step.optimizer.state.values(), strict=True):
        assert all(torch.equal(saved[k], now[k]) for k in saved)


class _LargeReads(TorchDispatchMode):
    """Counts the operators that read a tensor with more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        self.count += any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in leaves)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_check_for_what_is_not_finite_reads_no_tensor_where_there_is_a_norm(precision: str) -> None:
    counts = []
    scale = {"loss_scale": 128.0} if precision == "fp16" else {}  # a dynamic one needs skips
    for nonfinite in ("skip", "ignore"):
        step = folded(numerics="exact", precision=precision, max_norm=0.1, nonfinite=nonfinite, **scale)
        batch = batches(1)[0]
        step(batch)
        step(batch)  # both forms of the update are traced
        with _LargeReads() as reads:
            step(batch)
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0


def test_a_norm_that_overflows_only_before_it_is_unscaled_skips() -> None:
    """With a scale far beyond what float16 has any use for: said in the pass's own words, and never an update by infinity."""
    graph = of_fixture("MLP").rewritten(scales_loss=True, for_compiler=True, folds=True)
    [code] = [n for n in graph.calls if n.target is torch.ops.stepgraph.nonfinite_code.default]
    assert code.args[3] is True
    unfolded = of_fixture("MLP").rewritten(scales_loss=True, for_compiler=True)
    [code] = [n for n in unfolded.calls if n.target is torch.ops.stepgraph.nonfinite_code.default]
    assert code.args[3] is False


def test_half_precision_gradients_and_scalars_keep_their_dtype() -> None:
    class Scalars(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.5))
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.gain).square().mean()

    torch.manual_seed(0)
    model = Scalars()
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), max_norm=0.01, numerics="fast", accumulate=2
    )
    x = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(4):
        step(x)
    assert has_changed(step)
    assert [p.dtype for p in model.parameters()] == [torch.float32, torch.float64, torch.float64]
    torch.manual_seed(0)
    exact_model = Scalars()
    exact = sg.compile_train_step(
        exact_model, torch.optim.SGD(exact_model.parameters(), 0.1, momentum=0.9), max_norm=0.01, accumulate=2
    )
    for _ in range(4):
        exact(x)
    for mine, theirs in zip(model.parameters(), exact_model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_nothing_to_fold_without_a_scale_a_window_or_clipping() -> None:
    subject = of_fixture("MLP")
    graph = subject.graph
    options = {"max_norm": None, "nonfinite": "skip", "update": subject.update.graph, "folds": True}
    record = run_passes(graph, training_passes(**options, for_compiler=True))[-1]
    assert record.name == "fold"
    assert not record.result.changed


def _norm_in_streams() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    graph.output(norm_lowering.add_norm(graph, graph.placeholder("value"), in_streams=True))
    return graph


@pytest.mark.parametrize("shape", [(2**16,), (512, 384), (64, 32, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_in_streams_is_the_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    value = torch.randn(shape, dtype=dtype)
    module = torch.fx.GraphModule(nn.Module(), _norm_in_streams())
    expected = value.double().norm()
    assert abs(module(value).double() - expected) <= expected * torch.finfo(dtype).eps * 32
    assert torch.isinf(module(torch.full(shape, float("inf"), dtype=dtype)))
    assert torch.isnan(module(torch.full(shape, float("nan"), dtype=dtype)))


def test_only_large_values_in_memory_are_read_in_streams() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 8))
    x = torch.randn(4, 256)
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=lambda m, x: m(x).square().mean(), max_norm=1.0
    )
    graph = step.prepare(x)
    inside = frozenset(graph.calls)
    large = {tuple(g.meta["val"].shape) for g in gradients_of(graph) if norm_lowering.is_large_in_memory(g, inside)}
    assert large == {(512, 256)}, "a product of matrices is in memory; the others are small"
    assert large == {
        tuple(g.meta["val"].shape) for g in gradients_of(graph) if norm_lowering.is_large_in_memory(g, frozenset())
    }
    [norms] = [n for n in graph.calls if family_of(n.target) == "_foreach_norm"]
    assert norm_lowering.norm_operands(norms) == list(norms.args[0])
    assert norm_lowering.norm_operands(graph.output_of(OutputRole.NORM)) == [graph.output_of(OutputRole.NORM).args[0]]


def test_norms_of_other_orders_are_left_to_the_compiler() -> None:
    graph = of_fixture("MLP").rewritten(max_norm=1.0)
    [norms] = [n for n in graph.calls if family_of(n.target) == "_foreach_norm"]
    norms.args = (norms.args[0], 1)
    assert norm_lowering.norm_operands(norms) == []
    assert norm_lowering.norm_operands(graph.calls[0]) == []


def test_fixtures_in_half_precision() -> None:
    """Tied weights and dropout, with a scale and clipping; where eager alone overflows, `verify` says so."""
    overflows = False
    for name in ("TIED", "DROP"):
        fixture = fixtures.FIXTURES[name]()
        optimizer = oracle.OPTIMIZERS["adamw_fused"](fixture.model.parameters())
        step = sg.compile_train_step(
            fixture.model, optimizer, loss_fn=fixture.loss_fn, precision="fp16", max_norm=0.1, numerics="fast"
        )
        for seed in range(3):
            torch.manual_seed(seed)
            report = step.verify(fixture.batch)
            assert report.ok, f"{name}: {report}"
            overflows |= "overflows float16" in report.detail
            torch.manual_seed(seed)
            assert step(fixture.batch).applied
    assert overflows


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 0.1},
        {"clip_value": 0.01},
        {"max_norm": 0.1, "accumulate": 2},
        {"clip_value": 0.01, "accumulate": 3},
        {"max_norm": 0.1, "precision": "fp16", "loss_scale": 128.0},
        {"clip_value": 0.01, "precision": "fp16", "loss_scale": 128.0, "accumulate": 2},
    ],
    ids=str,
)
def test_without_a_gate(options: dict[str, Any]) -> None:
    steps = [folded(numerics=numerics, nonfinite="ignore", **options) for numerics in ("fast", "exact")]
    for batch in batches(6):
        for step in steps:
            step(batch)
    assert has_changed(steps[0])
    for mine, theirs in zip(*(s.model.parameters() for s in steps), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": 2.0**-100, "max_norm": 0.1},
        {"loss_scale": 2.0**100, "max_norm": 0.1},
        {"loss_scale": 2.0**16, "max_norm": 0.1, "norm_type": 10.0},
        {"loss_scale": 2.0**-14, "max_norm": 0.1, "norm_type": 8.0},
    ],
    ids=str,
)
def test_norms_whose_powers_leave_the_range_of_float32_are_not_folded(options: dict[str, Any]) -> None:
    factor = 2.0**-30 if options["loss_scale"] == 2.0**100 else 2.0**8

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).float() * factor).mean()

    steps = [
        folded(numerics=numerics, precision="fp16", criterion=None, loss_fn=loss, **options)
        for numerics in ("fast", "exact")
    ]
    fast, exact = (step(batches(1)[0]) for step in steps)
    assert fast.skipped == exact.skipped
    if not exact.skipped:
        torch.testing.assert_close(fast.grad_norm, exact.grad_norm, rtol=0.01, atol=0)
        torch.testing.assert_close(fast.clip_factor, exact.clip_factor, rtol=0.01, atol=0)
