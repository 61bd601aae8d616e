"""Precision, optimizer, window and clipping together: every pair of choices, bit for bit the loop by hand.

Six updates each, an infinity in the third, compared after every one: buffers, optimizer state, norm, scale, random streams too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import zoo
from .amp_loop import pair, same_update

UPDATES = 6
BAD_UPDATE = 2  # counted from 0


class SharedLinear(nn.Module):
    """One layer used twice, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(torch.tanh(self.linear(x))))


Model = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[[nn.Module, Any], Tensor]]


def _of_zoo(name: str) -> Model:
    entry = zoo.ZOO[name]
    return entry.build, entry.batch, lambda model, batch: model(**batch).loss


def _shared_batch(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, Model] = {
    "gpt2": _of_zoo("gpt2"),
    "bert": _of_zoo("bert"),
    "resnet": _of_zoo("resnet"),
    "shared": (SharedLinear, _shared_batch, lambda model, batch: model(batch).float().square().mean()),
}
CLIPS: dict[str, dict[str, float]] = {
    "none": {},
    "l2": {"max_norm": 0.05},
    "inf": {"max_norm": 0.01, "norm_type": float("inf")},
    "l1": {"max_norm": 0.5, "norm_type": 1.0},
    "value": {"clip_value": 0.001},
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": ("sgd_momentum", "adamw_forloop", "adamw_foreach", "adamw_fused"),
    "accumulate": (1, 3, 4),
    "clip": tuple(CLIPS),
}
Row = tuple[Any, ...]


def _pairs(row: Row) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def pairwise() -> list[Row]:
    """Few rows in which each pair of choices occurs, the largest gain first."""
    rows = list(itertools.product(*CHOICES.values()))
    missing = set().union(*map(_pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


ROWS = pairwise()


def _loss_of(name: str) -> Callable[[nn.Module, Any], Tensor]:
    loss_fn = MODELS[name][2]
    return lambda model, batch: loss_fn(model, batch[0]) * batch[1]


@pytest.mark.feature("AMP-1", "AMP-4", "CLIP-1", "CLIP-19", "MB-2")
@pytest.mark.parametrize(tuple(CHOICES), ROWS, ids=["-".join(map(str, row)) for row in ROWS])
def test_every_pair_of_choices(model: str, precision: str, optimizer: str, accumulate: int, clip: str) -> None:
    build, batch_of, _ = MODELS[model]
    # a sum of halves of halves is exact but where float16 underflows
    loop, step = pair(
        build,
        _loss_of(model),
        optimizer,
        precision,
        accumulate=accumulate,
        divide_early=accumulate == 4 and precision != "fp16",
        init_scale=2.0**10,
        **CLIPS[clip],
    )
    applied = []
    for number in range(UPDATES):
        window = [(batch_of(number * accumulate + k), torch.ones(())) for k in range(accumulate)]
        if number == BAD_UPDATE:
            window[accumulate // 2][1].fill_(torch.inf)
        applied.append(same_update(loop, step, number + 1, window).applied)
    assert applied == [number != BAD_UPDATE for number in range(UPDATES)]


def test_the_rows_hold_every_pair() -> None:
    wanted = set().union(*map(_pairs, itertools.product(*CHOICES.values())))
    assert set().union(*map(_pairs, ROWS)) == wanted
    assert len(ROWS) < 30
