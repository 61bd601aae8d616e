"""The effects table held against what operators really do.

Graphs of real models run node by node on real tensors. What the table calls free of writes must change no operand, what it
calls not random must leave the random state alone, and what it claims to write or draw must do so somewhere.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import stepgraph as sg
from stepgraph.capture import flatten_batch, tensors_of
from stepgraph.graph import (
    Effects,
    StepGraph,
    argument,
    effects_of,
    family_of,
    nodes_in,
    picks_indices,
    tensors_in,
    written_nodes,
)
from stepgraph.graph.effects import is_scalar_function
from stepgraph.graph.ops import FUSED_TWINS
from stepgraph.runtime import Binding, StepState

from . import fixtures, oracle, zoo
from .graphs import subject

aten = torch.ops.aten


def call_of(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call in a graph of its own; tensors among the arguments become placeholders."""
    graph = fx.Graph()
    names = iter(f"x{i}" for i in range(100))

    def operand(value: Any) -> Any:
        if isinstance(value, Tensor):
            return graph.placeholder(next(names))
        return [operand(v) for v in value] if isinstance(value, list) else value

    return graph.call_function(
        target, tuple(operand(a) for a in args), {name: operand(value) for name, value in kwargs.items()}
    )


# Empirical: whole steps.


@dataclass
class Observed:
    """What the operators of one run did, by operator."""

    claimed_writes: set[str] = field(default_factory=set)
    seen_writes: set[str] = field(default_factory=set)
    claimed_random: set[str] = field(default_factory=set)
    seen_random: set[str] = field(default_factory=set)
    nodes: int = 0
    lies: list[str] = field(default_factory=list)


def _bytes_of(tensor: Tensor) -> bytes:
    return oracle.bits(tensor).contiguous().numpy().tobytes()


def _hidden_changes(node: fx.Node, before: dict[fx.Node, list[bytes]], values: dict[fx.Node, Any]) -> list[str]:
    """Operands that changed although the table does not say that the node writes them."""
    allowed = {id(tensor) for operand in written_nodes(node) for tensor in tensors_in(values[operand])}
    written_memory = {t.untyped_storage().data_ptr() for w in written_nodes(node) for t in tensors_in(values[w])}
    found = []
    for operand, old in before.items():
        for tensor, bits in zip(tensors_in(values[operand]), old, strict=True):
            is_declared = id(tensor) in allowed or tensor.untyped_storage().data_ptr() in written_memory
            if not is_declared and _bytes_of(tensor) != bits:
                found.append(f"{node.target} writes {operand}")
    return found


def observe(graph: StepGraph, inputs: list[Any]) -> Observed:
    """Runs a graph node by node and compares each with the effects table."""
    observed = Observed()
    values: dict[fx.Node, Any] = dict(zip(graph.placeholders, inputs, strict=True))
    for node in graph.calls:
        effects, name = effects_of(node), str(node.target)
        operands = {n: [_bytes_of(t) for t in tensors_in(values[n])] for n in node.all_input_nodes}
        random_state = torch.get_rng_state()
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            values[node] = node.target(*args, **kwargs)
        drew = not torch.equal(torch.get_rng_state(), random_state)
        observed.nodes += 1
        if effects.random:
            observed.claimed_random.add(name)
            if drew:
                observed.seen_random.add(name)
        elif drew:
            observed.lies.append(f"{name} draws random numbers")
        observed.lies += _hidden_changes(node, operands, values)
        if effects.writes:
            observed.claimed_writes.add(name)
            if any(
                _bytes_of(t) != bits
                for operand in written_nodes(node)
                for t, bits in zip(tensors_in(values[operand]), operands[operand], strict=True)
            ):
                observed.seen_writes.add(name)
    return observed


def _whole_step(model: nn.Module, batch: Any, loss_fn: fixtures.LossFn | None) -> tuple[StepGraph, list[Any]]:
    """The graph of a second step, whose optimizer state exists already, and inputs for it."""
    optimizer = oracle.OPTIMIZERS["adamw_fused"](model.parameters())
    sg.compile_train_step(model, optimizer, loss_fn=loss_fn, master_weights=False)(batch)
    graph = subject((model, batch, loss_fn), optimizer).rewritten(max_norm=0.01)
    leaves = [v for v in flatten_batch(batch).leaves if isinstance(v, Tensor)]
    return graph, Binding(graph, tensors_of(model), optimizer, StepState()).inputs(leaves, 0)


def _of_zoo(name: str) -> tuple[nn.Module, Any, None]:
    with fixtures.seeded(0):
        return zoo.ZOO[name].build(), zoo.ZOO[name].batch(), None


STEPS: dict[str, Callable[[], tuple[nn.Module, Any, fixtures.LossFn | None]]] = {
    **{name: functools.partial(_of_zoo, name) for name in ("gpt2", "resnet", "bert", "mixtral", "mamba")},
    **{name: fixtures.FIXTURES[name] for name in ("BN", "DROP")},
}


@functools.cache
def observed_step(name: str) -> Observed:
    """One run of a step, observed; its random state starts at a fixed seed."""
    graph, inputs = _whole_step(*STEPS[name]())
    with fixtures.seeded(0):
        return observe(graph, inputs)


@pytest.mark.parametrize("name", STEPS)
def test_no_operator_does_what_the_table_denies(name: str) -> None:
    observed = observed_step(name)
    assert observed.nodes > 20
    assert not observed.lies, "\n".join(observed.lies[:10])


def test_every_operator_that_is_said_to_write_does() -> None:
    claimed = set().union(*(observed_step(name).claimed_writes for name in STEPS))
    seen = set().union(*(observed_step(name).seen_writes for name in STEPS))
    assert claimed == seen
    for expected in ("aten.native_batch_norm.default", "aten._foreach_mul_.Tensor", "stepgraph.fused_adamw_.default"):
        assert expected in seen


def test_every_operator_that_is_said_to_draw_does() -> None:
    claimed = set().union(*(observed_step(name).claimed_random for name in STEPS))
    seen = set().union(*(observed_step(name).seen_random for name in STEPS))
    assert claimed == seen
    assert "aten.bernoulli_.float" in seen


def test_models_with_dropout_draw_and_others_do_not() -> None:
    for name in STEPS:
        has_dropout = name == "DROP" or (name in zoo.ZOO and zoo.ZOO[name].has_dropout)
        assert bool(observed_step(name).seen_random) == has_dropout, name


class ScaledFromOutside(nn.Module):
    """BatchNorm, and after it a Python number that a graph bakes in and no guard sees."""

    scale = [1.0]  # of the class, not of the module

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(self.norm(x)) * self.scale[0]).square().mean()


def test_writes_that_the_schema_denies_are_not_taken_for_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the first difference hashes what an operator writes, in eager and in the graph alike."""
    model = ScaledFromOutside()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.arange(24.0).reshape(6, 4).sin()
    step.prepare(x)
    monkeypatch.setattr(ScaledFromOutside, "scale", [2.0])
    report = step.verify(x)
    assert not report.equal
    assert report.first == "(root)/mul#0@forward f32[6,1]"


# Empirical: single operators.

HALF = torch.full((4, 4), 0.5)
RANDOM_CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.bernoulli.default, (HALF,)),
    (aten.bernoulli.p, (HALF, 0.5)),
    (aten.bernoulli_.float, (HALF, 0.5)),
    (aten.native_dropout.default, (HALF, 0.5, True)),
    (aten.dropout.default, (HALF, 0.5, True)),
    (aten.feature_dropout.default, (HALF, 0.5, True)),
    (aten.alpha_dropout.default, (HALF, 0.5, True)),
    (aten.rand.default, ([3],)),
    (aten.rand_like.default, (HALF,)),
    (aten.randn.default, ([3],)),
    (aten.randn_like.default, (HALF,)),
    (aten.randint.low, (0, 9, [3])),
    (aten.randint_like.default, (HALF, 9)),
    (aten.randperm.default, (5,)),
    (aten.normal.Tensor_float, (HALF,)),
    (aten.normal_.default, (HALF,)),
    (aten.uniform_.default, (HALF,)),
    (aten.exponential_.default, (HALF,)),
    (aten.geometric_.default, (HALF, 0.5)),
    (aten.log_normal_.default, (HALF,)),
    (aten.cauchy_.default, (HALF,)),
    (aten.random_.default, (HALF,)),
    (aten.multinomial.default, (HALF, 2)),
    (aten.poisson.default, (HALF,)),
    (aten.binomial.default, (HALF * 8, HALF)),
    (aten._standard_gamma.default, (HALF,)),
    (aten._sample_dirichlet.default, (HALF,)),
    (aten.rrelu_with_noise.default, (-HALF, HALF, 0.1, 0.3, True)),
    (aten.scaled_dot_product_attention.default, (HALF[None], HALF[None], HALF[None], None, 0.5)),
    (torch.ops.prims.normal.default, ([3],)),
]


def _copies(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _name_of(case: tuple[Any, tuple[Any, ...]]) -> str:
    return str(case[0])


@pytest.mark.parametrize("case", RANDOM_CALLS, ids=_name_of)
def test_operators_that_draw_are_random(case: tuple[Any, tuple[Any, ...]]) -> None:
    target, args = case
    kwargs: dict[str, Any] = {}
    if target is torch.ops.prims.normal.default:
        kwargs = {
            "mean": 0.0,
            "std": 1.0,
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "requires_grad": False,
        }
    with fixtures.seeded(0):
        before = torch.get_rng_state()
        target(*map(_copies, args), **kwargs)
        assert not torch.equal(before, torch.get_rng_state()), "the case is meant to draw"
    effects = effects_of(call_of(target, *args, **kwargs))
    assert effects.random
    assert not effects.pure


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_draws_only_under_dropout(dropout: float) -> None:
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.ones(1, 1, 4, 8)
    assert effects_of(call_of(target, q, q, q, dropout)).random == (dropout > 0)
    assert effects_of(call_of(target, q, q, q)).pure, "its default is no dropout"
    assert effects_of(call_of(target, q, q, q, dropout_p=dropout)).random == (dropout > 0)


def test_attention_with_an_unknown_probability_may_draw() -> None:
    graph = fx.Graph()
    q, p = graph.placeholder("q"), graph.placeholder("p")
    assert effects_of(graph.call_function(aten._scaled_dot_product_flash_attention.default, (q, q, q, p))).random


def test_dropout_in_evaluation_draws_nothing() -> None:
    assert effects_of(call_of(aten.native_dropout.default, HALF, 0.5, False)).pure
    assert effects_of(call_of(aten.native_dropout.default, HALF, 0.0, True)).pure
    assert effects_of(call_of(aten.native_dropout.default, HALF, 0.5, None)).random, "None means training"


# Writes.


def test_batch_norm_writes_its_statistics_though_its_schema_denies_it() -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    x = torch.arange(12.0).reshape(3, 4)
    target = aten.native_batch_norm.default
    assert not target._schema.is_mutable
    assert effects_of(call_of(target, x, None, None, mean, var, True, 0.1, 1e-5)).writes == (
        "running_mean",
        "running_var",
    )
    with torch.no_grad():
        target(x, None, None, mean, var, True, 0.1, 1e-5)
    assert not torch.equal(mean, torch.zeros(4))
    assert not torch.equal(var, torch.ones(4))


def test_batch_norm_without_statistics_is_pure() -> None:
    assert effects_of(call_of(aten.native_batch_norm.default, HALF, None, None, None, None, True, 0.1, 1e-5)).pure


def test_written_nodes_are_the_operands_behind_the_names() -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    node = call_of(aten.native_batch_norm.default, HALF, None, None, mean, var, True, 0.1, 1e-5)
    assert list(written_nodes(node)) == [node.args[3], node.args[4]]
    listed = call_of(aten._foreach_add_.Scalar, [HALF, HALF], 1)
    assert list(written_nodes(listed)) == list(nodes_in(listed.args[0]))
    assert not list(written_nodes(call_of(aten.add.Tensor, HALF, HALF)))


@pytest.mark.parametrize(
    ("target", "args", "writes"),
    [
        (aten.add_.Tensor, (HALF, HALF), ("self",)),
        (aten.copy_.default, (HALF, HALF), ("self",)),
        (aten.add.out, (HALF, HALF), ("out",)),
        (aten._foreach_mul_.Tensor, ([HALF, HALF], HALF), ("self",)),
        (aten.index_put_.default, (HALF, [HALF], HALF), ("self",)),
        (aten.add.Tensor, (HALF, HALF), ()),
        (aten.view.default, (HALF, [16]), ()),
    ],
)
def test_writes_of_the_schema(target: Any, args: tuple[Any, ...], writes: tuple[str, ...]) -> None:
    effects = effects_of(call_of(target, *args))
    assert effects.writes == writes
    assert effects.pure == (not writes)


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_", "_fused_adagrad_"])
def test_fused_kernels_write_their_step_counters(name: str) -> None:
    target = getattr(aten, name).default
    lists = [[HALF] for a in target._schema.arguments if str(a.type) == "List[Tensor]"]
    assert "state_steps" in effects_of(call_of(target, *lists)).writes
    assert "self" in effects_of(call_of(target, *lists)).writes


@pytest.mark.parametrize("kernel", FUSED_TWINS)
def test_fused_twins_write_all_that_the_kernel_does_but_gradients(kernel: str) -> None:
    twin = getattr(torch.ops.stepgraph, kernel.removeprefix("_")).default
    lists = [a.name for a in twin._schema.arguments if str(a.type) == "List[Tensor]"]
    effects = effects_of(call_of(twin, *[[HALF] for _ in lists]))
    assert set(effects.writes) == set(lists) - {"grads"}
    assert effects == Effects(writes=effects.writes)


def test_fused_twin_computes_what_the_kernel_does() -> None:
    def state() -> list[list[Tensor]]:
        return [[torch.ones(3)], [torch.full((3,), 0.25)], [torch.zeros(3)], [torch.zeros(3)], [], [torch.ones(())]]

    hypers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    theirs, mine = state(), state()
    with torch.no_grad():
        torch._fused_adamw_(*theirs, **hypers, **flags)  # type: ignore[arg-type]
        FUSED_TWINS["_fused_adamw_"](*mine, **hypers, **flags)
    for left, right in zip(theirs, mine, strict=True):
        for a, b in zip(left, right, strict=True):
            assert torch.equal(oracle.bits(a), oracle.bits(b))
    assert not torch.equal(mine[0][0], torch.ones(3))


def test_fused_twin_refuses_a_gradient_scaler() -> None:
    with pytest.raises(ValueError, match="gradient scaler"):
        FUSED_TWINS["_fused_adamw_"]([], [], [], [], [], [], found_inf=torch.ones(()))


# What is not known, what is known to be harmless.


@pytest.fixture
def unknown_operator() -> Any:
    """An operator in a namespace that the table has never heard of."""
    library = torch.library.Library("effects_tests", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    yield torch.ops.effects_tests.double.default
    library._destroy()


def test_unknown_namespaces_are_opaque(unknown_operator: Any) -> None:
    effects = effects_of(call_of(unknown_operator, HALF))
    assert effects == Effects(opaque=True)
    assert not effects.pure


def test_unknown_python_functions_are_opaque() -> None:
    def anything(x: Any) -> Any:
        return x

    assert effects_of(call_of(anything, HALF)).opaque


def test_calls_of_modules_and_methods_are_opaque() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert effects_of(graph.call_module("m", (x,))).opaque
    assert effects_of(graph.call_method("add_", (x, 1))).opaque
    assert effects_of(x).pure
    assert effects_of(graph.output([x])).pure


@pytest.mark.parametrize(
    "target",
    [operator.getitem, operator.mul, operator.neg, math.sqrt, max, torch.sym_sqrt, torch.sym_float, torch.sym_max],
)
def test_scalar_functions_are_pure(target: Any) -> None:
    assert is_scalar_function(target)
    assert effects_of(call_of(target, 2.0)).pure


@pytest.mark.parametrize("target", [torch.relu_, torch.add, torch.manual_seed, nn.functional.dropout])
def test_functions_of_torch_are_no_scalar_functions(target: Any) -> None:
    assert not is_scalar_function(target)
    assert effects_of(call_of(target, HALF)).opaque


@pytest.mark.parametrize(
    "target",
    [
        aten._assert_async.default,
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten._functional_assert_async.msg,
        aten._linalg_check_errors.default,
        aten._print.default,
        aten.sym_constrain_range.default,
    ],
    ids=str,
)
def test_checks_stay_where_they_are(target: Any) -> None:
    assert effects_of(call_of(target, HALF)).opaque


def test_nothing_that_returns_nothing_is_pure() -> None:
    """Such an operator is called for an effect: it writes, checks or prints."""
    pure = []
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = getattr(packet, overload)
            written = any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments)
            if not target._schema.returns and not written and effects_of(call_of(target)).pure:
                pure.append(str(target))
    assert not pure


def test_collectives_are_known_as_such() -> None:
    effects = effects_of(call_of(torch.ops._c10d_functional.all_reduce.default, HALF, "sum", "0"))
    assert effects.collective
    assert not effects.pure


def test_own_operators() -> None:
    assert effects_of(call_of(torch.ops.stepgraph.nonfinite_code.default, HALF, HALF, [HALF], True)).pure
    gate = effects_of(call_of(torch.ops.stepgraph.gate.default, HALF))
    assert gate.control
    assert not gate.pure


# Index picking.

IMAGE = torch.ones(1, 1, 4, 4)


@pytest.mark.parametrize(
    "case",
    [
        (aten.topk.default, (HALF, 2)),
        (aten.sort.default, (HALF,)),
        (aten.argsort.default, (HALF,)),
        (aten.argmax.default, (HALF,)),
        (aten.max.dim, (HALF, 0)),
        (aten.min.dim, (HALF, 0)),
        (aten.median.dim, (HALF, 0)),
        (aten.kthvalue.default, (HALF, 1)),
        (aten.mode.default, (HALF,)),
        (aten.cummax.default, (HALF, 0)),
        (aten.cummin.default, (HALF, 0)),
        (aten.max_pool2d_with_indices.default, (IMAGE, [2, 2])),
        (aten.adaptive_max_pool2d.default, (IMAGE, [2, 2])),
        (aten.nonzero.default, (HALF,)),
    ],
    ids=_name_of,
)
def test_operators_that_return_indices_of_compared_values(case: tuple[Any, tuple[Any, ...]]) -> None:
    target, args = case
    results = target(*args)
    assert any(t.dtype == torch.int64 for t in tensors_in(results if isinstance(results, tuple) else [results]))
    assert picks_indices(call_of(target, *args))


@pytest.mark.parametrize("target", [aten.add.Tensor, aten.amax.default, aten.max.default, operator.getitem], ids=str)
def test_operators_that_return_no_indices(target: Any) -> None:
    assert not picks_indices(call_of(target, HALF))


# argument()


def test_argument_by_position_by_name_and_by_default() -> None:
    node = call_of(aten.topk.default, HALF, 2, sorted=False)
    assert argument(node, "self") is node.args[0]
    assert argument(node, "k") == 2
    assert argument(node, "dim") == -1, "the schema's default"
    assert argument(node, "largest") is True
    assert argument(node, "sorted") is False
    assert argument(node, "no_such_argument") is None


def test_argument_that_is_required_and_missing_is_unknown() -> None:
    assert argument(call_of(aten.topk.default, HALF), "k") is None


def test_argument_of_a_python_function() -> None:
    node = call_of(operator.getitem, HALF, 0, key=3)
    assert argument(node, "key") == 3
    assert argument(node, "self") is None


def test_nodes_in_nested_lists() -> None:
    node = call_of(aten._foreach_add_.List, [HALF, HALF], [HALF])
    assert list(nodes_in([node.args, 3, None, (node,)])) == [*node.all_input_nodes, node]
    assert list(nodes_in("text")) == []


def test_family_has_neither_namespace_nor_overload() -> None:
    assert family_of(aten.add.Tensor) == "add"
    assert family_of(torch.ops.stepgraph.gate.default) == "gate"
    assert family_of(operator.getitem) == "getitem"
