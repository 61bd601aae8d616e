"""The runner holds passes to what they say, and the knobs change what it checks, writes and leaves out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import stepgraph as sg
from stepgraph import knobs
from stepgraph.device import keep_freed_memory
from stepgraph.errors import ConfigError, VerificationError
from stepgraph.graph import OutputRole, Phase, StepGraph, family_of
from stepgraph.graph.verifier import verify
from stepgraph.passes import PASSES, Pass, PassRecord, PassResult, run_passes, training_passes
from stepgraph.passes.clean import Clean
from stepgraph.runtime.calibrated import calibration_path

from . import fixtures, oracle
from .graphs import assert_same_run, families, of_fixture, run

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("no_knobs")


# The runner.


@dataclasses.dataclass(frozen=True)
class Hollow(Pass):
    """Does nothing; tests change what it says it does."""

    name: ClassVar[str] = "hollow"

    def run(self, graph: StepGraph) -> PassResult:
        return PassResult(changed=False)


def _pass_that(run: Callable[[StepGraph], PassResult | None], **declared: Any) -> Pass:
    def call(self: Pass, graph: StepGraph) -> PassResult:
        return run(graph) or PassResult(changed=True)

    return type("Made", (Hollow,), {"run": call, "name": "made", **declared})()


def test_runner_reports_each_pass() -> None:
    of = of_fixture("MLP")
    seen: list[tuple[int, PassRecord]] = []
    graph = of.graph
    passes = training_passes(max_norm=1.0, nonfinite="skip", update=of.update.graph)
    records = run_passes(graph, passes, on_pass=lambda g, record: seen.append((len(g.calls), record)))
    assert [r.name for r in records] == [p.name for p in passes]
    assert [r for _, r in seen] == records
    assert seen[-1][0] == len(graph.calls)
    assert all(r.seconds > 0 for r in records)
    assert all(r.verify_seconds > 0 for r in records)
    clean, norm, clip, skip, update = records
    assert clean.op_changes == {"aten.detach.default": -3}
    assert norm.op_changes["aten._foreach_norm.Scalar"] == 1
    assert clip.op_changes["aten._foreach_mul_.Tensor"] == 1
    assert skip.op_changes == {"stepgraph.gate.default": 1, "stepgraph.nonfinite_code.default": 1}
    assert sum(update.op_changes.values()) == len(of.update.graph.calls)
    assert "aten._foreach_norm.Scalar: +1" in str(norm)
    assert str(norm).startswith("grad_norm (")


def test_runner_reports_no_change() -> None:
    (record,) = run_passes(of_fixture("MLP").graph, [Hollow()])
    assert record.op_changes == {}
    assert str(record).endswith("no change")


def test_required_output_that_is_missing() -> None:
    item = _pass_that(lambda graph: None, requires=(OutputRole.CLIP_FACTOR,))
    with pytest.raises(VerificationError, match=r"'made' requires the outputs \['clip_factor'\].*before it"):
        run_passes(of_fixture("MLP").graph, [item])


def test_guaranteed_output_that_is_missing() -> None:
    item = _pass_that(lambda graph: None, guarantees=(OutputRole.NORM,))
    with pytest.raises(VerificationError, match=r"'made' guarantees the outputs \['norm'\].*after it"):
        run_passes(of_fixture("MLP").graph, [item])


@pytest.mark.parametrize("touched", [{"gradients": 3}, {}, {"gradients": 4, "losses": 1}])
def test_pass_that_misses_something(touched: dict[str, int]) -> None:
    item = _pass_that(lambda graph: PassResult(True, intended={"gradients": 4}, touched=touched))
    with pytest.raises(VerificationError, match="'made' was meant to touch .*something was missed"):
        run_passes(of_fixture("MLP").graph, [item])


def _negates_in(phase: Phase) -> Callable[[StepGraph], None]:
    def run(graph: StepGraph) -> None:
        node = next(n for n in graph.calls if n.meta["phase"] is phase)
        with graph.graph.inserting_before(node):
            graph.add_call(aten.neg.default, (graph.placeholders[0],), module="added", phase=phase)

    return run


def _swaps_an_operand(graph: StepGraph) -> None:
    node = next(n for n in graph.calls if family_of(n.target) == "mse_loss")
    node.args = (node.args[1], node.args[0])


def _changes_a_constant(graph: StepGraph) -> None:
    node = next(n for n in graph.calls if family_of(n.target) == "mse_loss_backward")
    node.args = (*node.args[:3], 2)


def _changes_a_keyword(graph: StepGraph) -> None:
    node = next(n for n in graph.calls if family_of(n.target) == "ones_like")
    node.kwargs = {**node.kwargs, "memory_format": torch.contiguous_format}


def _moves_a_node(graph: StepGraph) -> None:
    first, second = [n for n in graph.calls if family_of(n.target) == "t" and n.meta["phase"] is Phase.FORWARD]
    first.prepend(second)


@pytest.mark.parametrize(
    ("touches", "phase", "change"),
    [
        ({Phase.BACKWARD}, Phase.FORWARD, _negates_in(Phase.FORWARD)),
        ({Phase.FORWARD}, Phase.BACKWARD, _negates_in(Phase.BACKWARD)),
        ({Phase.BACKWARD}, Phase.FORWARD, _swaps_an_operand),
        ({Phase.FORWARD}, Phase.BACKWARD, _changes_a_constant),
        ({Phase.FORWARD}, Phase.BACKWARD, _changes_a_keyword),
        ({Phase.BACKWARD}, Phase.FORWARD, _moves_a_node),
    ],
)
def test_pass_that_changes_another_phase_than_it_says(
    touches: set[Phase], phase: Phase, change: Callable[[StepGraph], None]
) -> None:
    of = of_fixture("MLP")
    with pytest.raises(VerificationError, match=f"'made' changed the {phase} phase, which it did not say"):
        run_passes(of.graph, [_pass_that(change, touches=frozenset(touches))])
    (record,) = run_passes(of.graph, [_pass_that(change, touches=frozenset({phase}))])
    assert record.result.changed, "the same change is fine where it is declared"


def test_pass_that_breaks_a_rule() -> None:
    def breaks(graph: StepGraph) -> None:
        next(n for n in graph.calls if family_of(n.target) == "tanh").target = aten.sin.default

    item = _pass_that(breaks, touches=frozenset(Phase))
    with pytest.raises(VerificationError, match="metadata"):
        run_passes(of_fixture("MLP").graph, [item])


def test_graph_that_breaks_a_rule_before_any_pass() -> None:
    graph = of_fixture("MLP").graph
    next(n for n in graph.calls if family_of(n.target) == "tanh").target = aten.sin.default
    with pytest.raises(VerificationError, match="metadata"):
        run_passes(graph, [])


# Knobs.


def _prepared(nonfinite: str = "skip") -> sg.TrainStep:
    model, batch, loss_fn = fixtures.mlp()
    step = sg.compile_train_step(
        model, oracle.OPTIMIZERS["sgd"](model.parameters()), loss_fn=loss_fn, nonfinite=nonfinite
    )
    step.prepare(batch)
    return step


def test_disable_leaves_an_optional_pass_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of = of_fixture("MLP")
    full = of.rewritten()
    monkeypatch.setenv("STEPGRAPH_DISABLE", " clean ,")
    graph = of.rewritten()
    assert "detach" in families(graph, Phase.BACKWARD)
    assert "detach" not in families(full, Phase.BACKWARD)
    assert_same_run(run(full, of), run(graph, of))
    assert "detach" in families(_prepared().graph, Phase.BACKWARD)


@pytest.mark.parametrize("name", [name for name, item in PASSES.items() if not item.optional])
def test_disable_refuses_a_pass_that_numbers_depend_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_DISABLE", f"clean,{name}")
    with pytest.raises(ConfigError, match=f"{name}.*numbers would change"):
        run_passes(of_fixture("MLP").graph, [Clean()])


def test_disable_refuses_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_DISABLE", "cleen")
    with pytest.raises(
        ConfigError, match="cleen.*passes are loss_scale, clean, .*grad_norm, clip, clip_value, skip, update"
    ):
        _prepared()


def test_dump_writes_the_graph_before_and_after_each_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on_demand"
    monkeypatch.setenv("STEPGRAPH_DUMP", str(folder))
    step = _prepared()
    names = ["clean", "grad_norm", "skip", "update"]
    folder = folder / "000"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{i:02d}_{name}_{when}.txt" for i, name in enumerate(names) for when in ("before", "after")
    )
    texts = {path.stem: path.read_text() for path in folder.iterdir()}
    assert "detach" in texts["00_clean_before"]
    assert "detach" not in texts["00_clean_after"]
    assert texts["00_clean_after"] == texts["01_grad_norm_before"]
    assert texts["03_update_after"] == f"{step.graph}\n"


def test_without_dump_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPGRAPH_DUMP", "")
    _prepared()
    assert not list(tmp_path.iterdir())


def _mislabelled(graph: StepGraph) -> StepGraph:
    """Breaks a rule that is checked at level 1."""
    next(n for n in graph.calls if family_of(n.target) == "tanh").target = aten.sin.default
    return graph


def _misdescribed(graph: StepGraph) -> StepGraph:
    """Breaks the rule that is checked at level 2 only: the sum would have another shape."""
    node = next(n for n in graph.calls if family_of(n.target) == "sum")
    node.args = (node.args[0], [1], True)
    return graph


@pytest.mark.parametrize(
    ("level", "corrupt", "is_noticed"),
    [
        ("0", _mislabelled, False),
        ("1", _mislabelled, True),
        ("2", _mislabelled, True),
        (None, _mislabelled, True),
        ("1", _misdescribed, False),
        (None, _misdescribed, False),
        ("2", _misdescribed, True),
    ],
)
def test_verify_levels(
    level: str | None, corrupt: Callable[[StepGraph], StepGraph], is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level is not None:
        monkeypatch.setenv("STEPGRAPH_VERIFY", level)
    graph = corrupt(of_fixture("MLP").graph)
    if is_noticed:
        with pytest.raises(VerificationError):
            run_passes(graph, [Hollow()])
    else:
        assert len(run_passes(graph, [Hollow()])) == 1


def test_verify_0_skips_the_check_of_other_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    item = _pass_that(_negates_in(Phase.FORWARD), touches=frozenset({Phase.BACKWARD}))
    monkeypatch.setenv("STEPGRAPH_VERIFY", "0")
    (record,) = run_passes(of_fixture("MLP").graph, [item])
    assert record.result.changed


@pytest.mark.parametrize("text", ["3", "-1", "yes", "", "1.0"])
def test_verify_refuses_other_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_VERIFY", text)
    with pytest.raises(ConfigError, match="STEPGRAPH_VERIFY must be 0, 1 or 2"):
        _prepared()


def _verify_changes_what_is_noticed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    broken = _mislabelled(of_fixture("MLP").graph)
    monkeypatch.setenv("STEPGRAPH_VERIFY", "0")
    run_passes(broken, [])
    monkeypatch.setenv("STEPGRAPH_VERIFY", "1")
    with pytest.raises(VerificationError):
        run_passes(broken, [])
    return True


def _dump_changes_what_is_written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    _prepared()
    before = list(folder.iterdir())
    monkeypatch.setenv("STEPGRAPH_DUMP", str(folder))
    _prepared()
    return list(folder.iterdir()) != before


def _disable_changes_the_graph(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    before = str(_prepared().graph)
    monkeypatch.setenv("STEPGRAPH_DISABLE", "clean")
    return str(_prepared().graph) != before


def _rank_changes_who_writes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    written = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        model = nn.Linear(2, 2)
        path = folder / f"{rank}.csv"
        step = sg.compile_train_step(
            model, torch.optim.SGD(model.parameters()), loss_fn=lambda m, x: m(x).sum(), log=path
        )
        step(torch.ones(1, 2))
        written.append(path.exists())
    return written == [True, False]


def _keep_heap_changes_the_allocator(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    kept = keep_freed_memory.__wrapped__()
    monkeypatch.setenv("STEPGRAPH_KEEP_HEAP", "0")
    return bool(kept) and not keep_freed_memory.__wrapped__()


def _cache_changes_where_calibrations_are(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    monkeypatch.setenv("STEPGRAPH_CACHE", str(folder))
    return folder in calibration_path(torch.device("cpu")).parents


def _xdg_changes_where_calibrations_are(monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    monkeypatch.delenv("STEPGRAPH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "stepgraph" in calibration_path(torch.device("cpu")).parents


KNOB_EFFECTS: dict[str, Callable[[pytest.MonkeyPatch, Path], bool]] = {
    "STEPGRAPH_VERIFY": _verify_changes_what_is_noticed,
    "STEPGRAPH_DUMP": _dump_changes_what_is_written,
    "STEPGRAPH_DISABLE": _disable_changes_the_graph,
    "STEPGRAPH_KEEP_HEAP": _keep_heap_changes_the_allocator,
    "STEPGRAPH_CACHE": _cache_changes_where_calibrations_are,
    "XDG_CACHE_HOME": _xdg_changes_where_calibrations_are,
    "RANK": _rank_changes_who_writes,
}


@pytest.mark.parametrize("name", knobs.KNOBS)
def test_every_knob_changes_something(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert KNOB_EFFECTS[name](monkeypatch, tmp_path)


def test_every_variable_that_is_read_is_a_listed_knob() -> None:
    root = Path(inspect.getfile(sg)).parent
    folders = [root, *(path.parent for path in root.glob("*/__init__.py"))]
    sources = {path: path.read_text() for folder in folders for path in folder.glob("*.py")}
    readers = {path.name for path, text in sources.items() if "os.environ" in text or "getenv" in text}
    assert readers == {"knobs.py"}


def test_whole_step_passes_level_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_VERIFY", "2")
    graph = _prepared().graph
    verify(graph, level=2)
    assert graph.output_of(OutputRole.NONFINITE) is not None
