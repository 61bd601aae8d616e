"""Real architectures, bit for bit eager after steps 1, 2 and 5."""

from __future__ import annotations

import pytest
import torch

import stepgraph as sg

from . import fixtures, oracle, zoo

STEPS = 5


def _scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (t + 1))


def compare(
    entry: zoo.ZooModel, optimizer: str, *, mask: str = "none", checkpointing: bool | None = None
) -> sg.TrainStep:
    """Runs eager and graph side by side on twins; returns the compiled step."""
    eager_model, graph_model = oracle.twin(entry.build)
    if checkpointing is not None:
        entry.enable_checkpointing(graph_model, use_reentrant=checkpointing)
        # Eager sums the gradients inside a reentrant region before those outside, which shows where layers share an input.
        entry.enable_checkpointing(eager_model, use_reentrant=checkpointing and not entry.has_cross_attention)
    batches = [entry.batch(seed, mask) for seed in range(STEPS)]
    eager_optimizer = oracle.OPTIMIZERS[optimizer](oracle.two_groups(eager_model))
    graph_optimizer = oracle.OPTIMIZERS[optimizer](oracle.two_groups(graph_model))
    eager = oracle.eager_steps(
        eager_model, eager_optimizer, fixtures.own_loss, batches, max_norm=1.0, scheduler=_scheduler(eager_optimizer)
    )
    step = sg.compile_train_step(graph_model, graph_optimizer, max_norm=1.0, master_weights=False)
    graph = oracle.graph_steps(step, graph_model, graph_optimizer, batches, scheduler=_scheduler(graph_optimizer))
    oracle.assert_bitwise(eager, graph)
    assert step.captures == 1, "one capture serves the whole schedule"
    return step


@pytest.mark.parametrize("name", zoo.ZOO)
@pytest.mark.case("B61", "B47")
@pytest.mark.feature("API-7", "CLIP-1", "CLIP-3", "CLIP-7", "AMP-14")
def test_bitwise_eager(name: str) -> None:
    compare(zoo.ZOO[name], "adamw_forloop")


@pytest.mark.parametrize("name", [n for n, e in zoo.ZOO.items() if "padded" in e.masks])
@pytest.mark.case("B61")
def test_bitwise_with_padding(name: str) -> None:
    compare(zoo.ZOO[name], "adamw_foreach", mask="padded")


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("name", [n for n, e in zoo.ZOO.items() if e.supports_checkpointing])
@pytest.mark.case("B30", "B61")
@pytest.mark.feature("CKPT-5", "CKPT-6", "CKPT-12")
def test_bitwise_with_checkpointing(name: str, reentrant: bool) -> None:
    step = compare(zoo.ZOO[name], "adamw_fused", checkpointing=reentrant)
    assert step.graph.regions, "the model's wish is remembered"
    assert all(region.reentrant is reentrant for region in step.graph.regions)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_nesterov", "adamw_forloop", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "t5"])
def test_bitwise_with_optimizer(name: str, optimizer: str) -> None:
    compare(zoo.ZOO[name], optimizer)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_verify_says_bitwise_equal(name: str) -> None:
    model = zoo.ZOO[name].build()
    step = sg.compile_train_step(model, torch.optim.AdamW(model.parameters()), max_norm=1.0, master_weights=False)
    report = step.verify(zoo.ZOO[name].batch())
    assert report.equal, str(report)
    assert "bitwise equal" in str(report)
