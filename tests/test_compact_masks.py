"""Dropout masks as bits: the same numbers, an eighth of a byte an element, and lower peaks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.graph.ops import pack_bits, unpack_bits
from stepgraph.passes import CompactMasks, run_passes

from . import fixtures, graphs
from .peaks import peak_of_step


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(["f32", "bf16", "f16", "f64"]), st.data())
def test_bits_come_out_as_they_went_in(shape: list[int], dtype: str, data: st.DataObject) -> None:
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}[dtype]
    order = data.draw(st.permutations(range(len(shape))))
    values = torch.empty(shape).bernoulli_(data.draw(st.floats(0, 1))).to(kind).permute(order)
    packed = pack_bits(values)
    assert packed.dtype is torch.uint8
    assert packed.shape == (-(-values.numel() // 8),)
    again = unpack_bits(packed, list(values.shape), list(values.stride()), kind)
    assert torch.equal(again, values)
    assert (again.stride(), again.dtype) == (values.stride(), kind)


def test_every_byte() -> None:
    bits = torch.tensor(list(itertools.product([0.0, 1.0], repeat=8)))
    packed = pack_bits(bits)
    assert len(set(packed.tolist())) == 256
    assert torch.equal(unpack_bits(packed, [256, 8], [8, 1], torch.float32), bits)


@pytest.mark.case("B30")
def test_the_rewritten_graph_has_the_same_bits() -> None:
    of = graphs.of_fixture("DROP", "adamw_fused")
    plain, compact = of.rewritten(), of.rewritten()
    (record,) = run_passes(compact, [CompactMasks()])
    assert record.result.intended["masks"] > 0
    assert run_passes(compact, [CompactMasks()])[0].result.changed is False, "once is enough"
    expected, found = graphs.run(plain, of), graphs.run(compact, of)
    for name, value in expected.params.items():
        assert torch.equal(value, found.params[name]), name
    assert torch.equal(expected.random_state, found.random_state)


class Wide(nn.Module):
    """Dropout on most of what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x).tanh(), 0.3)
        return x


def _step(plan: Any = "auto", budget: int | None = None) -> sg.TrainStep:
    with fixtures.seeded(0):
        model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sg.compile_train_step(model, optimizer, plan, memory_budget=budget, loss_fn=fixtures.mean_square)


def _least(monkeypatch: pytest.MonkeyPatch, disabled: str) -> int:
    monkeypatch.setenv("STEPGRAPH_DISABLE", disabled)
    with pytest.raises(sg.PlanError) as error:
        _step(budget=150_000).prepare(torch.ones(512, 64))
    return error.value.least_bytes


def test_a_budget_that_binds_compacts_masks_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.ones(512, 64)
    free = _step()
    free.prepare(batch)
    assert not free.plan.compacts_masks
    whole, least = _least(monkeypatch, "compact_masks"), _least(monkeypatch, "")
    assert least < whole - 4 * 512 * 64 * 3, "most of six masks of four bytes an element"
    budget = (least + whole) // 2
    step, plain = _step(budget=budget), _step("none")
    with fixtures.seeded(1):
        result, peak = peak_of_step(step, batch)
    with fixtures.seeded(1):
        expected = plain(batch)
    assert torch.equal(result.loss, expected.loss)
    for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert step.plan.compacts_masks
    assert peak <= budget + 8192, "the first step keeps the random state beside it"
    saved = step.plan.to_json()
    replayed = _step(step.plan)
    with fixtures.seeded(1):
        assert torch.equal(replayed(batch).loss, expected.loss)
    assert replayed.plan.to_json() == saved


def test_masks_stay_as_they_are_where_that_is_faster_and_the_gap_is_to_both() -> None:
    """At a loose budget, packing all masks costs more than computing a little again."""
    batch = torch.ones(512, 64)
    free = _step("none")
    free.prepare(batch)
    whole = free.plan.prediction
    step = _step(budget=whole.peak_bytes - 1)
    step.prepare(batch)
    assert step.plan.repeats
    assert not step.plan.compacts_masks
    assert not any("pack_bits" in n.meta["key"].name for n in step.graph.calls)
    before = float("inf")
    for share in np.linspace(0.6, 1.0, 9):
        at = _step(budget=int(share * (whole.peak_bytes - 1)))
        at.prepare(batch)
        assert at.plan.prediction.seconds <= before, "a larger budget is never slower, packed or not"
        before = at.plan.prediction.seconds
