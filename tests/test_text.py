"""The text form of graphs, held against golden files.

Operators that torch decomposes a layer into differ between its versions. The first line of a golden file names the version that
it was written under: where torch is another one, two captures are compared with each other instead.
`pytest tests/test_text.py --update-golden` rewrites the files; the difference is then to be read, not only committed.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.graph import OutputRole, StepGraph, storages_of
from stepgraph.graph.step_graph import family_of
from stepgraph.graph.storage import storage_bytes
from stepgraph.graph.text import format_node, format_operand, target_name

from . import fixtures
from .graphs import subject

GOLDEN = Path(__file__).parent / "golden"
VERSION_LINE = re.compile(r"^# torch (\S+)$")


def graphs(make: Callable[[], fixtures.Fixture], optimizer: str, max_norm: float | None) -> dict[str, StepGraph]:
    """One step as captured, and as the passes leave it."""
    of = subject(make(), optimizer)
    return {"captured": of.step.graph, "rewritten": of.rewritten(max_norm)}


STEPS: dict[str, Callable[[], dict[str, StepGraph]]] = {
    "mlp_sgd": functools.partial(graphs, fixtures.mlp, "sgd", None),
    "drop_adamw_fused_clip": functools.partial(graphs, fixtures.drop, "adamw_fused", 1.0),
    "tied_sgd": functools.partial(graphs, fixtures.tied, "sgd", None),
    "bn_sgd": functools.partial(graphs, fixtures.bn, "sgd", None),
}
FORMS = ("captured", "rewritten")
CASES = [(name, form) for name in STEPS for form in FORMS]


@functools.cache
def graph_of(name: str, form: str) -> StepGraph:
    """A graph that tests read and do not change."""
    return STEPS[name]()[form]


def _release() -> str:
    """The part of torch's version that decides about operators: major and minor."""
    return ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize(("name", "form"), CASES)
def test_text_is_golden(name: str, form: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{name}_{form}.txt"
    text = str(graph_of(name, form))
    if request.config.getoption("--update-golden"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(f"# torch {_release()}\n{text}\n")
    version, _, golden = path.read_text().partition("\n")
    written_under = VERSION_LINE.match(version)
    assert written_under, f"{path.name} does not say which torch it was written under"
    if torch.__version__.startswith(written_under[1]):
        assert text + "\n" == golden
    else:
        assert text == str(STEPS[name]()[form])


def test_every_golden_file_is_of_a_test() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {f"{name}_{form}" for name, form in CASES}


@pytest.mark.parametrize(("name", "form"), CASES)
def test_text_does_not_depend_on_node_names(name: str, form: str) -> None:
    graph = graph_of(name, form).copy()
    before = str(graph)
    for number, node in enumerate(graph.graph.nodes):
        node.name = f"renamed_{len(graph.calls) - number + 1000}"
    assert str(graph) == before


@pytest.mark.parametrize("name", STEPS)
def test_two_captures_have_one_text(name: str) -> None:
    first, second = (STEPS[name]() for _ in range(2))
    for form in FORMS:
        assert str(first[form]) == str(second[form])


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_copy_has_the_same_text(name: str, form: str) -> None:
    graph = graph_of(name, form)
    assert str(graph.copy()) == str(graph)


def test_text_has_one_line_for_each_node_and_output() -> None:
    graph = graph_of("drop_adamw_fused_clip", "rewritten")
    lines = str(graph).splitlines()
    headers = [line for line in lines if not line.startswith("  ")]
    assert headers == ["inputs:", "forward:", "backward:", "norm:", "update:", "outputs:"]
    assert len(lines) - len(headers) == len(graph.placeholders) + len(graph.calls) + len(graph.outputs)


def test_text_shows_what_a_reader_looks_for() -> None:
    text = str(graph_of("tied_sgd", "captured"))
    assert "param embedding.weight = head.weight" in text, "all names of a tied parameter"
    assert "| loss" in text
    text = str(graph_of("drop_adamw_fused_clip", "rewritten"))
    assert "0.body.2/bernoulli_#0@forward, region 0" in text, "the checkpointed region"
    assert "| hyper group.0.lr" in text
    assert "| state 1.weight/exp_avg" in text
    assert Path(__file__).parent.name + "/" not in text, "source files are no part of the text"


def test_text_changes_with_the_graph() -> None:
    graph = graph_of("mlp_sgd", "captured").copy()
    before = str(graph)
    tanh = next(n for n in graph.calls if family_of(n.target) == "tanh")
    tanh.args = (graph.placeholders[4],)
    assert str(graph) != before


def test_bytes_of_a_view_are_those_of_its_base() -> None:
    graph = graph_of("mlp_sgd", "captured")
    view = next(n for n in graph.calls if family_of(n.target) == "t")
    assert storages_of(view) == storages_of(view.args[0])  # type: ignore[arg-type]
    assert storage_bytes(view) == 16 * 8 * 4
    assert "512 B" in format_node(view, {n: n.name for n in graph.graph.nodes})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1.0, "1.0"),
        (1, "1"),
        (True, "True"),
        ([1, [2.5]], "[1, [2.5]]"),
        ((1, 2), "[1, 2]"),
        (torch.bfloat16, "bf16"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_operands(value: Any, text: str) -> None:
    assert format_operand(value, {}) == text


def test_names_of_targets() -> None:
    assert target_name(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert target_name(operator.getitem) == "getitem"
    assert target_name(operator.neg) == "python.neg"


def test_node_is_found_by_the_key_in_the_text() -> None:
    graph = graph_of("mlp_sgd", "rewritten")
    node = graph.node_by_key("1/tanh#0@forward")
    assert family_of(node.target) == "tanh"
    assert graph.node_by_key("1/tanh#0@forward f32[6,16]") is node
    with pytest.raises(KeyError, match="1/tanh#1@forward"):
        graph.node_by_key("1/tanh#1@forward")
    assert graph.output_of(OutputRole.LOSS) is graph.node_by_key("(root)/mse_loss#0@forward")
