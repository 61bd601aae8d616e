"""What only a GPU can show, in one run of a few minutes; writes docs/gpu.md.

1. Bitwise: every preset trains three steps on CUDA, eager and compiled, under deterministic kernels, and must agree.
2. Waiting: whether a step under clipping ever waits for the device.
3. Step time against eager and ``torch.compile`` with the same fused AdamW, on a Llama-shaped model.
4. The fast tier's compiled region as a CUDA graph: captured once, replayed, with eager's results.

Each part says what it saw; a part that fails does not keep the others from running. ``make gpu-check`` runs it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products; before CUDA starts

import torch
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.graph import StorageMap
from stepgraph.runtime import Region, regions_of
from stepgraph.tools.presets import PRESETS, preset_parts
from stepgraph.tools.undisturbed import call_seconds

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
STEPS = 3
BUDGET_SECONDS = 360.0


def to_device(value: Any, device: str) -> Any:
    """Moves the tensors of a batch."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return type(value)(to_device(item, device) for item in value)


def loss_of(model: nn.Module, batch: Any, criterion: Callable[..., Tensor] | None) -> Tensor:
    """The loss as ``compile_train_step`` takes it."""
    if criterion is not None:
        inputs, targets = batch
        return criterion(model(inputs), targets)
    loss: Tensor = model(**batch).loss
    return loss


def trained(name: str, device: str, *, compiled: bool) -> tuple[list[Tensor], nn.Module]:
    """Losses of a few steps of a preset, and the model afterwards."""
    model, _, batch, options = preset_parts(name)
    model.to(device)
    batch = to_device(batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    torch.manual_seed(0)
    losses = []
    step = sg.compile_train_step(model, optimizer, **options) if compiled else None
    for _ in range(STEPS):
        if step is not None:
            losses.append(step(batch).loss)
            continue
        loss = loss_of(model, batch, options.get("criterion"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return losses, model


def bitwise(device: str, names: list[str]) -> list[str]:
    """One line for each preset."""
    lines = []
    for name in names:
        try:
            (eager_losses, eager), (losses, model) = (trained(name, device, compiled=c) for c in (False, True))
            same = all(torch.equal(a, b) for a, b in zip(eager_losses, losses, strict=True))
            pairs = zip(eager.named_parameters(), model.parameters(), strict=True)
            different = [key for (key, a), b in pairs if not torch.equal(a, b)]
            verdict = (
                "bitwise equal" if same and not different else f"differs: {', '.join(different[:3]) or 'the loss'}"
            )
        except Exception as error:
            verdict = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        lines.append(f"| {name} | {verdict} |")
        print(lines[-1], flush=True)
    return ["| preset | three steps against eager |", "|---|---|", *lines]


def seconds_per_step(step: Callable[[], Any], device: str, calls: int) -> float:
    """Median over calls, each waited for."""
    for _ in range(3):
        step()
    return statistics.median(call_seconds(step, torch.device(device)) for _ in range(calls))


def step_times(device: str, name: str, calls: int) -> list[str]:
    """Median milliseconds of each way to take a step, one after the other."""
    rows = []
    ways: dict[str, dict[str, Any] | bool] = {
        "eager": False,
        "torch.compile": True,
        "stepgraph, exact": {},
        "stepgraph, exact, inductor": {"lowering": "inductor"},
        "stepgraph, fast": {"numerics": "fast"},
    }
    for way, options in ways.items():
        try:
            rows.append(f"| {way} | {seconds_per_step(_stepper(device, name, options), device, calls) * 1e3:.2f} |")
        except Exception as error:
            rows.append(f"| {way} | failed: {type(error).__name__}: {str(error).splitlines()[0]} |")
        print(rows[-1], flush=True)
    return [f"| step of {name} | ms |", "|---|---|", *rows]


def _stepper(device: str, name: str, way: dict[str, Any] | bool) -> Callable[[], Any]:
    model, _, batch, options = preset_parts(name)
    model.to(device)
    batch = to_device(batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if isinstance(way, dict):
        step = sg.compile_train_step(model, optimizer, **{**options, **way})
        return lambda: step(batch)
    forward = torch.compile(model) if way else model

    def by_hand() -> None:
        loss_of(forward, batch, options.get("criterion")).backward()  # type: ignore[arg-type]
        torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return by_hand


def cuda_graph(device: str, name: str) -> list[str]:
    """Captures the largest compiled region of a static step as a CUDA graph and compares a replay with a plain run."""
    model, _, batch, options = preset_parts(name)
    model.to(device).eval()  # without draws, so that a replay can be compared
    batch = to_device(batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    step = sg.compile_train_step(model, optimizer, **options, numerics="fast")
    run, inputs, operators = largest_region(step, batch)
    with torch.no_grad():
        expected = [t.clone() for t in run(*inputs)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            outputs = run(*inputs)
        captured.replay()
        torch.cuda.synchronize()
    equal = all(torch.equal(a, b) for a, b in zip(expected, outputs, strict=True))
    plain = seconds_per_step(lambda: run(*inputs), device, 30)
    replayed = seconds_per_step(captured.replay, device, 30)
    verdict = "gives the same bits" if equal else "differs from a plain run"
    size = f"{operators} operators, {len(inputs)} inputs"
    times = f"{plain * 1e3:.2f} ms plain, {replayed * 1e3:.2f} ms replayed"
    return [f"Forward and backward of {name} ({size}) as one CUDA graph: a replay {verdict}; {times}."]


def largest_region(step: sg.TrainStep, batch: Any) -> tuple[Callable[..., Any], list[Any], int]:
    """The largest compiled region of a step that has none before it, with its inputs and its number of operators."""
    step(batch)
    compiled, variant, flat = step._captures.find(batch)
    graph = variant.graph
    region = max(
        (p for p in regions_of(graph, compiles_update=False) if isinstance(p, Region)), key=lambda r: len(r.nodes)
    )
    values = dict(zip(graph.placeholders, compiled.inputs(variant, flat), strict=True))
    identity = region.identity(StorageMap(graph.graph).is_written)
    return compiled._regions[identity], [values[n] for n in region.inputs], len(region.nodes)


def without_waiting(device: str) -> list[str]:
    """Steady steps under clipping, with torch told to raise where it waits for the device."""
    rows = []
    for precision in ("fp32", "bf16", "fp16"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = sg.compile_train_step(model, optimizer, criterion=nn.MSELoss(), precision=precision, max_norm=1.0)
        batch = (torch.randn(8, 64, device=device), torch.randn(8, 64, device=device))
        results = [step(batch) for _ in range(4)]
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            results += [step(batch) for _ in range(6)]
            waits = "never" if len(step._outcomes) else "for the gate, whose reading is cheap here"
        except RuntimeError as error:
            waits = f"yes: {str(error).splitlines()[0]}"
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        rows.append(f"| {precision} | {waits} | {sum(r.applied for r in results)} of {len(results)} |")
        print(rows[-1], flush=True)
    return ["| precision | does a step wait for the device | updates applied |", "|---|---|---|", *rows]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the script itself")
    parser.add_argument("--presets", nargs="+", default=[p for p in PRESETS if p != "gpt2"], choices=PRESETS)
    parser.add_argument("--timed", default="gpt2", choices=PRESETS, help="preset whose step is timed (%(default)s)")
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; nothing was checked", file=sys.stderr)
        return 1
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    where = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU, to try the script"
    parts: dict[str, Callable[[], list[str]]] = {
        "Bitwise": lambda: bitwise(args.device, args.presets),
        "Waiting": lambda: without_waiting(args.device),
        "Step time": lambda: step_times(args.device, args.timed, args.calls),
    }
    if args.device == "cuda":
        parts["CUDA graph"] = lambda: cuda_graph(args.device, "llama-tiny")
    page = ["# On a GPU", "", f"Written by `make gpu-check` on {where}, torch {torch.__version__}.", ""]
    start = time.perf_counter()
    for title, part in parts.items():
        page += [f"## {title}", ""]
        if time.perf_counter() - start > BUDGET_SECONDS:
            page += ["Not run: the six minutes were over.", ""]
            continue
        try:
            page += [*part(), ""]
        except Exception as error:
            traceback.print_exc()
            page += [f"Failed: {type(error).__name__}: {error}", ""]
    args.out.write_text("\n".join(page))
    print(f"wrote {args.out} after {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
