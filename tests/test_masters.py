"""Parameters held in 16 bit are updated through float32 masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.graph import Phase
from stepgraph.graph.verifier import verify

from . import fixtures, oracle
from .amp_loop import HandWritten, compiled_update

HALVES = [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.bfloat16)]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """In float32, whatever the model's output is in."""
    return model(batch).float().square().mean()


def build(dtype: torch.dtype) -> nn.Module:
    with fixtures.seeded(0):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def masters_of(model: nn.Module) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().float()) for p in model.parameters()]


@pytest.mark.case("B17")
@pytest.mark.feature("AMP-12", "AMP-13")
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.05}, {"clip_value": 0.01}], ids=str)
@pytest.mark.parametrize(
    "optimizer", ["sgd_momentum", "adamw_forloop", "adamw_foreach", "adamw_fused", "adagrad_foreach"]
)
@pytest.mark.parametrize(("precision", "dtype"), HALVES, ids=str)
def test_updates_are_those_of_a_loop_with_masters(
    precision: str, dtype: torch.dtype, optimizer: str, clip: dict[str, float]
) -> None:
    eager, graph = build(dtype), build(dtype)
    make = oracle.OPTIMIZERS.get(optimizer) or oracle.OTHER_OPTIMIZERS[optimizer]
    masters = masters_of(eager)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2) if precision == "fp16" else None
    loop = HandWritten(eager, make(masters), mean_square, precision, scaler, masters=masters, **clip)
    scale = {"loss_scale": sg.LossScale(growth_interval=2)} if precision == "fp16" else {}
    step = sg.compile_train_step(
        graph, make(graph.parameters()), loss_fn=mean_square, precision=precision, **scale, **clip
    )
    batches = [x.to(dtype) for x in fixtures.inputs(4, 8, steps=6)]
    batches[2][0, 0] = torch.inf
    for number, batch in enumerate(batches, start=1):
        want, got = loop.update([batch]), compiled_update(step, number, [batch])
        assert torch.equal(want.snapshot.grad_norm, got.snapshot.grad_norm) or want.snapshot.grad_norm.isnan()
        assert want.snapshot.grad_norm.dtype is got.snapshot.grad_norm.dtype is torch.float32
        oracle_params, params = list(eager.parameters()), list(graph.parameters())
        assert all(torch.equal(a, b) for a, b in zip(oracle_params, params, strict=True)), f"after update {number}"
        for master, param in zip(masters, params, strict=True):
            theirs, mine = loop.optimizer.state.get(master, {}), step.optimizer.state.get(param, {})
            assert theirs.keys() == mine.keys()
            for name, value in theirs.items():
                assert torch.equal(value, mine[name]), name
        assert (want.applied, want.scale) == (got.applied, got.scale)
    assert all(p.dtype is dtype for p in graph.parameters())
    report = step.verify(batches[0])
    assert report.equal, str(report)
    assert report.compared["master weights"] == len(masters)


def test_an_update_too_small_for_16_bit_is_not_lost() -> None:
    kept, lost = build(torch.bfloat16), build(torch.bfloat16)
    start = [p.detach().clone() for p in kept.parameters()]
    for model, master_weights in ((kept, True), (lost, False)):
        step = sg.compile_train_step(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-4),
            loss_fn=mean_square,
            precision="bf16",
            master_weights=master_weights,
        )
        for _ in range(300):
            step(fixtures.rows(1, 4, 8))
    moved = [[not torch.equal(a, b) for a, b in zip(m.parameters(), start, strict=True)] for m in (kept, lost)]
    weights = slice(0, None, 2)
    assert all(moved[0][weights])
    assert sum(moved[1][weights]) < 3


def test_a_part_of_the_model_in_16_bit() -> None:
    model = build(torch.float32)
    model[2].to(torch.bfloat16)
    step = sg.compile_train_step(
        model, torch.optim.AdamW(model.parameters()), loss_fn=mean_square, precision="bf16", max_norm=0.1
    )
    for x in fixtures.inputs(4, 8):
        assert step(x).applied
    assert step.verify(fixtures.rows(1, 4, 8)).equal
    moments = [entries["exp_avg"].dtype for entries in step.optimizer.state.values()]
    assert moments == [torch.float32] * 6
    assert [p.dtype for p in model.parameters()].count(torch.bfloat16) == 2


def test_weights_that_are_loaded_later_are_taken_over() -> None:
    model, other = build(torch.bfloat16), build(torch.bfloat16)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mean_square)
    step(fixtures.rows(1, 4, 8).bfloat16())
    model.load_state_dict(other.state_dict())
    fresh = sg.compile_train_step(other, torch.optim.SGD(other.parameters(), lr=0.1), loss_fn=mean_square)
    for x in fixtures.inputs(4, 8):
        step(x.bfloat16())
        fresh(x.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_frozen_parameter_has_no_master_until_it_trains() -> None:
    model = build(torch.bfloat16)
    model[0].requires_grad_(False)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mean_square)
    x = fixtures.rows(1, 4, 8).bfloat16()
    step(x)
    assert step.verify(x).compared["master weights"] == 4
    model[0].requires_grad_(True)
    step(x)
    assert step.verify(x).compared["master weights"] == 6


def test_state_in_16_bit_is_refused() -> None:
    model = build(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    mean_square(model, fixtures.rows(1, 4, 8).bfloat16()).backward()
    optimizer.step()
    step = sg.compile_train_step(model, optimizer, loss_fn=mean_square)
    with pytest.raises(sg.ConfigError, match=r"state of 0\.weight holds exp_avg in torch\.bfloat16"):
        step(fixtures.rows(1, 4, 8).bfloat16())
    plain = sg.compile_train_step(model, optimizer, loss_fn=mean_square, master_weights=False)
    assert plain(fixtures.rows(1, 4, 8).bfloat16()).applied


@pytest.mark.parametrize("kind", ["radam", "hooks"])
def test_an_update_that_cannot_be_traced_has_masters_too(kind: str) -> None:
    eager, graph = build(torch.bfloat16), build(torch.bfloat16)
    make = torch.optim.RAdam if kind == "radam" else torch.optim.SGD
    masters = masters_of(eager)
    loop = HandWritten(eager, make(masters, lr=0.1), mean_square, masters=masters, max_norm=0.1)
    optimizer = make(graph.parameters(), lr=0.1)
    seen: list[torch.dtype] = []
    if kind == "hooks":
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].dtype))
    step = sg.compile_train_step(graph, optimizer, loss_fn=mean_square, max_norm=0.1)
    for number, x in enumerate(fixtures.inputs(4, 8, steps=8), start=1):
        loop.update([x.bfloat16()])
        compiled_update(step, number, [x.bfloat16()])
        assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), graph.parameters(), strict=True)), number
    assert seen == [torch.float32] * (8 if kind == "hooks" else 0)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in graph.parameters()}
    assert step.verify(fixtures.rows(1, 4, 8).bfloat16()).equal


def test_a_master_belongs_to_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mean_square)
    graph = step.prepare(fixtures.rows(1, 2, 4).bfloat16()).copy()
    verify(graph)
    copies = [n for n in graph.calls if n.target is torch.ops.aten.copy_.default and n.meta["phase"] is Phase.UPDATE]
    assert len(copies) == 4
    copies[0].args, copies[2].args = (copies[0].args[0], copies[2].args[1]), (copies[2].args[0], copies[0].args[1])
    with pytest.raises(sg.VerificationError, match=r"0\.weight/copy_#0@update writes the param"):
        verify(graph)


@pytest.mark.parametrize("numerics", ["fast"])
def test_the_fast_tier_has_masters_too(numerics: Any) -> None:
    model, exact = build(torch.bfloat16), build(torch.bfloat16)
    options: dict[str, Any] = {"loss_fn": mean_square, "precision": "bf16", "max_norm": 0.1}
    fast = sg.compile_train_step(model, torch.optim.AdamW(model.parameters()), numerics=numerics, **options)
    step = sg.compile_train_step(exact, torch.optim.AdamW(exact.parameters()), **options)
    for x in fixtures.inputs(4, 8, steps=3):
        fast(x)
        step(x)
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)
    assert fast.verify(fixtures.rows(1, 4, 8)).ok


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("look", ["verify", "find_nonfinite"])
def test_looking_at_a_step_leaves_its_masters_alone(look: str, accumulate: int) -> None:
    plain, looked = build(torch.bfloat16), build(torch.bfloat16)
    steps = [
        sg.compile_train_step(m, torch.optim.SGD(m.parameters(), lr=1e-4), loss_fn=mean_square, accumulate=accumulate)
        for m in (plain, looked)
    ]
    x = fixtures.rows(1, 4, 8).bfloat16()
    for _ in range(60):
        for step in steps:
            step(x)
        getattr(steps[1], look)(x)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), looked.parameters(), strict=True))
    masters = [step._state.masters.tensors for step in steps]
    assert all(torch.equal(masters[0][key], masters[1][key]) for key in masters[0])
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters[1].values()), "they hold more than 16 bit"


def test_a_checkpoint_after_weights_were_written_has_their_masters(tmp_path: Path) -> None:
    model = build(torch.bfloat16)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mean_square)
    x = fixtures.rows(1, 4, 8).bfloat16()
    step(x)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    step.save(tmp_path)
    step(x)
    want = [p.clone() for p in model.parameters()]
    step.load(tmp_path)
    step(x)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), want, strict=True))
