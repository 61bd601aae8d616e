"""The oracle notices one flipped bit; the fixtures and the zoo are deterministic in eager."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from . import fixtures, oracle, zoo
from .oracle import OPTIMIZERS, OTHER_OPTIMIZERS, Snapshot, assert_bitwise, eager_steps, two_groups


def run(make=fixtures.mlp, optimizer: str = "adamw_foreach", **options) -> dict[int, Snapshot]:
    model, _, loss_fn = make()
    return eager_steps(
        model, OPTIMIZERS[optimizer](model.parameters()), loss_fn, fixtures.batches(make, 5), max_norm=0.5, **options
    )


def flip_lowest_bit(tensor: torch.Tensor) -> None:
    oracle.bits(tensor).view(-1)[-1:].bitwise_xor_(1)


def test_equal_runs_compare_equal():
    assert_bitwise(run(), run())


@pytest.mark.parametrize("name", fixtures.FIXTURES)
def test_fixtures_repeat_and_leave_the_random_state(name):
    make = fixtures.FIXTURES[name]
    before = torch.get_rng_state()
    model, _, loss_fn = make(3, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    assert loss_fn(model, make(3, dtype=torch.float64).batch).shape == ()
    assert_bitwise(run(make), run(make))
    other = make(4).model.state_dict()
    assert any(not torch.equal(value, other[key]) for key, value in make(3).model.state_dict().items())


@pytest.mark.parametrize("make", [fixtures.bn, fixtures.drop, fixtures.gpt])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_fixtures_train_every_parameter(make, use_reentrant):
    gradients = []
    for checkpoint in (True, False):
        model, batch, loss_fn = make(checkpoint=checkpoint, use_reentrant=use_reentrant)
        torch.manual_seed(1)
        loss_fn(model, batch).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for checkpointed, plain in zip(*gradients, strict=True):
        assert checkpointed is not None
        assert torch.equal(checkpointed, plain)


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("loss", lambda s: s.loss),
        ("grad_norm", lambda s: s.grad_norm),
        ("param 1.weight", lambda s: s.params["1.weight"]),
        ("buffer 1.running_mean", lambda s: s.buffers["1.running_mean"]),
        ("buffer 1.num_batches_tracked", lambda s: s.buffers["1.num_batches_tracked"]),
        ("state 0.weight.exp_avg_sq", lambda s: s.state["0.weight"]["exp_avg_sq"]),
        ("state 2.bias.step", lambda s: s.state["2.bias"]["step"]),
        ("rng cpu", lambda s: s.rng["cpu"]),
    ],
)
def test_one_flipped_bit_is_found_and_named(name, pick):
    a = run(fixtures.bn)[5]
    b = copy.deepcopy(a)
    flip_lowest_bit(pick(b))
    with pytest.raises(AssertionError, match=f"after step 5, {name}: 1 of .* max abs difference") as failure:
        assert_bitwise(a, b)
    assert len(str(failure.value).splitlines()) == 2


@dataclass
class Values:
    """Two tensors that are equal as numbers or as NaN, and whether they are the same bits."""

    a: torch.Tensor
    b: torch.Tensor
    same: bool


@pytest.mark.parametrize(
    "values",
    [
        Values(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), False),
        Values(torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        Values(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        Values(torch.ones(2), torch.ones(2, 1), False),
        Values(torch.ones(2, 3), torch.ones(3, 2).t(), False),
        Values(torch.ones(1, 3), torch.ones(3, 1).t(), True),
        Values(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        Values(torch.tensor([0j]), torch.tensor([-0j]), False),
        Values(torch.tensor([True]), torch.tensor([True]), True),
    ],
)
def test_bits_not_values_are_compared(values):
    a, b = (Snapshot(1, torch.zeros(()), torch.zeros(()), params={"w": value}) for value in (values.a, values.b))
    assert bool(oracle.differences(a, b)) is not values.same


def test_missing_and_extra_state_is_named():
    a = run()[2]
    b = copy.deepcopy(a)
    del b.state["0.weight"]["exp_avg"]
    b.state["0.bias"]["momentum_buffer"] = torch.zeros(16)
    del b.state["2.bias"]
    with pytest.raises(AssertionError) as failure:
        assert_bitwise(a, b)
    message = str(failure.value)
    assert "state 0.weight.exp_avg: only in the first" in message
    assert "state 0.bias.momentum_buffer: only in the second" in message
    assert "state 2.bias.step: only in the first" in message


def test_every_difference_is_listed_with_its_size():
    a = run()[1]
    b = copy.deepcopy(a)
    b.params["0.weight"][0, 0] += 0.5
    b.params["2.bias"][1:] = float("nan")
    b.groups[0]["lr"] *= 2
    lines = oracle.differences(a, b)
    assert [line.split(":")[0] for line in lines] == ["param 0.weight", "param 2.bias", "group 0.lr"]
    assert "1 of 128 elements differ, max abs difference 0.5, first at (0, 0)" in lines[0]
    assert "3 of 4 elements differ, max abs difference inf" in lines[1]


def test_untying_is_noticed():
    a = run(fixtures.tied)[5]
    assert list(a.params) == ["embedding.weight"]
    model, _, loss_fn = fixtures.tied()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    b = eager_steps(model, optimizer, loss_fn, fixtures.batches(fixtures.tied, 1), checkpoints=(1,))[1]
    assert any(line.startswith("name head.weight: 'embedding.weight' against") for line in oracle.differences(a, b))


def test_another_seed_or_another_step_is_another_run():
    a = run(fixtures.drop)
    assert any(line.startswith("rng cpu") for line in oracle.differences(a[5], run(fixtures.drop, seed=1)[5]))
    with pytest.raises(AssertionError, match="after steps"):
        assert_bitwise(a, {1: a[1]})
    with pytest.raises(ValueError, match="no batch for step"):
        run(checkpoints=(1, 6))


def test_the_norm_is_reported_before_the_clip_and_without_one():
    model, batch, loss_fn = fixtures.mlp()
    loss_fn(model, batch).backward()
    expected = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for max_norm in (None, 0.01):
        model, batch, loss_fn = fixtures.mlp()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        taken = eager_steps(model, optimizer, loss_fn, [batch], max_norm=max_norm, checkpoints=(1,))
        torch.testing.assert_close(taken[1].grad_norm, expected)


@dataclass
class Result:
    loss: torch.Tensor
    grad_norm: torch.Tensor
    applied: bool = True


@pytest.mark.parametrize("plateau", [False, True])
def test_graph_steps_runs_the_same_loop(plateau):
    def schedule(optimizer):
        if plateau:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))

    snapshots = []
    for compiled in (False, True):
        model, _, loss_fn = fixtures.drop()
        optimizer = OPTIMIZERS["adamw_fused"](two_groups(model))
        data = fixtures.batches(fixtures.drop, 5)
        if not compiled:
            snapshots.append(eager_steps(model, optimizer, loss_fn, data, scheduler=schedule(optimizer)))
            continue

        def step(batch, model=model, optimizer=optimizer, loss_fn=loss_fn):
            loss = loss_fn(model, batch)
            loss.backward()
            norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            return Result(loss.detach(), norm)

        snapshots.append(oracle.graph_steps(step, model, optimizer, data, scheduler=schedule(optimizer)))
    assert_bitwise(*snapshots)
    assert snapshots[0][1].groups[0]["lr"] != snapshots[0][5].groups[0]["lr"]


def test_twin_gives_equal_models_that_share_nothing():
    first, second = oracle.twin(zoo.ZOO["gpt2"].build)
    assert first.lm_head.weight is first.transformer.wte.weight
    with torch.no_grad():
        first.lm_head.weight.add_(1)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
    with pytest.raises(AssertionError, match="same tensors"):
        oracle.twin(lambda: first)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHER_OPTIMIZERS])
def test_optimizers_move_every_parameter_reproducibly(name):
    build = {**OPTIMIZERS, **OTHER_OPTIMIZERS}[name]

    def trained() -> dict[int, Snapshot]:
        model, _, loss_fn = fixtures.mlp()
        if name == "muon":  # takes matrices only
            model[0].bias = model[2].bias = None
        return eager_steps(model, build(two_groups(model)), loss_fn, fixtures.batches(fixtures.mlp, 5), max_norm=1.0)

    taken = trained()
    assert_bitwise(taken, trained())
    assert all(not torch.equal(value, taken[5].params[key]) for key, value in taken[1].params.items())


def test_two_groups_hold_each_trained_parameter_once():
    model = zoo.ZOO["whisper"].build()
    groups = two_groups(model)
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(groups) == 2
    assert len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert groups[0]["lr"] != groups[1]["lr"]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_zoo_is_deterministic(name):
    entry = zoo.ZOO[name]
    models = oracle.twin(entry.build)
    runs = []
    for model in models:
        optimizer = OPTIMIZERS["adamw_foreach"](two_groups(model))
        data = [entry.batch(seed, mask) for seed, mask in enumerate((entry.masks * 2)[:2])]
        runs.append(eager_steps(model, optimizer, fixtures.own_loss, data, max_norm=1.0, checkpoints=(1, 2)))
    assert_bitwise(*runs)
    last = runs[0][2]
    assert torch.isfinite(last.loss)
    assert {value.dtype for value in last.params.values()} == {entry.dtype}
    assert set(last.state) == {key for key, value in models[0].named_parameters() if value.requires_grad}
    assert entry.has_batchnorm == any("running_mean" in key for key in last.buffers)
    torch.manual_seed(0)
    assert entry.has_dropout is not torch.equal(last.rng["cpu"], torch.get_rng_state())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", [name for name, entry in zoo.ZOO.items() if entry.supports_checkpointing])
def test_zoo_checkpointing_gives_the_same_gradients(name, use_reentrant):
    entry = zoo.ZOO[name]
    plain, checkpointed = oracle.twin(entry.build)
    entry.enable_checkpointing(checkpointed, use_reentrant)
    for mask in entry.masks:
        for model in (plain, checkpointed):
            model.zero_grad()
            torch.manual_seed(1)
            model(**entry.batch(0, mask)).loss.backward()
        for (key, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
            if not a.requires_grad:
                assert a.grad is None, key
                assert b.grad is None, key
            elif use_reentrant and entry.has_cross_attention:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=key)  # summed in another order
            else:
                assert torch.equal(b.grad, a.grad), key
            assert not a.requires_grad or bool(a.grad.any()), key


def test_reentrant_checkpointing_with_frozen_embeddings():
    entry = zoo.ZOO["llama"]
    torch.manual_seed(0)
    model = entry.build()
    model.get_input_embeddings().requires_grad_(False)
    entry.enable_checkpointing(model, use_reentrant=True)
    model(**entry.batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
