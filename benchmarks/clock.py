"""The planner's clock against measured steps, and its order of plans against the measured one.

Goes by this machine's calibration (``stepgraph calibrate``, run with as many threads as here). Steps are measured in rounds,
and the least of medians counts, since a calibration measures what the machine does when nothing else does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import recompute
import torch
from harness import table, write
from scipy.stats import spearmanr

import stepgraph as sg
from stepgraph.planner import timeline_of
from stepgraph.planner.cost import node_seconds
from stepgraph.runtime.calibrated import spec_of

CALLS = 5  # in a row, of which the median counts


def least_seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """For each candidate the least over rounds of medians of a few calls."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds = []
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            found[name].append(statistics.median(seconds))
    return {name: min(times) for name, times in found.items()}


def predicted_seconds(step: sg.TrainStep, batch: Any) -> float:
    """The clock's figure for a step that has run."""
    spec, graph = spec_of(torch.device("cpu")), step.prepare(batch)
    beside = spec.step_seconds + spec.input_seconds * len(graph.placeholders)
    return timeline_of(graph, node_seconds(spec)).seconds + beside


def steps_of_models(names: list[str], layers: int, hidden: int) -> dict[str, tuple[sg.TrainStep, Any]]:
    """Compiled steps that keep everything, each run once."""
    found = {}
    for name in names:
        model, optimizer, batch = recompute.build(name, layers=layers, hidden=hidden)
        step = sg.compile_train_step(model, optimizer, "none")
        step(batch)
        found[f"{name}, {layers} layers of {hidden}"] = (step, batch)
    return found


def plans_of(name: str, layers: int, hidden: int, count: int) -> dict[str, tuple[sg.TrainStep, Any]]:
    """Plans of one model at budgets from the least to what keeping everything takes."""
    model, optimizer, batch = recompute.build(name, layers=layers, hidden=hidden)
    most = sg.compile_train_step(model, optimizer, "none")
    most.prepare(batch)
    peak = most.plan.prediction.peak_bytes
    try:
        sg.compile_train_step(model, optimizer, memory_budget=1).prepare(batch)
        raise AssertionError("a budget of one byte cannot be kept")
    except sg.PlanError as error:
        least = error.least_bytes
    found = {}
    for number in range(count):
        budget = int(least + (peak - least) * number / (count - 1))
        model, optimizer, batch = recompute.build(name, layers=layers, hidden=hidden)
        step = sg.compile_train_step(model, optimizer, memory_budget=budget)
        step(batch)
        found[f"{budget / 1e6:.0f} MB"] = (step, batch)
    return found


def compared(steps: dict[str, tuple[sg.TrainStep, Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds predicted and measured."""
    predicted = {name: predicted_seconds(step, batch) for name, (step, batch) in steps.items()}
    measured = least_seconds({n: (lambda s=s, b=b: s(b)) for n, (s, b) in steps.items()}, rounds)
    rows = [
        [n, f"{predicted[n] * 1e3:.2f}", f"{measured[n] * 1e3:.2f}", f"{predicted[n] / measured[n]:.3f}"] for n in steps
    ]
    print(table(["step", "predicted ms", "measured ms", "ratio"], rows), flush=True)
    return {name: (predicted[name], measured[name]) for name in steps}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["llama", "gpt2", "bert", "t5", "vit"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"the clock goes by: {spec_of(torch.device('cpu')).name}")
    models = {}
    for hidden in arguments.hidden:
        models |= compared(steps_of_models(arguments.models, arguments.layers, hidden), arguments.rounds)
    plans = compared(plans_of("llama", 4, 256, arguments.plans), arguments.rounds)
    order = spearmanr([p for p, _ in plans.values()], [m for _, m in plans.values()]).statistic
    print(f"Spearman correlation over {len(plans)} plans: {order:.3f} (bar 0.9)")
    print(f"wrote {write('clock', {'models': models, 'plans': plans, 'spearman': float(order)})}")


if __name__ == "__main__":
    main()
