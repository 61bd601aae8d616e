"""Measures what this machine can do, once, and keeps it for every later plan."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..api import compile_train_step
from ..device import autocast_off, describe, memory_bytes, synchronize
from ..graph.ops import KERNELS
from ..planner import HardwareSpec, Table
from ..planner.cost import node_seconds
from ..runtime.calibrated import built_in_spec, calibration_path
from .calibration_samples import Call, Sample, samples, work_of_call

_PASSES = 3
_BATCHES = 3  # in a pass
_BATCH_SECONDS = 3e-4
_LONG_SECONDS = 0.02  # a batch beyond this is repeated once; larger sizes of the same operator follow from this one
_MOST_CALLS = 100  # in a batch
_DISK_BYTES = 2**25
_SMALL_WIDTH = 32
_STEPS = 11  # in a row, of which the median counts
_TURNS = 10


def calibrate(
    device: torch.device, progress: Callable[[int, int, str], None] = lambda done, of, name: None
) -> HardwareSpec:
    """Measures operators of training steps at several sizes each, and keeps the result for this machine.

    Everything is measured in several passes, of which the least counts: what a machine does when nothing else does.

    Args:
        progress: is told how many samples are done, of how many, and what comes next.
    """
    todo = list(samples(device))
    points: dict[str, dict[tuple[float, ...], float]] = defaultdict(dict)
    view_seconds = python_seconds = math.inf
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), autocast_off():
        for turn in range(_PASSES):
            for number, sample in enumerate(todo):
                progress(turn * len(todo) + number, _PASSES * len(todo), sample.table)
                found = points[sample.table]
                if sample.sizes is None and max(found.values(), default=0.0) > _LONG_SECONDS:
                    continue
                sizes, seconds = _measure(sample, device)
                found[sizes] = min(seconds, found.get(sizes, math.inf))
            view_seconds = min(view_seconds, statistics.mean(_seconds(call, device) for call in _views(device)))
            python_seconds = min(python_seconds, _seconds((operator.getitem, ((0, 1), 1)), device))
    progress(_PASSES * len(todo), _PASSES * len(todo), "")
    tables = {name: _table(found) for name, found in points.items()}
    path = calibration_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk = _disk_rate(path.parent)
    spec = _spec(device, tables, view_seconds=view_seconds, python_seconds=python_seconds, disk=disk)
    spec = amid_steps(spec, device)
    path.write_text(spec.to_json())
    return spec


def _spec(
    device: torch.device, tables: dict[str, Table], *, view_seconds: float, python_seconds: float, disk: float
) -> HardwareSpec:
    """Rates for what has no table follow from the tables."""
    large, small = float(2**26), float(2**12)
    matmul = {dtype: 2 * 1024.0**3 / tables[f"mm:{dtype}"].at(1024, 1024, 1024) for dtype in ("f32", "bf16")}
    memory = large / tables["clone:f32"].at(large)
    known = built_in_spec(device)
    return HardwareSpec(
        name=f"{describe(device)}, calibrated",
        source=f"measured by stepgraph calibrate with torch {torch.__version__}",
        matmul_flops=matmul,
        attention_flops={dtype: 1e9 / tables[f"attention:{dtype}"].at(1e9) for dtype in matmul},
        convolution_flops={"f32": 1e9 / tables["convolution:f32"].at(1e9)},
        memory_bytes_per_second=memory,
        scalar_ops_per_second=large / 8 / tables["exp:f32"].at(large),
        launch_seconds=tables["mul:f32"].at(small),
        view_seconds=view_seconds,
        python_seconds=python_seconds,
        memory_bytes=memory_bytes(device),
        link_bytes_per_second=known.link_bytes_per_second,
        link_seconds=known.link_seconds,
        host_bytes_per_second=_host_rate(device),
        disk_bytes_per_second=disk,
        tables=tables,
    )


def _measure(sample: Sample, device: torch.device) -> tuple[tuple[float, ...], float]:
    """Where in its table a sample belongs, and the seconds there."""
    calls = sample.calls()
    seconds = statistics.mean(_seconds(call, device) for call in calls)
    if sample.sizes is not None:
        return sample.sizes, seconds
    target, args = calls[0]
    work = work_of_call(target, args, target(*args))
    return work.sizes, seconds / work.times


def _table(points: dict[tuple[float, ...], float]) -> Table:
    axes = tuple(tuple(sorted({sizes[i] for sizes in points})) for i in range(len(next(iter(points)))))
    return Table(axes, tuple(points[sizes] for sizes in itertools.product(*axes)))


def _seconds(call: Call, device: torch.device) -> float:
    """Of one call: the median over batches of calls, after one to warm up."""
    target: Any = KERNELS.get(call[0], call[0])
    args = call[1]
    target(*args)
    count, seconds = 1, _batch_seconds(target, args, 1, device)
    while count < _MOST_CALLS and seconds * count < _BATCH_SECONDS:
        count *= 4
        seconds = _batch_seconds(target, args, count, device)
    batches = _BATCHES if seconds * count < _LONG_SECONDS else 1
    return statistics.median([seconds, *(_batch_seconds(target, args, count, device) for _ in range(batches))])


def _batch_seconds(target: Any, args: tuple[Any, ...], count: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        target(*args)
    synchronize(device)
    return (time.perf_counter() - start) / count


def _views(device: torch.device) -> list[Call]:
    aten, x = torch.ops.aten, torch.ones(8, 16, device=device)
    return [
        (aten.view.default, (x, [16, 8])),
        (aten._unsafe_view.default, (x, [16, 8])),
        (aten.t.default, (x,)),
        (aten.transpose.int, (x, 0, 1)),
        (aten.select.int, (x, 0, 1)),
        (aten.expand.default, (x, [8, 16])),
    ]


def _host_rate(device: torch.device) -> float:
    """Bytes per second from the host's memory to the device's; on the CPU from one place of memory to another."""
    source = torch.ones(2**24, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return source.nbytes / _seconds((torch.ops.aten.copy_.default, (target, source)), device)


def _disk_rate(folder: Path) -> float:
    """Bytes per second of the slower of writing a file through to disk and reading it."""
    file = folder / f"calibration-{os.getpid()}.tmp"
    data = os.urandom(_DISK_BYTES)
    try:
        start = time.perf_counter()
        with file.open("wb") as out:
            out.write(data)
            os.fsync(out.fileno())
        written = time.perf_counter()
        file.read_bytes()
        return _DISK_BYTES / max(written - start, time.perf_counter() - written)
    finally:
        file.unlink(missing_ok=True)


def amid_steps(spec: HardwareSpec, device: torch.device) -> HardwareSpec:
    """The spec with what only whole steps show: slower launches, and what a step does beside its operators.

    Three small steps tell it: one of few operators and inputs, one of many inputs, one of many operators.
    """
    few, inputs, operators = [_SmallStep(device, blocks, extra) for blocks, extra in ((0, 0), (0, 64), (4, 0))]
    for _ in range(_TURNS):
        for small in (few, inputs, operators):
            small.measure()
    once, twice = [operators.predicted(replace(spec, launch_factor=f)) for f in (1.0, 2.0)]
    factor, fixed, each = 1.0, 0.0, 0.0
    for _ in range(4):  # each figure follows from the others; a few rounds settle them
        amid = replace(spec, launch_factor=factor)
        beside = [s.measured - s.predicted(amid) for s in (few, inputs)]
        each = max((beside[1] - beside[0]) / (inputs.inputs - few.inputs), 0.0)
        fixed = max(beside[0] - each * few.inputs, 0.0)
        factor = max(1.0 + (operators.measured - once - fixed - each * operators.inputs) / (twice - once), 0.1)
    return replace(spec, launch_factor=factor, step_seconds=fixed, input_seconds=each)


class _SmallStep:
    """A step in which nothing takes long but starting it, measured."""

    def __init__(self, device: torch.device, blocks: int, extra_parameters: int) -> None:
        model = _Small(blocks, extra_parameters).to(device)
        step = compile_train_step(model, torch.optim.AdamW(model.parameters(), fused=True), plan="none")
        batch = torch.randn(2, 16, _SMALL_WIDTH, device=device)
        step(batch)
        self._graph = step.prepare(batch)
        self.inputs = len(self._graph.placeholders)
        self.measured = math.inf
        self._run: Callable[[], Any] = functools.partial(step, batch)
        self._device = device

    def measure(self) -> None:
        """Keeps the least of medians over a few steps each."""
        seconds = []
        for _ in range(_STEPS):
            synchronize(self._device)
            start = time.perf_counter()
            self._run()
            synchronize(self._device)
            seconds.append(time.perf_counter() - start)
        self.measured = min(self.measured, statistics.median(seconds))

    def predicted(self, spec: HardwareSpec) -> float:
        """Seconds of the step's operators."""
        return sum(map(node_seconds(spec), self._graph.calls))


class _Small(nn.Module):
    def __init__(self, blocks: int, extra_parameters: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[_Block() for _ in range(blocks)])
        self.extra = nn.ParameterList(torch.zeros(_SMALL_WIDTH) for _ in range(extra_parameters))
        self.head = nn.Linear(_SMALL_WIDTH, _SMALL_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        for parameter in self.extra:
            x = x + parameter
        loss: Tensor = self.head(x).square().mean()
        return loss


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_SMALL_WIDTH) for _ in range(2))
        self.qkv = nn.Linear(_SMALL_WIDTH, 3 * _SMALL_WIDTH)
        self.out = nn.Linear(_SMALL_WIDTH, _SMALL_WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_SMALL_WIDTH, 64), nn.GELU(), nn.Linear(64, _SMALL_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        scores = (heads[0] @ heads[1].transpose(-2, -1) / 2.0).softmax(-1) @ heads[2]
        x = x + self.out(scores.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result
