"""Chains: the dynamic program against every order of a few stages and against known counts, and the plans that come of it."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest

from stepgraph.planner.chain import Chain, Kept, Restart, Stage, Way
from stepgraph.planner.recompute import BLOCKS, NESTED, RecomputeProblem
from stepgraph.planner.schedule import everything_kept
from stepgraph.planner.search import fastest_within, uniform

from .outlines import chain


def random_stages(draw: random.Random, count: int) -> list[Stage]:
    stages = []
    for _ in range(count):
        peak = draw.randint(1, 5)
        nothing = Way(0, float(draw.randint(1, 4)), 0, peak)
        kept = draw.randint(1, 3)
        something = Way(1, float(draw.randint(0, 2)) / 2, kept, max(kept, draw.randint(1, 5)))
        ways = (nothing, something) if draw.random() < 0.7 else (nothing,)
        stages.append(
            Stage(draw.randint(1, 3), float(draw.randint(1, 4)), draw.randint(1, 3), draw.randint(0, 1), ways)
        )
    return stages


def least_of_all_orders(stages: list[Stage], budget: int) -> float:
    """Dijkstra over what is stored and where the pass stands. What is stored stays until its stage ran backward.

    A state is: how many stages still have to run backward; the inputs that are stored; the ways that are kept; the stage whose
    input the pass has just made; how far any pass came, since the first one is free.
    """
    count = len(stages)
    start = (count, frozenset({0}), frozenset[tuple[int, int]](), 0, 0)
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    ticket = itertools.count(1)

    def held(inputs: frozenset[int], kept: frozenset[tuple[int, int]]) -> int:
        return sum(stages[i].entering_bytes for i in inputs if i) + sum(stages[i].ways[w].kept_bytes for i, w in kept)

    while queue:
        seconds, _, state = heapq.heappop(queue)
        left, inputs, kept, at, reached = state
        if seconds > best[state]:
            continue
        if left == 0:
            return seconds
        found = []
        last = left - 1
        if at < last:  # run stage `at` forward, from its input, and keep of it what is wanted
            cost = 0.0 if at >= reached else stages[at].seconds
            is_first = at >= reached
            ways: list[int | None] = [None, *range(len(stages[at].ways))] if at in inputs else [None]
            for way in ways:
                if way is not None and any(i == at for i, _ in kept):
                    continue
                now_kept = kept if way is None else kept | {(at, way)}
                transient = stages[at].passing_bytes + stages[last].beside_bytes
                if way is None and not is_first and held(inputs, kept) + transient > budget:
                    continue
                for stores in (True,) if way is not None else (False, True):
                    now = inputs | {at + 1} if stores else inputs
                    if held(now, now_kept) <= budget:
                        found.append((cost, (left, now, now_kept, at + 1, max(reached, at + 1))))
        own = [w for i, w in kept if i == last]
        if last in inputs:
            for w in own or range(len(stages[last].ways)):
                way = stages[last].ways[w]
                # What was not kept is made now, unless the first pass has just come here.
                made = 0.0 if own or not way.kept_bytes or at == last >= reached else stages[last].seconds
                rest = frozenset(k for k in kept if k[0] != last)
                others = held(inputs, rest)
                if others + way.peak_bytes + stages[last].beside_bytes <= budget:
                    remaining = inputs - {last}
                    found += [
                        (made + way.seconds, (last, remaining, rest, p, max(reached, last))) for p in (remaining or {0})
                    ]
        for cost, new in found:
            if seconds + cost < best.get(new, math.inf):
                best[new] = seconds + cost
                heapq.heappush(queue, (seconds + cost, next(ticket), new))
    return math.inf


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_as_fast_as_the_best_of_all_orders_of_a_chain(first: int) -> None:
    """120 random chains of up to eight stages, at every budget up to where nothing is computed again."""
    for seed in range(first, first + 40):
        draw = random.Random(seed)
        stages = random_stages(draw, 2 + seed % 4 if seed % 10 else 8)
        most = sum(s.entering_bytes + max(w.kept_bytes for w in s.ways) for s in stages) + 8
        solver = Chain(stages, most, slots=most)
        for budget in range(1, most, 1 if len(stages) < 6 else 4):
            assert solver.seconds(budget) == pytest.approx(least_of_all_orders(stages, budget)), (seed, budget)


def advances(steps: int, checkpoints: int) -> int:
    """Least number of forward steps with a number of checkpoints, the first input among them.

    Griewank and Walther, "Algorithm 799: revolve", 2000, equation 3.
    """
    repeats = next(r for r in itertools.count() if math.comb(checkpoints + r, checkpoints) >= steps)
    return repeats * steps - math.comb(checkpoints + repeats, repeats - 1) if repeats else 0


@pytest.mark.parametrize("length", [2, 5, 16, 48])
@pytest.mark.parametrize("checkpoints", [1, 2, 3, 5, 8])
def test_uniform_chains_take_as_many_steps_as_revolve(length: int, checkpoints: int) -> None:
    stages = [Stage(1, 1.0, 0, 0, (Way(0, 0.0, 0, 0),))] * length
    again = Chain(stages, 10, slots=10).seconds(checkpoints)  # the first input is not counted, what is passed on is
    assert again == advances(length, checkpoints) - (length - 1), "the first pass is not again"


def test_solutions_cost_what_they_are_said_to() -> None:
    """Walks a solution, adding up what it computes again and what it holds."""

    def walk(parts: tuple[Kept | Restart, ...], held: int, *, is_top: bool) -> tuple[float, int]:
        seconds, most, now = 0.0, held, held
        backward: list[tuple[Kept | Restart, int]] = []
        for number, part in enumerate(parts):
            backward.append((part, now))
            is_last = number == len(parts) - 1
            behind = part.stage + 1 if isinstance(part, Kept) else part.end
            if not is_last:
                now += stages[behind].entering_bytes + (part.way.kept_bytes if isinstance(part, Kept) else 0)
            if not is_top and not is_last:
                first = part.stage if isinstance(part, Kept) else part.start
                seconds += sum(s.seconds for s in stages[first:behind])
            most = max(most, now)
        for part, there in reversed(backward):
            if isinstance(part, Kept):
                is_late = not is_top and part is parts[-1] and part.way.kept_bytes
                seconds += part.way.seconds + (stages[part.stage].seconds if is_late else 0.0)
                most = max(most, there + part.way.peak_bytes + stages[part.stage].beside_bytes)
            else:
                inner = walk(part.parts, there, is_top=False)
                seconds, most = seconds + inner[0], max(most, inner[1])
        return seconds, most

    for seed in range(20):
        stages = random_stages(random.Random(seed), 12)
        solver = Chain(stages, 60, slots=60)
        for budget in range(1, 60, 3):
            solution = solver.solution(budget)
            assert (solution is None) == math.isinf(solver.seconds(budget))
            if solution is not None:
                seconds, most = walk(solution, 0, is_top=True)
                assert seconds == pytest.approx(solver.seconds(budget))
                assert most <= budget


@pytest.mark.feature("CKPT-2")
def test_nested_plans_need_less_than_the_input_of_every_block() -> None:
    """48 blocks: far below √L, at less than twice the forward, and every budget between is kept."""
    outline = chain(48, inner=3)
    problem = RecomputeProblem(outline)
    frontier = problem.frontier
    flat = min(p.peak_bytes for p in frontier if p.found_by == BLOCKS)
    least = frontier[0]
    assert least.found_by == NESTED
    assert least.peak_bytes < 0.4 * flat
    root = uniform(outline)
    assert min(p.peak_bytes for p in frontier if p.extra_seconds <= root.seconds - outline.seconds) <= root.peak_bytes
    for pick in frontier[:20]:
        _, chosen = fastest_within(problem, pick.peak_bytes)
        assert chosen.peak_bytes <= pick.peak_bytes < everything_kept(outline).peak_bytes
        assert chosen.seconds <= outline.seconds + pick.extra_seconds + 1e-9
