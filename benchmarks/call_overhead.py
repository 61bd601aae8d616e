"""The runtime's own time per call: guards, binding and results, without the operators.

A model of many tiny parameters is compiled; then the step is called as usual while the executor is replaced by one that
returns the outputs of an earlier run, so that only stepgraph's own Python remains. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import stepgraph as sg

ROUNDS = 40


def many_parameters(count: int) -> nn.Module:
    """Linear(4, 4) layers with ``count`` parameters in all (weights and biases)."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count // 2)))


def seconds_per_call(count: int, calls: int) -> tuple[float, float]:
    """Seconds of the runtime alone and of the whole step; see ``_median``."""
    model = many_parameters(count)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), max_norm=1.0)
    batch = torch.randn(2, 4)
    for _ in range(3):
        step(batch)
        scheduler.step()
    whole = _median(lambda: step(batch), calls, scheduler)
    _, variant, _ = step._captures.find(batch)
    outputs = variant.executor(variant.inputs([batch]))
    variant.executor = lambda inputs: outputs  # type: ignore[assignment, return-value]
    alone = _median(lambda: step(batch), calls, scheduler)
    return alone, whole


def _median(call: Callable[[], object], calls: int, scheduler: torch.optim.lr_scheduler.LRScheduler) -> float:
    """Lowest of the medians of many short rounds: the round that other work on the machine disturbed least."""
    rounds = []
    for _ in range(ROUNDS):
        seconds = []
        for _ in range(max(1, calls // ROUNDS)):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
            scheduler.step()
        rounds.append(statistics.median(seconds))
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/call_overhead.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    alone, whole = seconds_per_call(arguments.parameters, arguments.calls)
    print(
        f"{arguments.parameters} parameters, learning rate changed before every call; median of the least disturbed round"
    )
    print(f"  runtime alone  {alone * 1e6:8.1f} us")
    print(f"  whole step     {whole * 1e6:8.1f} us")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "parameters": arguments.parameters,
        "runtime_seconds": alone,
        "step_seconds": whole,
        "torch": torch.__version__,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
