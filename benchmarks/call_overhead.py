"""The runtime's own time per call: guards, binding and results, without the operators.

A model of many tiny parameters is compiled; then the step is called as usual while the executor is replaced by one that
returns the outputs of an earlier run, so that only stepgraph's own Python remains. Prints the median and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import stepgraph as sg


def many_parameters(count: int) -> nn.Module:
    """Linear(4, 4) layers with ``count`` parameters in all (weights and biases)."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count // 2)))


def seconds_per_call(count: int, calls: int) -> tuple[float, float]:
    """Median seconds of the runtime alone and of the whole step."""
    model = many_parameters(count)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), max_norm=1.0)
    batch = torch.randn(2, 4)
    for _ in range(3):
        step(batch)
        scheduler.step()
    whole = _median(lambda: step(batch), calls, scheduler)
    _, variant, _ = step._compiled_for(batch)
    outputs = variant.executor(variant.binding.inputs([batch]))
    variant.executor = lambda inputs: outputs  # type: ignore[assignment, return-value]
    alone = _median(lambda: step(batch), calls, scheduler)
    return alone, whole


def _median(call: object, calls: int, scheduler: torch.optim.lr_scheduler.LRScheduler) -> float:
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        call()  # type: ignore[operator]
        seconds.append(time.perf_counter() - start)
        scheduler.step()
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/call_overhead.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    alone, whole = seconds_per_call(arguments.parameters, arguments.calls)
    print(
        f"{arguments.parameters} parameters, learning rate changed before every call, median of {arguments.calls} calls"
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
