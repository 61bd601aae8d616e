"""Batches, outputs and losses of every kind, and what a loss returns besides, bit for bit eager."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .fixtures import inputs
from .side_by_side import compare

# Losses and their company


Pieces = namedtuple("Pieces", "logits norms")


def test_aux_is_a_pytree_of_detached_values() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        out = model(batch[0])
        loss = F.mse_loss(out, batch[1])
        return loss, {
            "pieces": Pieces(out, [out.norm(), out.detach().max()]),
            "rows": out.shape[0],
            "loss": loss,
            "x": None,
        }

    batches = fixtures.batches(fixtures.mlp, 5)
    eager, graph = fixtures.mlp(), fixtures.mlp()
    eager_optimizer = torch.optim.SGD(eager.model.parameters(), lr=0.1)
    step = sg.compile_train_step(
        graph.model, torch.optim.SGD(graph.model.parameters(), lr=0.1), loss_fn=loss_fn, max_norm=1.0
    )
    for batch in batches:
        with torch.no_grad():
            loss, want = loss_fn(eager.model, batch)
        result = step(batch)
        assert list(result.aux) == list(want)
        assert type(result.aux["pieces"]) is Pieces
        assert torch.equal(result.aux["pieces"].logits, want["pieces"].logits)
        assert all(torch.equal(a, b) for a, b in zip(result.aux["pieces"].norms, want["pieces"].norms, strict=True))
        assert (result.aux["rows"], result.aux["x"]) == (6, None)
        assert torch.equal(result.aux["loss"], loss)
        assert torch.equal(result.loss, loss)
        assert not result.loss.requires_grad
        assert not result.aux["pieces"].logits.requires_grad
        oracle.eager_steps(
            eager.model, eager_optimizer, fixtures.squared_error, [batch], max_norm=1.0, checkpoints=(1,)
        )


def test_without_aux_there_is_none() -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=lambda m, b: (fixture.loss_fn(m, b), None)
    )
    assert step(fixture.batch).aux is None
    step = sg.compile_train_step(fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=fixture.loss_fn)
    assert step(fixture.batch).aux is None


@pytest.mark.parametrize("pair", [tuple, list])
def test_criterion(pair: type) -> None:
    batches = [pair(b) for b in fixtures.batches(fixtures.mlp, 5)]
    eager, graph = fixtures.mlp(), fixtures.mlp()
    eager_optimizer, graph_optimizer = (torch.optim.AdamW(f.model.parameters()) for f in (eager, graph))
    want = oracle.eager_steps(eager.model, eager_optimizer, fixtures.squared_error, batches)
    step = sg.compile_train_step(graph.model, graph_optimizer, criterion=nn.MSELoss())
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph.model, graph_optimizer, batches))


@dataclass
class Output:
    """An output object that is no pytree."""

    loss: Tensor
    logits: Tensor


class Flexible(nn.Module):
    """Takes inputs by position or keyword, and returns its loss as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, y: Tensor | None = None, *, scale: float = 1.0) -> Any:
        if isinstance(x, dict):
            x, y = x["x"], x["y"]
        out = self.linear(x) * scale
        loss = (out if y is None else out - y).square().mean()
        return {
            "tensor": loss,
            "one_element": loss.reshape(1),
            "dict": {"logits": out, "loss": loss},
            "ordered": OrderedDict(loss=loss),
            "object": Output(loss, out),
        }[self.how]


def _pairs() -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs(3, 4), inputs(3, 4, steps=5)[::-1], strict=True))


BATCHES: dict[str, Callable[[], list[Any]]] = {
    "tensor": lambda: inputs(3, 4),
    "tuple": _pairs,
    "list": lambda: [list(pair) for pair in _pairs()],
    "dict": lambda: [{"x": x, "y": y} for x, y in _pairs()],
    "dict_with_number": lambda: [{"x": x, "y": y, "scale": 2.0} for x, y in _pairs()],
    "ordered_dict": lambda: [OrderedDict(x=x, y=y) for x, y in _pairs()],
    "user_dict": lambda: [UserDict(x=x, y=y) for x, y in _pairs()],
    "nested": lambda: [({"x": x, "y": y},) for x, y in _pairs()],
}


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, (dict, UserDict)):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(out, dict):
        return out["loss"]
    return out if isinstance(out, Tensor) else out.loss


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("how", ["tensor", "one_element", "dict", "ordered", "object"])
def test_batches_and_outputs_of_every_kind(batch: str, how: str) -> None:
    batches = BATCHES[batch]()
    eager, graph = oracle.twin(lambda: Flexible(how))
    eager_optimizer, graph_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (eager, graph))
    want = oracle.eager_steps(eager, eager_optimizer, _loss_of, batches, max_norm=0.1)
    step = sg.compile_train_step(graph, graph_optimizer, max_norm=0.1)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph, graph_optimizer, batches))
    assert step.captures == 1


def test_mapping_batches_as_tokenizers_make_them() -> None:
    from transformers import BatchEncoding

    fixture = fixtures.gpt()
    plain, encoded = fixtures.gpt(), fixtures.gpt()
    steps = [
        sg.compile_train_step(f.model, torch.optim.AdamW(f.model.parameters(), lr=0.01), max_norm=1.0)
        for f in (plain, encoded)
    ]
    torch.manual_seed(0)
    want = [steps[0](fixture.batch).loss for _ in range(3)]
    torch.manual_seed(0)
    got = [steps[1](BatchEncoding(dict(fixture.batch))).loss for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert steps[1].captures == 1


def test_mapping_within_a_batch() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]["x"]), batch[1])

    batches = [(UserDict(x=x), y) for x, y in fixtures.batches(fixtures.mlp, 5)]
    compare(lambda: fixtures.mlp().model, batches, loss_fn)


def test_gradient_penalty() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + grad.square().sum()

    compare(lambda: fixtures.mlp().model, fixtures.batches(fixtures.mlp, 5), loss_fn)


def test_sparse_batches_are_refused() -> None:
    model = nn.Linear(4, 1)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=lambda m, x: m(x.to_dense()).sum())
    with pytest.raises(sg.CaptureError, match="sparse tensor"):
        step(torch.eye(4).to_sparse())
