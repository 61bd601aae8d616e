"""Which passes run, in which order, and the one place that runs, times, verifies and dumps them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, VerificationError
from ..graph import OutputRole, Phase, StepGraph
from ..graph.verifier import PhaseCalls, calls_by_phase, verify
from ..knobs import disabled_passes, dump_folder, verify_level
from .accumulate import Accumulate
from .average import Average
from .base import Pass, PassResult
from .clean import Clean
from .clip import Clip
from .clip_value import ClipValue
from .compact_masks import CompactMasks
from .fold import Fold
from .fp32_gradients import Fp32Gradients
from .grad_norm import GradNorm
from .host_scalars import HostScalars
from .loss_scale import ScaleLoss
from .recompute import Recompute
from .skip import Skip
from .skip_on_device import SkipOnDevice
from .spare_backward import SpareBackward
from .unscale import Unscale
from .update import Update

_ALL: tuple[type[Pass], ...] = (
    ScaleLoss, Clean, Fp32Gradients, Accumulate, SpareBackward, Unscale, Average, GradNorm, Clip, ClipValue, Skip, Update,
    SkipOnDevice, HostScalars, Fold, CompactMasks, Recompute,
)  # fmt: skip
PASSES: dict[str, type[Pass]] = {p.name: p for p in _ALL}


def backward_passes(
    *,
    scales_loss: bool = False,
    masters: frozenset[str] = frozenset(),
    accumulate: Accumulate | None = None,
    spares: bool = False,
) -> list[Pass]:
    """The passes up to the gradients, in order; all there are for a micro-batch that is not the last of its window."""
    passes: list[Pass] = [ScaleLoss(), Clean()] if scales_loss else [Clean()]
    if masters:
        passes.append(Fp32Gradients(keys=masters))
    if accumulate is not None:
        passes.append(accumulate)
    if spares:
        passes.append(SpareBackward())
    return passes


def training_passes(
    *,
    max_norm: float | None,
    nonfinite: str,
    update: StepGraph,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    error_if_nonfinite: bool = False,
    scales_loss: bool = False,
    masters: frozenset[str] = frozenset(),
    accumulate: Accumulate | None = None,
    has_backward: bool = True,
    for_compiler: bool = False,
    folds: bool = False,
    on_device: SkipOnDevice | None = None,
    spares: bool = False,
) -> list[Pass]:
    """The passes of a training step, in order.

    ``accumulate`` sums over a window of micro-batches; None where each batch is an update. Without
    ``has_backward``, the gradients are those of the window alone (:func:`flush_graph`). ``for_compiler`` is the fast tier:
    clip and update in a form that a compiler can fuse, rounded differently. So is ``folds``: see :class:`Fold`.
    ``on_device`` leaves updates out where they are, instead of at a gate. ``spares`` ends a step whose loss is not finite
    before its backward.
    """
    if has_backward:
        passes = backward_passes(scales_loss=scales_loss, masters=masters, accumulate=accumulate, spares=spares)
    else:
        passes = [accumulate] if accumulate is not None else []
    if scales_loss:
        passes.append(Unscale(separate=for_compiler))
    if accumulate is not None:
        passes.append(Average(separate=for_compiler))
    passes.append(GradNorm(norm_type=norm_type))
    if max_norm:
        passes.append(Clip(max_norm=float(max_norm), separate=for_compiler))
    if clip_value:
        passes.append(ClipValue(clip_value=float(clip_value), norm_type=norm_type, separate=for_compiler))
    if nonfinite != "ignore" and on_device is None:
        passes.append(Skip(norm_decides=bool(max_norm) or error_if_nonfinite))
    passes.append(Update(update=update, masters=masters))
    if on_device is not None:
        passes.append(on_device)
    if for_compiler:
        passes.append(HostScalars())
    if folds:
        passes.append(Fold(multiplies=for_compiler))
    return passes


@dataclass(frozen=True)
class PassRecord:
    """What one pass did in one run.

    Attributes:
        seconds: wall time of the pass itself.
        verify_seconds: wall time of the verifier after it.
        op_changes: difference in the number of calls, by operator, where there is one.
    """

    name: str
    seconds: float
    verify_seconds: float
    result: PassResult
    op_changes: dict[str, int]

    def __str__(self) -> str:
        changes = ", ".join(f"{op}: {delta:+d}" for op, delta in sorted(self.op_changes.items())) or "no change"
        return f"{self.name} ({self.seconds * 1e3:.1f} ms): {changes}"


def run_passes(
    graph: StepGraph, passes: Sequence[Pass], on_pass: Callable[[StepGraph, PassRecord], None] | None = None
) -> list[PassRecord]:
    """Runs ``passes`` on ``graph`` in place, verifying before the first and after each.

    Raises:
        VerificationError: the graph broke a rule, or a pass touched something else than it said.
        ConfigError: ``STEPGRAPH_DISABLE`` names a pass that does not exist or that is not optional.
    """
    disabled = _checked_disabled()
    level = verify_level()
    folder = _new_dump_folder()
    calls: dict[Phase, PhaseCalls] = {}
    if level:
        verify(graph, level=level)
        calls = calls_by_phase(graph)
    records = []
    for position, item in enumerate(p for p in passes if p.name not in disabled):
        _dump(folder, position, item.name, "before", graph)
        record, calls = _run_one(graph, item, level, calls)
        _dump(folder, position, item.name, "after", graph)
        records.append(record)
        if on_pass is not None:
            on_pass(graph, record)
    return records


def _run_one(
    graph: StepGraph, item: Pass, level: int, before: dict[Phase, PhaseCalls]
) -> tuple[PassRecord, dict[Phase, PhaseCalls]]:
    _require(graph, item.requires, f"pass {item.name!r} requires", "before it")
    ops_before = graph.op_counts()
    start = time.perf_counter()
    result = item.run(graph)
    seconds = time.perf_counter() - start
    _require(graph, item.guarantees, f"pass {item.name!r} guarantees", "after it")
    if result.intended != result.touched:
        raise VerificationError(
            f"pass {item.name!r} was meant to touch {result.intended} and touched {result.touched}: something was missed"
        )
    start = time.perf_counter()
    after = calls_by_phase(graph) if level else {}
    for phase in after:
        if phase not in item.touches and not before[phase].is_still(after[phase]):
            raise VerificationError(f"pass {item.name!r} changed the {phase} phase, which it did not say it would")
    if level:
        verify(graph, level=level)
    changes = graph.op_counts()
    changes.subtract(ops_before)
    record = PassRecord(
        item.name, seconds, time.perf_counter() - start, result, {op: n for op, n in changes.items() if n}
    )
    return record, after


def _require(graph: StepGraph, roles: Sequence[OutputRole], what: str, when: str) -> None:
    present = Counter(spec.role for spec in graph.outputs)
    if missing := [str(role) for role in roles if not present[role]]:
        raise VerificationError(f"{what} the outputs {missing}, which the graph does not have {when}")


def _checked_disabled() -> tuple[str, ...]:
    names = disabled_passes()
    for name in names:
        if name not in PASSES:
            raise ConfigError(f"STEPGRAPH_DISABLE names {name!r}; passes are {', '.join(PASSES)}")
        if not PASSES[name].optional:
            raise ConfigError(f"STEPGRAPH_DISABLE names {name!r}, without which the numbers would change")
    return names


def _new_dump_folder() -> Path | None:
    """A folder of its own for each run: a step is rewritten once for each form of its update, and for each capture."""
    if (parent := dump_folder()) is None:
        return None
    path = Path(parent)
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f"{sum(p.is_dir() for p in path.iterdir()):03d}"
    folder.mkdir()
    return folder


def _dump(folder: Path | None, position: int, name: str, when: str, graph: StepGraph) -> None:
    if folder is not None:
        (folder / f"{position:02d}_{name}_{when}.txt").write_text(f"{graph}\n")
