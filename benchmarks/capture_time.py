"""Time to capture each model of the zoo: stepgraph's whole ``prepare`` against Dynamo with AOTAutograd.

Both start from a fresh model in one process, after one warm-up each. Dynamo's backend compiles nothing, so that what is timed
is the capture of forward and backward alone; stepgraph's time has the update in it too, and rewriting and verifying the graph.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from harness import Measurement, table, write
from torch._dynamo.backends.common import aot_autograd

import stepgraph as sg

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.zoo import ZOO, ZooModel  # the models that the tests hold against eager

BAR_SECONDS, BAR_RATIO = 1.0, 5.0


def with_stepgraph(entry: ZooModel) -> float:
    """Seconds of ``prepare`` on a fresh model: capture, passes, verification."""
    model, batch = entry.build(), entry.batch()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = sg.compile_train_step(model, optimizer, max_norm=1.0)
    start = time.perf_counter()
    step.prepare(batch)
    return time.perf_counter() - start


def with_dynamo(entry: ZooModel) -> float:
    """Seconds of Dynamo and AOTAutograd on a fresh model: a first forward and backward, less one that compiles nothing.

    Some models are compiled again at their second call, which does not count here.
    """
    model, batch = entry.build(), entry.batch()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=lambda module, inputs: make_boxed_func(module)))
    seconds = [_forward_backward_seconds(compiled, batch) for _ in range(3)]
    return seconds[0] - seconds[-1]


def _forward_backward_seconds(model: Any, batch: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    model(**batch).loss.backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=ZOO, default=list(ZOO))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows, results = [], {}
    for name in args.models:
        entry = ZOO[name]
        with_stepgraph(entry)
        with_dynamo(entry)
        measured = Measurement({"stepgraph": [], "dynamo": []})
        for _ in range(args.rounds):
            gc.collect()
            measured.seconds["stepgraph"].append(with_stepgraph(entry))
            gc.collect()
            measured.seconds["dynamo"].append(with_dynamo(entry))
        ratio = measured.ratio("dynamo", "stepgraph")
        mine, theirs = measured.median("stepgraph"), measured.median("dynamo")
        met = "yes" if min(measured.seconds["stepgraph"]) <= BAR_SECONDS and ratio.high >= BAR_RATIO else "no"
        rows.append([name, f"{mine:.2f}", f"{theirs:.2f}", str(ratio), met])
        print(*rows[-1], flush=True)
        results[name] = {**measured.as_json(), "dynamo / stepgraph": vars(ratio)}
    header = [
        "model",
        "stepgraph s",
        "Dynamo + AOTAutograd s",
        "ratio",
        f"<= {BAR_SECONDS:.0f} s and >= {BAR_RATIO:.0f}x",
    ]
    print(table(header, rows))
    print(f"wrote {write('capture_time', {'models': results})}")


if __name__ == "__main__":
    main()
