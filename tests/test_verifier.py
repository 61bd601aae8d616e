"""The verifier passes valid graphs, and each of its rules rejects by name the graphs that were corrupted against it."""

from __future__ import annotations

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from stepgraph.errors import VerificationError
from stepgraph.graph import OutputRole, OutputSpec, Phase, StepGraph
from stepgraph.graph.verifier import RULES, metadata_matches_operators, verify

from . import (  # noqa: F401 (they register mutants)
    mutants_deferred,
    mutants_effects,
    mutants_folded,
    mutants_gradients,
    mutants_repeats,
)
from .mutants import MODELS, MUTANTS, Graphs, Mutant, call, captured_gradients, graphs_of, rekey
from .mutants_structure import wrong_dtype_of_a_result

ALL_RULES = (*RULES, metadata_matches_operators)
CASES = [pytest.param(rule, m, id=f"{rule}-{m.mutate.__name__}") for rule, ms in MUTANTS.items() for m in ms]


@pytest.mark.parametrize(("rule", "mutation"), CASES)
def test_rule_rejects_the_mutant(rule: str, mutation: Mutant) -> None:
    graph: StepGraph = getattr(graphs_of(mutation.model), mutation.form).copy()
    level = 2 if rule == metadata_matches_operators.__name__ else 1
    verify(graph, level=level)
    expected = mutation.mutate(graph)
    with pytest.raises(VerificationError) as error:
        verify(graph, level=level)
    lines = [line for line in str(error.value).splitlines() if line.strip().startswith(f"{rule}: ")]
    assert any(expected in line for line in lines), f"expected {rule}: ...{expected}..., got\n{error.value}"


@pytest.mark.parametrize("rule", [rule.__name__ for rule in ALL_RULES])
def test_every_rule_has_mutants(rule: str) -> None:
    assert MUTANTS[rule], f"no graph is corrupted so that {rule} rejects it"


def test_every_mutant_is_of_a_rule() -> None:
    assert MUTANTS.keys() == {rule.__name__ for rule in ALL_RULES}


@pytest.mark.parametrize("form", Graphs._fields)
@pytest.mark.parametrize("name", MODELS)
def test_valid_graphs_pass_at_level_2(name: str, form: str) -> None:
    graph = getattr(graphs_of(name), form)
    verify(graph, level=2)
    assert graph.calls, "an empty graph breaks no rule"
    assert (graph.output_of(OutputRole.CLIP_FACTOR) is not None) == (
        form in ("clipped", "scaled", "last", "folded", "folded_kernels", "deferred", "spared", "recomputed")
    )


def test_level_1_does_not_evaluate_operators() -> None:
    graph = graphs_of("MLP").clipped.copy()
    wrong_dtype_of_a_result(graph)
    verify(graph, level=1)
    with pytest.raises(VerificationError, match="metadata_matches_operators"):
        verify(graph, level=2)


def test_verification_changes_nothing() -> None:
    graph = graphs_of("DROP").clipped
    before, random_state = str(graph), torch.get_rng_state()
    verify(graph, level=2)
    assert str(graph) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_broken_foundation_hides_what_depends_on_it() -> None:
    graph = graphs_of("MLP").clipped.copy()
    del call(graph, "tanh", Phase.FORWARD).meta["phase"]  # other rules read it and would crash
    with pytest.raises(VerificationError, match=r"^1 violations") as error:
        verify(graph)
    assert "metadata" in str(error.value)


def test_all_violations_are_counted_and_the_first_ten_shown() -> None:
    graph = graphs_of("MLP").clipped.copy()
    for node in graph.calls[:15]:
        rekey(node, dtype="none")
    with pytest.raises(VerificationError, match=r"^15 violations") as error:
        verify(graph)
    assert str(error.value).count("does not describe") == 10


def test_gradient_outputs_are_required_to_be_their_own_before_any_pass() -> None:
    graph = graphs_of("TIED").captured.copy()
    grads = captured_gradients(graph)
    assert [spec for spec in graph.outputs if spec.role is OutputRole.GRAD] == [
        OutputSpec(OutputRole.GRAD, "embedding.weight")
    ], "a tied parameter has one gradient"
    assert len(grads) == 1


def test_strides_that_torch_cached_under_its_python_dispatcher_are_no_difference() -> None:
    """A stride of a dimension of length 1 depends on what else ran in the process."""
    graph = graphs_of("BN").captured
    expanded = next(
        n for n in graph.calls if n.target is torch.ops.aten.expand.default and n.meta["val"].shape[-1] == 1
    )
    FakeTensorMode.cache_clear()
    try:
        with graph.fake_mode, enable_python_dispatcher(), torch.no_grad():
            (operand,) = expanded.all_input_nodes
            polluted = expanded.target(operand.meta["val"], expanded.args[1])
        assert polluted.stride() != expanded.meta["val"].stride(), "torch tells them apart no more: the test can go"
        verify(graph, level=2)
    finally:
        FakeTensorMode.cache_clear()
