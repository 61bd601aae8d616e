"""What a step tells about a capture: its operators, what the passes did, the update, precision, notes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..capture import CapturedUpdate
from ..graph import HALF_DTYPES, InputRole
from .compiled import CompiledBatch, Variant


def describe_compiled(number: int, compiled: CompiledBatch) -> Iterator[str]:
    """Lines about a capture and the variant of it that ran last."""
    if not compiled.variants:
        yield f"capture {number}: {', '.join(compiled.batch)} ({compiled.capture_seconds:.1f} s), no update yet"
        return
    variant = compiled.variants[0]
    counts = ", ".join(f"{n} {phase}" for phase, n in variant.graph.op_counts_by_phase().items())
    yield f"capture {number}: {', '.join(compiled.batch)} ({compiled.capture_seconds:.1f} s)"
    yield f"  {counts} operators"
    for record in variant.records:
        yield f"  pass {record}"
    yield f"  {_describe_update(variant.update)}"
    for line in _describe_precision(compiled, variant):
        yield f"  {line}"
    for note in compiled.step.notes:
        yield f"  note: {note}"


def _describe_update(update: CapturedUpdate) -> str:
    if update.opaque_reason:
        return f"the update is one call of the optimizer's own step(), since {update.opaque_reason}"
    guards = ", ".join(map(str, update.guards))
    return f"update holds while {guards}" if guards else "update holds for all hyperparameters"


def _describe_precision(compiled: CompiledBatch, variant: Variant) -> Iterator[str]:
    scaler = compiled.state.scaler
    if scaler is not None:
        yield f"the loss is scaled by {scaler.value:g}, {scaler.policy or 'which never changes'}"
    params = [n.meta["val"] for n in variant.graph.input_nodes(InputRole.PARAM).values()]
    held = [p for p in params if isinstance(p, torch.Tensor) and p.dtype in HALF_DTYPES]
    masters = len(variant.graph.input_nodes(InputRole.MASTER))
    if held:
        yield f"{len(held)} parameters are held in 16 bit; {masters} of them are updated through float32 masters"
