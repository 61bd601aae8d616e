"""What only a GPU can show, next to the same check on the CPU as far as that goes. `make gpu-check` shows the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stepgraph as sg
from stepgraph.runtime import Executor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Dropped(nn.Module):
    """Dropout of ones times a parameter of ones: output and gradient show the mask, each its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(lambda w: nn.functional.dropout(x * w, 0.5), self.weight, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


def mask_step(device: str) -> tuple[Executor, list[Any]]:
    """Forward and backward of :class:`Dropped` as captured, and their inputs; outputs are loss, dropped ones, gradient."""
    model = Dropped().to(device)

    def loss_fn(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        out = m(x)
        return out.sum(), out

    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=loss_fn)
    x = torch.ones(256, device=device)
    step.prepare(x)
    return Executor(step.captured_graph), [model.weight, x]


def calls(executor: Executor, inputs: list[Any]) -> Callable[[], list[Any]]:
    """Runs the step at each call."""
    return lambda: executor(list(inputs))


def graph_replays(executor: Executor, inputs: list[Any]) -> Callable[[], list[Any]]:
    """Records the step once as a CUDA graph and replays that."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        executor(list(inputs))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = executor(list(inputs))

    def replay() -> list[Any]:
        graph.replay()
        return [t.clone() for t in outputs]

    return replay


@pytest.mark.case("B36")
@pytest.mark.parametrize(
    ("device", "way"),
    [
        ("cpu", calls),
        pytest.param("cuda", calls, marks=needs_gpu),
        pytest.param("cuda", graph_replays, marks=needs_gpu),
    ],
    ids=["cpu", "cuda", "cuda graph"],
)
def test_each_run_draws_a_mask_that_its_backward_shares(device: str, way: Callable[..., Any]) -> None:
    run = way(*mask_step(device))
    masks = []
    for _ in range(3):
        _, dropped, grad = run()
        assert torch.equal(dropped != 0, grad != 0)
        masks.append(dropped != 0)
    assert all(0 < int(mask.sum()) < 256 for mask in masks)
    assert not any(torch.equal(a, b) for a, b in [masks[:2], masks[1:], masks[::2]])
