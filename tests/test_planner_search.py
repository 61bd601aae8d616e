"""The planner against the truth: small steps by exhaustive search, and what holds for every step."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.errors import PlanError
from stepgraph.planner.blocks import classes_of, find_blocks, longest_periodic_run, part_of, shared_storages
from stepgraph.planner.memory import live_bytes
from stepgraph.planner.min_cut import cheapest_kept, convex_frontier
from stepgraph.planner.outline import Outline
from stepgraph.planner.recompute import RecomputeProblem
from stepgraph.planner.schedule import Choice, Use, everything_kept, schedule
from stepgraph.planner.search import fastest_within, uniform

from .outlines import chain, least_seconds, random_outline


def _check_runs(outline: Outline, choice: Choice) -> None:
    """Every run reads what is there, every operator runs in its place, and the bytes alive are what a plain count gives."""
    made = schedule(outline, choice)
    there: dict[int, int] = {}
    for position, run in enumerate(made.runs):
        assert [made.storages[c] for c in run.reads] == list(outline.operators[run.operator].reads)
        assert all(c in there for c in run.reads), "a copy is read before it is made"
        for copy in run.makes:
            there[copy] = position
    assert [r.operator for r in made.runs if not r.is_repeat] == list(range(len(outline.operators)))
    assert all(outline.operators[r.operator].can_repeat for r in made.runs if r.is_repeat)
    last = {c: p for p, run in enumerate(made.runs) for c in (*run.makes, *run.reads)}
    for copy, storage in enumerate(made.storages):
        if storage in outline.outputs and not made.runs[there[copy]].is_repeat:
            last[copy] = len(made.runs)
    for position, run in enumerate(made.runs):
        dying = [c for c in run.reads if last[c] == position]
        over = [s for s in outline.operators[run.operator].may_overwrite if s in {made.storages[c] for c in dying}]
        if over:
            last[next(c for c in dying if made.storages[c] == over[0])] -= 1
    for position, live in enumerate(made.live):
        counted = sum(outline.sizes[s] for c, s in enumerate(made.storages) if there[c] <= position <= last[c])
        assert live == counted + outline.operators[made.runs[position].operator].workspace


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.data())
def test_schedules_read_what_is_there_and_count_what_is_alive(seed: int, size: int, data: st.DataObject) -> None:
    outline = random_outline(seed, size)
    kept = frozenset(s for s in outline.candidates if data.draw(st.booleans()))
    _check_runs(outline, Choice(outline.always_kept | kept))
    base = schedule(outline, Choice(outline.always_kept | kept))
    uses = [
        Use(s, run.operator, run.is_repeat)
        for run in base.runs[outline.forward :]
        for s in outline.operators[run.operator].reads
        if s in outline.candidates
    ]
    renewed = frozenset(u for u in uses if data.draw(st.booleans()))
    _check_runs(outline, Choice(outline.always_kept | kept, renewed))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 8))
def test_budgets_are_kept_used_and_monotone(seed: int, size: int) -> None:
    outline = random_outline(seed, size)
    problem = RecomputeProblem(outline)
    most = everything_kept(outline).peak_bytes
    least = problem.frontier[0].peak_bytes
    for budget in range(1, least):
        with pytest.raises(PlanError) as error:
            fastest_within(problem, budget)
        assert error.value.least_bytes == least
    before = (0, float("inf"))
    for budget in range(least, most + 2):
        _, chosen = fastest_within(problem, budget)
        assert before[0] <= chosen.peak_bytes <= budget, "a smaller budget has a smaller peak"
        assert chosen.seconds <= before[1] + 1e-9
        assert chosen.seconds >= outline.seconds + problem.bound_seconds(budget) - 1e-6, "the bound is one"
        before = (chosen.peak_bytes, chosen.seconds)
    assert before == (most, pytest.approx(outline.seconds)), "with all the memory nothing runs again"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(7, 12), st.data())
def test_plans_from_elsewhere_are_taken_where_they_are_the_fastest(seed: int, size: int, data: st.DataObject) -> None:
    """What the model asks for is a hint: at no budget is there a plan of the search that is slower than it."""
    outline = random_outline(seed, size)
    kept = frozenset(s for s in outline.candidates if data.draw(st.booleans()))
    hint, root = schedule(outline, Choice(outline.always_kept | kept)), uniform(outline)
    with mock.patch("stepgraph.planner.recompute.is_small", return_value=False):
        alone = RecomputeProblem(outline)
        problem = RecomputeProblem(outline, {"a hint": hint, "the root": root})
        for other in (hint, root):
            pick, chosen = fastest_within(problem, other.peak_bytes)
            assert chosen.seconds <= other.seconds + 1e-9
            assert chosen.peak_bytes <= other.peak_bytes
            if pick.found_by == "a hint":
                assert chosen is hint
        assert problem.frontier[0].peak_bytes <= min(alone.frontier[0].peak_bytes, hint.peak_bytes, root.peak_bytes)


@pytest.mark.parametrize("first", range(0, 240, 30))
@pytest.mark.case("B56")
def test_as_fast_as_the_best_of_all_orders(first: int) -> None:
    """240 random steps, at every peak of the frontier and just below each: the fastest that exists, or none where none does."""
    for seed in range(first, first + 30):
        outline = random_outline(seed, 4 + seed % 3)
        frontier = RecomputeProblem(outline).frontier
        for number, pick in enumerate(frontier):
            best = least_seconds(outline, pick.peak_bytes)
            assert best == pytest.approx(outline.seconds + pick.extra_seconds), (seed, pick)
            below = least_seconds(outline, pick.peak_bytes - 1)
            if number == 0:
                assert below is None, (seed, pick)
            else:
                assert below == pytest.approx(outline.seconds + frontier[number - 1].extra_seconds), (seed, pick)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_local_search_is_close_to_the_best_of_all_orders(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What larger steps are planned with, on small ones: mostly the best, never far from it, never better than it."""
    monkeypatch.setattr("stepgraph.planner.recompute.is_small", lambda outline: False)
    ratios = []
    for seed in range(first, first + 25):
        outline = random_outline(seed, 6)
        problem = RecomputeProblem(outline)
        for pick in problem.frontier:
            best = least_seconds(outline, pick.peak_bytes)
            assert best is not None
            assert problem.realised(pick).peak_bytes == pick.peak_bytes
            ratios.append((outline.seconds + pick.extra_seconds) / best)
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(np.array(ratios) <= 1.01) >= 0.93
    assert max(ratios) <= 1.2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.floats(0, 10))
def test_min_cut_is_the_cheapest_of_all_subsets(seed: int, size: int, price: float) -> None:
    outline = random_outline(seed, size)

    def cost(kept: frozenset[int]) -> float:
        made = schedule(outline, Choice(kept))
        used = {
            made.storages[c]
            for run in made.runs[outline.forward :]
            for c in run.reads
            if made.storages[c] in kept - outline.outputs
            and c < len({s for op in outline.operators[: outline.forward] for s in op.makes})
        }
        return made.seconds - outline.seconds + price * sum(outline.sizes[s] for s in used)

    subsets = (
        outline.always_kept.union(kept)
        for count in range(len(outline.candidates) + 1)
        for kept in itertools.combinations(outline.candidates, count)
    )
    assert cost(cheapest_kept(outline, price)) <= min(map(cost, subsets)) + 1e-4 * (1 + outline.seconds)


def test_convex_frontier_is_convex_and_has_both_ends() -> None:
    points = convex_frontier(random_outline(3, 9))
    slopes = [
        (b.extra_seconds - a.extra_seconds) / (a.kept_bytes - b.kept_bytes)
        for a, b in itertools.pairwise(points)
        if a.kept_bytes > b.kept_bytes
    ]
    assert points[0].extra_seconds == 0
    assert slopes == sorted(slopes)
    assert len(points) > 2


# Blocks


def test_periodic_runs() -> None:
    assert longest_periodic_run(np.array([9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 7])) == (1, 4, 12)
    assert longest_periodic_run(np.arange(20)) is None
    assert longest_periodic_run(np.array([], dtype=np.int64)) is None


@pytest.mark.feature("CKPT-4")
def test_blocks_of_a_chain_are_found_and_alike() -> None:
    outline = chain(10, inner=4)
    blocks = find_blocks(outline)
    shared = shared_storages(outline, blocks)
    parts = [part_of(outline, block, shared) for block in blocks]
    sizes = sorted(map(len, classes_of(parts)))
    assert sum(sizes) == len(blocks)
    assert sizes[-1] >= 8
    assert [i for b in blocks for i in b.forward] == list(range(outline.forward))
    assert [i for b in reversed(blocks) for i in b.backward] == list(range(outline.forward, outline.backward))


@pytest.mark.feature("CKPT-2", "CKPT-3")
def test_uniform_checkpoints_are_root_l_apart() -> None:
    outline = chain(48, inner=4)
    assert len(find_blocks(outline)) == pytest.approx(48, abs=2)
    plain = everything_kept(outline)
    taken = uniform(outline)
    assert taken.peak_bytes == uniform(outline, 7).peak_bytes
    assert taken.peak_bytes < 0.45 * plain.peak_bytes
    forward = sum(op.seconds for op in outline.operators[: outline.forward])
    assert forward * 0.7 < taken.seconds - plain.seconds < forward, "once more, but for the last segment"


def test_live_bytes_of_known_intervals() -> None:
    births, deaths, sizes = np.array([0, 0, 2]), np.array([1, 9, 2]), np.array([4, 2, 1])
    assert live_bytes(births, deaths, sizes, 4).tolist() == [6, 6, 3, 2]


def test_blocks_are_found_where_a_result_is_read_long_before_its_own_backward() -> None:
    """As T5's decoder has it: a mask of the first block, which the backward of the last one reads too."""
    plain = chain(10, inner=4)
    operators = list(plain.operators)
    early = operators[1].makes[0]  # made in the first block, read in its backward
    first_of_last = plain.forward + 1
    operators[first_of_last] = dataclasses.replace(
        operators[first_of_last], reads=(*operators[first_of_last].reads, early)
    )
    outline = dataclasses.replace(plain, operators=tuple(operators))
    assert len(find_blocks(outline)) == len(find_blocks(plain))
