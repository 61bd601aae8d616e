"""Time to capture a model: stepgraph's forward and backward against Dynamo with AOTAutograd, without any code generation.

Both start from a fresh model in one process, after one warm-up that imports what they need. Dynamo's backend compiles nothing,
so that what is timed is capture alone; stepgraph's time has the update, and rewriting and verifying the graph, in it too.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from harness import table, write
from torch._dynamo.backends.common import aot_autograd

import stepgraph as sg
from stepgraph.tools.presets import PRESETS, preset_parts

MODELS = [name for name in PRESETS if name not in ("gpt2", "gpt-demo")]


def with_stepgraph(name: str) -> float:
    """Seconds of ``prepare`` on a fresh model: capture, passes, verification."""
    model, optimizer, batch, options = preset_parts(name)
    step = sg.compile_train_step(model, optimizer, **options)
    start = time.perf_counter()
    step.prepare(batch)
    return time.perf_counter() - start


def with_dynamo(name: str) -> float:
    """Seconds of Dynamo and AOTAutograd on a fresh model: a first forward and backward, less one that compiles nothing.

    Some models are compiled again at their second call, which does not count here.
    """
    model, _, batch, _ = preset_parts(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=lambda module, inputs: make_boxed_func(module)))
    seconds = [_forward_backward_seconds(compiled, batch) for _ in range(3)]
    return seconds[0] - seconds[-1]


def _forward_backward_seconds(model: Callable[..., object], batch: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    loss = model(**batch).loss  # type: ignore[attr-defined]
    loss.backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with_stepgraph(args.models[0])
    with_dynamo(args.models[0])
    rows, results = [], {}
    for name in args.models:
        pairs = []
        for _ in range(args.rounds):
            gc.collect()
            pairs.append((with_stepgraph(name), with_dynamo(name)))
        mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        rows.append([name, f"{mine:.2f}", f"{theirs:.2f}", f"{ratio:.1f}"])
        results[name] = {"stepgraph_seconds": mine, "dynamo_seconds": theirs, "ratio": ratio}
    print(table(["model", "stepgraph s", "Dynamo + AOTAutograd s", "ratio"], rows))
    print(f"wrote {write('capture_time', {'models': results})}")


if __name__ == "__main__":
    main()
