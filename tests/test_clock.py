"""The clock: tables, what they say of calls, calibrations kept on disk, and channels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import fx

import stepgraph as sg
from stepgraph.planner import SPECS, HardwareSpec, Table, spec_from_json
from stepgraph.planner.cost import node_seconds, work_of
from stepgraph.planner.timeline import Channel, Task, channel_of, timeline
from stepgraph.runtime.calibrated import calibration_path, spec_of
from stepgraph.tools import calibrate as calibration
from stepgraph.tools.calibration_samples import SIZES, samples, work_of_call
from stepgraph.tools.undisturbed import Control

CPU = torch.device("cpu")
aten = torch.ops.aten


def call(target: Any, *args: Any) -> fx.Node:
    """A node that calls ``target`` on real tensors."""
    graph = fx.Graph()

    def node(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placeholder = graph.placeholder("x")
        placeholder.meta["val"] = value
        return placeholder

    result = graph.call_function(target, fx.node.map_aggregate(args, node))
    result.meta["val"] = target(*args)
    return result


# Tables


def test_tables_are_exact_where_they_were_measured_and_follow_powers_between() -> None:
    table = Table(((10.0, 1000.0), (1.0, 4.0)), (1.0, 2.0, 100.0, 200.0))
    assert table.at(10, 1) == 1.0
    assert table.at(1000, 4) == pytest.approx(200.0)
    assert table.at(100, 1) == pytest.approx(10.0), "a straight line in logarithms"
    assert table.at(10, 2) == pytest.approx(math.sqrt(2))
    assert table.at(2000, 8) == pytest.approx(800.0), "beyond the largest sizes, in proportion"
    assert table.at(1, 0.1) == 1.0, "below the smallest, a launch"
    assert Table.from_json(table.as_json()) == table
    assert table.least == 1.0


@pytest.mark.parametrize(
    ("axes", "seconds"),
    [(((1.0, 1.0),), (1.0, 1.0)), (((2.0, 1.0),), (1.0, 1.0)), (((1.0,),), (1.0, 2.0)), (((1.0,),), (0.0,))],
)
def test_tables_that_make_no_sense_are_refused(axes: Any, seconds: Any) -> None:
    with pytest.raises(sg.ConfigError, match="table"):
        Table(axes, seconds)


# What calls have to do


def test_work_of_products_copies_reductions_and_lists() -> None:
    a, b = torch.ones(8, 32), torch.ones(32, 16)
    assert work_of(call(aten.mm.default, a, b))[:2] == ("mm", (8, 32, 16))
    assert work_of(call(aten.addmm.default, torch.ones(16), a, b))[:2] == ("mm", (8, 32, 16))
    assert work_of(call(aten.bmm.default, a.expand(4, 8, 32), b.expand(4, 32, 16))) == ("bmm", (8, 32, 16), 0.25, 1.0)
    assert work_of(call(aten.mul.Tensor, a, a)).sizes == (2 * a.nbytes,), "one operand, one result"
    assert work_of(call(aten.add_.Tensor, a, a)).table == "add"
    assert work_of(call(aten.clone.default, a)).table == "clone"
    assert work_of(call(aten.clone.default, a.t())).table == "clone", "it keeps the order"
    assert work_of(call(aten._to_copy.default, a)).table == "_to_copy"
    assert work_of(call(aten.sum.dim_IntList, a, [-1])).table == "sum"
    assert work_of(call(aten.sum.dim_IntList, a, [0])).table == "sum outer"
    listed = work_of(call(aten._foreach_add_.Scalar, [a] * 32, 1.0))
    assert (listed.table, listed.times, listed.launches) == ("_foreach_add", 2.0, 2.0)
    heads = [torch.ones(1, 2, 16, 8)] * 3
    assert work_of(call(aten._scaled_dot_product_flash_attention_for_cpu.default, *heads)).sizes == (4 * 16 * 16 * 8, 2)


@pytest.mark.parametrize("target", [aten.mm.default, aten.addmm.default])
def test_work_of_a_square_is_that_of_a_product(target: Any) -> None:
    x = torch.ones(8, 8)
    operands = [x] * (3 if target is aten.addmm.default else 2)
    apart, square = call(target, *operands), call(target, *operands)
    square.args = (square.args[0],) * len(square.args)
    assert len(square.all_input_nodes) == 1
    assert work_of(square) == work_of(apart)


def test_work_of_operators_on_rows_is_their_number_and_length() -> None:
    x = torch.ones(2, 3, 8)
    assert work_of(call(aten._softmax.default, x, -1, False))[:2] == ("_softmax", (6, 8))
    assert work_of(call(aten._softmax.default, x, 1, False)).sizes == (16, 3)
    assert work_of(call(aten._softmax_backward_data.default, x, x, -1, torch.float32)).sizes == (6, 8)
    each = torch.ones(2, 1, 1)
    normed = call(aten.native_layer_norm.default, x, [3, 8], None, None, 1e-5)
    assert work_of(normed) == ("native_layer_norm", (2, 24), 1.0, 1.0)
    arguments = (x, x, [3, 8], each, each, None, None, [True, False, False])
    assert work_of(call(aten.native_layer_norm_backward.default, *arguments)).sizes == (2, 24)
    assert work_of(call(aten._softmax.default, x.sum(), -1, False)).sizes == (1, 1)


def test_a_table_goes_before_the_roofline_and_another_dtype_stands_in() -> None:
    slow = Table(((1.0, 2.0**30),), (3.0, 3.0))
    spec = dataclasses.replace(SPECS["cpu"], tables={"exp:f32": slow}, launch_factor=2.0)
    x = torch.ones(64)
    assert node_seconds(spec)(call(aten.exp.default, x)) == pytest.approx(6.0), "and a launch amid a step"
    assert node_seconds(spec)(call(aten.exp.default, x.double())) == pytest.approx(6.0)
    assert node_seconds(spec)(call(aten.tanh.default, x)) < 1e-3
    assert node_seconds(spec)(call(aten.view.default, x, [8, 8])) == pytest.approx(2 * spec.view_seconds)


# Calibration


def test_every_sample_runs_and_belongs_to_the_table_that_its_call_asks_for() -> None:
    """At the smallest size of each: the planner finds what was measured under the name by which it looks it up."""
    seen = set()
    for sample in samples(CPU):
        if sample.table in seen:
            continue
        seen.add(sample.table)
        target, args = sample.calls()[0]
        work = work_of_call(target, args, target(*args))
        assert work.table == sample.table.partition(":")[0]
        assert sample.sizes is None or work.sizes == sample.sizes
    assert len(seen) > 100


def _few(device: torch.device) -> list[Any]:
    wanted = ("mm:", "mul:", "exp:", "clone:", "attention:", "convolution:", "fused_adamw:")
    found = [s for s in samples(device) if s.table.startswith(wanted)]
    return [s for s in found if not s.table.startswith("mm:") or max(s.sizes or ()) <= 64]


def test_a_fixed_product_tells_what_was_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two measurements have one beside them that took half as long again."""
    around = [1.0, 1.5, 1.5, 1.0, 1.0, 1.05]
    taken = iter([*[1.0] * 20, *(seconds for seconds in around for _ in range(3))])
    monkeypatch.setattr(Control, "_product_seconds", lambda self: next(taken))
    control = Control(CPU)
    assert [control.watch(lambda: 7.0) for _ in range(3)] == [(7.0, False), (7.0, False), (7.0, True)]


def test_everything_is_measured_twice_and_what_was_disturbed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    count = len(_few(CPU))

    class Disturbed(Control):
        def watch(self, measure: Any) -> Any:
            measured.append(measure())
            return measured[-1], len(measured) not in (2, 5, count + 2, count + 5)

    monkeypatch.setattr(calibration, "_LONG_SECONDS", math.inf)  # nothing is left out on a busy machine
    monkeypatch.setattr(calibration, "Control", Disturbed)
    monkeypatch.setattr(calibration, "samples", _few)
    calibration.calibrate(CPU)
    assert len(measured) == 2 * count + 2


def test_a_calibration_is_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "samples", _few)
    monkeypatch.setattr(calibration, "_PASSES", 2)
    assert spec_of(CPU) is SPECS["cpu"]
    told = []
    spec = calibration.calibrate(CPU, lambda done, of, name: told.append((done, of, name)))
    assert told[-1][0] == told[-1][1] == 2 * len(_few(CPU))
    assert spec_of(CPU) == spec
    assert "calibrated" in spec.name
    assert spec.launch_factor > 0
    assert spec.memory_bytes > 0
    assert len(spec.tables["mul:f32"].axes[0]) == len(SIZES)
    model = torch.nn.Linear(4, 4)
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters()), plan="sqrt", loss_fn=lambda m, x: m(x).sum()
    )
    step.prepare(torch.ones(2, 4))
    assert step.plan.hardware == spec.name


def test_a_damaged_calibration_says_where_it_is() -> None:
    path = calibration_path(CPU)
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "x"}')
    with pytest.raises(sg.ConfigError, match="Delete it, or run `stepgraph calibrate` again") as error:
        spec_of(CPU)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_specs_survive_json_and_say_where_they_are_from(spec: HardwareSpec) -> None:
    assert spec_from_json(spec.to_json()) == spec
    assert spec.source


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tables": {}, "name": "x"}', '{"tables": {"mul:f32": {"axes": 1}}}']
)
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(sg.ConfigError, match="no hardware spec"):
        spec_from_json(text)


@pytest.mark.parametrize(
    "change", [{"launch_seconds": 0.0}, {"matmul_flops": {"bf16": 1.0}}, {"host_bytes_per_second": -1.0}]
)
def test_rates_must_be_above_0(change: dict[str, Any]) -> None:
    with pytest.raises(sg.ConfigError, match="hardware spec 'a typical CPU"):
        dataclasses.replace(SPECS["cpu"], **change)


# Channels


def test_channels_run_beside_each_other_and_wait_for_what_they_need() -> None:
    compute, talk, copy = Channel.COMPUTE, Channel.COMMUNICATION, Channel.COPY
    found = timeline(
        [
            Task(compute, 2.0, (), "forward"),
            Task(talk, 5.0, (0,), "reduce"),
            Task(compute, 1.0, (0,), "backward"),
            Task(copy, 1.5, (0,), "backward"),
            Task(compute, 1.0, (1, 2), "update"),
            Task(talk, 1.0, (), "reduce"),
        ]
    )
    assert found.starts == (0.0, 2.0, 2.0, 2.0, 7.0, 7.0)
    assert found.seconds == 8.0
    assert found.seconds_by_stage() == {"forward": 2.0, "reduce": 6.0, "backward": 2.5, "update": 1.0}
    assert timeline([]).seconds == 0.0


def test_collectives_are_communication_and_waiting_for_them_is_not() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(1000)
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))
    reduced.meta["val"] = waited.meta["val"] = torch.ones(1000)
    assert (channel_of(reduced), channel_of(waited)) == (Channel.COMMUNICATION, Channel.COMPUTE)
    spec = SPECS["h100"]
    assert node_seconds(spec)(reduced) == pytest.approx(spec.link_seconds + 8000 / spec.link_bytes_per_second)


def test_an_error_in_a_measured_step_says_where_as_in_any_other() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 2))
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=lambda m, x: m(x).sum())
    step(torch.tensor([0, 1]))
    for call in (step, step.measure):
        with pytest.raises(IndexError) as error:
            call(torch.tensor([0, 9]))
        assert error.value.failed_node.meta["key"].module == "0"
