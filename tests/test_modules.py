"""Modules of torch with ways of their own, bit for bit eager: recurrent, hooked, parametrized, attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import fixtures
from .fixtures import inputs
from .side_by_side import compare

# Recurrent modules keep their weights in a plain list


class Recurrent(nn.Module):
    """An LSTM, GRU or RNN under a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(5, 6, **options)
        self.head = nn.LazyLinear(2)
        self.head(torch.zeros(1, 6 * (2 if options.get("bidirectional") else 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


RNN_OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "dropout": 0.3, "batch_first": True},
    {"bidirectional": True},
    {"bias": False},
]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("options", RNN_OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    step = compare(lambda: Recurrent(kind, **options), inputs(4, 3, 5))
    rnn = step.model.rnn
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))


# Hooks, parametrizations, embeddings and attention


def test_hooks_on_tensors_and_modules_are_traced() -> None:
    def build() -> nn.Module:
        model = fixtures.mlp().model
        model[0].weight.register_hook(lambda g: g * 0.5)
        model[0].register_forward_hook(lambda m, args, out: out * 2)
        model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        return model

    compare(build, fixtures.batches(fixtures.mlp, 5), fixtures.squared_error)


def test_parametrized_and_spectral_weights() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
        )

    compare(build, inputs(3, 4))


def test_model_that_is_an_embedding_bag_of_tricks() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4, padding_idx=0, max_norm=None)
            self.bag = nn.EmbeddingBag(10, 4, mode="sum")
            self.norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4)])
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.norms[0](self.embedding(ids))
            hidden = hidden + self.attention(hidden, hidden, hidden)[0]
            return self.norms[1](hidden.mean(1) + self.bag(ids))

    batches = [torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(s)) for s in range(5)]
    compare(Bag, batches)


def test_transformer_layers() -> None:
    layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.1, "batch_first": True}
    for build in (
        lambda: nn.TransformerEncoderLayer(**layer),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2, enable_nested_tensor=False),
    ):
        compare(build, inputs(2, 3, 8))
