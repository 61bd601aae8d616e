"""The planner's clock against measured steps, and its order of plans against the measured one.

Goes by this machine's calibration (``stepgraph calibrate``, run with as many threads as here), which tells what the machine
does when nothing else does. So does this: all steps take turns, a fixed product runs before and after each, and the median of
the faster half of its undisturbed turns counts. Steps are the models of the zoo as they are, those of ``--models`` at sizes in
between, and plans of one model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import recompute
import torch
from harness import table, write
from scipy.stats import spearmanr

import stepgraph as sg
from stepgraph.planner import timeline_of
from stepgraph.planner.cost import beside_seconds, node_seconds
from stepgraph.runtime.calibrated import spec_of
from stepgraph.tools.undisturbed import seconds_in_turns

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.zoo import ZOO  # the models that the tests hold against eager

TURN_SECONDS = 0.05
CPU = torch.device("cpu")
TRANSFORMERS = ("gpt2", "llama", "qwen3", "gemma2", "bert", "t5", "vit", "whisper")


def predicted_seconds(step: sg.TrainStep, batch: Any) -> float:
    """The clock's figure for a step that has run."""
    spec, graph = spec_of(CPU), step.prepare(batch)
    return timeline_of(graph, node_seconds(spec)).seconds + beside_seconds(graph, spec)


def steps_of_zoo(names: Iterable[str]) -> dict[str, tuple[sg.TrainStep, Any]]:
    """Compiled steps of models of the zoo, each run once."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        model, batch = ZOO[name].build(), ZOO[name].batch()
        step = sg.compile_train_step(model, torch.optim.AdamW(model.parameters(), fused=True), "none")
        step(batch)
        found[f"{name} of the zoo"] = (step, batch)
    return found


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
    """Plans of one model from the least peak to keeping everything, about evenly apart in predicted time."""
    model, optimizer, batch = recompute.build(name, layers=layers, hidden=hidden)
    try:
        sg.compile_train_step(model, optimizer, memory_budget=1).prepare(batch)
        raise AssertionError("a budget of one byte cannot be kept")
    except sg.PlanError as error:
        least = error.least_bytes
    tightest = sg.compile_train_step(model, optimizer, memory_budget=least)
    tightest.prepare(batch)
    points = sorted(tightest.plan.frontier, key=lambda point: point[1])
    fastest, slowest = points[0][1], points[-1][1]
    wanted = [fastest + (slowest - fastest) * number / (count - 1) for number in range(count)]
    found = {}
    while points and len(found) < count:
        peak, _ = point = min(points, key=lambda point: abs(point[1] - wanted[len(found)]))
        points.remove(point)
        model, optimizer, batch = recompute.build(name, layers=layers, hidden=hidden)
        step = sg.compile_train_step(model, optimizer, memory_budget=peak)
        step(batch)
        found[f"{peak / 1e6:.1f} MB"] = (step, batch)
    return found


def compared(steps: dict[str, tuple[sg.TrainStep, Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds predicted and measured."""
    predicted = {name: predicted_seconds(step, batch) for name, (step, batch) in steps.items()}
    measured = seconds_in_turns({n: (lambda s=s, b=b: s(b)) for n, (s, b) in steps.items()}, rounds, TURN_SECONDS, CPU)
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
    parser.add_argument("--rounds", type=int, default=10, help="undisturbed turns of each step")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"the clock goes by: {spec_of(CPU).name}")
    steps = steps_of_zoo(TRANSFORMERS)
    for hidden in arguments.hidden:
        steps |= steps_of_models(arguments.models, arguments.layers, hidden)
    plans = plans_of("llama", 4, 256, arguments.plans)
    found = compared(steps | plans, arguments.rounds)
    within = sum(abs(p / m - 1) <= 0.1 for p, m in found.values())
    order = spearmanr(*zip(*(found[name] for name in plans), strict=True)).statistic
    print(f"within 10 %: {within} of {len(found)}; Spearman correlation over {len(plans)} plans: {order:.3f} (bar 0.9)")
    results = {"steps": {n: found[n] for n in steps}, "plans": {n: found[n] for n in plans}, "spearman": float(order)}
    print(f"wrote {write('clock', results)}")


if __name__ == "__main__":
    main()
