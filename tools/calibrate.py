"""Measures what this machine can do, once, and keeps it for every later plan."""

from __future__ import annotations

import itertools
import math
import operator
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..device import autocast_off, describe, keep_freed_memory, memory_bytes, synchronize
from ..graph import tensors_in
from ..graph.ops import KERNELS
from ..planner import HardwareSpec, Table
from ..runtime.calibrated import built_in_spec, calibration_path
from .calibration_samples import Call, Sample, samples, work_of_call
from .undisturbed import Control
from .whole_steps import WholeSteps

_FULL_PASSES = 2  # a machine can be slow for a while in one kind of operator, and not in what watches for that
_PASSES = 7  # at most; beyond the full ones, a pass repeats what was disturbed in all before it
_BATCHES = 3  # in a pass
_BATCH_SECONDS = 3e-4
_LONG_SECONDS = 0.02  # a batch beyond this is repeated once; larger sizes of the same operator follow from this one
_MOST_CALLS = 100  # in a batch
_RING_BYTES, _RING_MOST = 2**25, 64  # of operands, and of results
_DISK_BYTES = 2**25


def calibrate(
    device: torch.device, progress: Callable[[int, int, str], None] = lambda done, of, name: None
) -> HardwareSpec:
    """Measures operators of training steps at several sizes each, and keeps the result for this machine.

    Everything is measured twice, some time apart, and what was disturbed again in later passes. The least counts: what a
    machine does when nothing else does.

    Args:
        progress: is told how many measurements are done, of how many, and what comes next.
    """
    keep_freed_memory()
    steps = WholeSteps(device)
    steps.measure()
    left = list(samples(device))
    done, of = 0, len(left) * _FULL_PASSES
    points: dict[str, dict[tuple[float, ...], float]] = defaultdict(dict)
    view_seconds = python_seconds = math.inf
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), autocast_off():
        control = Control(device)
        settled: set[Sample] = set()
        for number in range(_PASSES):
            measured = []
            for sample in left:
                progress(min(done, of - 1), of, sample.table)
                done += 1
                found = points[sample.table]
                if number == 0 and sample.sizes is None and max(found.values(), default=0.0) > _LONG_SECONDS:
                    done += _FULL_PASSES - 1
                    continue
                sizes, measure = _sizes_and_measure(sample, device)
                seconds, is_undisturbed = control.watch(measure)
                found[sizes] = min(seconds, found.get(sizes, math.inf))
                measured.append(sample)
                if is_undisturbed:
                    settled.add(sample)
            view_seconds = min(view_seconds, statistics.mean(_seconds(call, device) for call in _views(device)))
            python_seconds = min(python_seconds, _seconds((operator.getitem, ((0, 1), 1)), device))
            left = measured if number + 1 < _FULL_PASSES else [s for s in measured if s not in settled]
    progress(of, of, "")
    tables = {name: _table(found) for name, found in points.items()}
    path = calibration_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk = _disk_rate(path.parent)
    spec = _spec(device, tables, view_seconds=view_seconds, python_seconds=python_seconds, disk=disk)
    steps.measure()
    spec = steps.told(spec)
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
        attention_flops={dtype: 1e9 / tables[f"attention:{dtype}"].at(1e9 / 4, 4) for dtype in matmul},
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


def _sizes_and_measure(sample: Sample, device: torch.device) -> tuple[tuple[float, ...], Callable[[], float]]:
    """Where in its table a sample belongs, and what measures the seconds there."""
    calls = sample.calls()
    sizes, times = sample.sizes, 1.0
    if sizes is None:
        target, args = calls[0]
        work = work_of_call(target, args, target(*args))
        sizes, times = work.sizes, work.times
    return sizes, lambda: statistics.mean(_seconds(call, device) for call in calls) / times


def _table(points: dict[tuple[float, ...], float]) -> Table:
    axes = tuple(tuple(sorted({sizes[i] for sizes in points})) for i in range(len(next(iter(points)))))
    return Table(axes, tuple(points[sizes] for sizes in itertools.product(*axes)))


def _seconds(call: Call, device: torch.device) -> float:
    """Of one call: the least over batches of calls, after one to warm up.

    Operators of a step read what was just made as often as what was made long ago, and it keeps much of their results: half of
    the operands and all new memory are in no cache. So operands take turns here, each twice in succession, and the last results
    stay.
    """
    target: Any = KERNELS.get(call[0], call[0])
    operands = itertools.cycle([args for args in _copies(call[1]) for _ in range(2)])
    kept: deque[Any] = deque(maxlen=_ring(target(*next(operands))))
    count, seconds = 1, _batch_seconds(target, operands, 1, kept, device)
    while count < _MOST_CALLS and seconds * count < _BATCH_SECONDS:
        count *= 4
        seconds = _batch_seconds(target, operands, count, kept, device)
    batches = _BATCHES if seconds * count < _LONG_SECONDS else 1
    return min(seconds, *(_batch_seconds(target, operands, count, kept, device) for _ in range(batches)))


def _batch_seconds(
    target: Any, operands: Iterator[tuple[Any, ...]], count: int, kept: deque[Any], device: torch.device
) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        kept.append(target(*next(operands)))
    synchronize(device)
    return (time.perf_counter() - start) / count


def _ring(values: Any) -> int:
    """How many of such values together are in no cache."""
    return max(min(_RING_BYTES // max(sum(t.nbytes for t in tensors_in(values)), 1), _RING_MOST), 1)


def _copies(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments, and copies of them in other memory, laid out alike."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
        return [copied(v) for v in value] if isinstance(value, list) else value

    return [args, *[tuple(map(copied, args)) for _ in range(_ring(args) - 1)]]


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
