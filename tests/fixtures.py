"""The small models that the cases in docs/cases.md are stated on.

Each fixture is a function of a seed that returns `(model, batch, loss_fn)`, where `loss_fn(model, batch)` is a scalar.
Equal arguments give equal bits, and the global random state is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_checkpointed

LossFn = Callable[[nn.Module, Any], Tensor]


class Fixture(NamedTuple):
    """A model, one batch for it, and the loss."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generator at `seed` inside; outside, the random state is as before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def rows(seed: int, *shape: int) -> Tensor:
    """Normal random numbers from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(*shape: int, steps: int = 5) -> list[Tensor]:
    """Random numbers for each of some steps, every time the same."""
    return [rows(seed, *shape) for seed in range(steps)]


class Checkpointed(nn.Module):
    """Runs a module under `torch.utils.checkpoint`."""

    def __init__(self, body: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.body = body
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()  # or else a reentrant region gives its parameters no gradient
        output = run_checkpointed(self.body, x, use_reentrant=self.use_reentrant)
        assert isinstance(output, Tensor)
        return output


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error for a batch of (inputs, targets)."""
    x, y = batch
    return F.mse_loss(model(x), y)


def next_token_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy for a batch of (ids, target per id)."""
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, -2), targets.flatten())


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean of the squared output, for models without targets."""
    return model(batch).square().mean()


def own_output(model: nn.Module, batch: Tensor) -> Tensor:
    """The output of a model that is a loss already."""
    return model(batch)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The `.loss` of a model that takes its labels as keyword arguments."""
    return model(**batch).loss


def mlp(seed: int = 0, *, dtype: torch.dtype = torch.float32, rows: int = 6) -> Fixture:
    """MLP: Linear(8, 16), Tanh, Linear(16, 4); squared error."""
    with seeded(seed):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        batch = torch.randn(rows, 8).to(dtype), torch.randn(rows, 4).to(dtype)
    return Fixture(model, batch, squared_error)


class Tied(nn.Module):
    """An embedding whose weight is the output head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def tied(seed: int = 0, *, dtype: torch.dtype = torch.float32, rows: int = 1) -> Fixture:
    """TIED: one weight as embedding and head; cross entropy of ids [[1, 2, 3]] against [2, 3, 4]."""
    with seeded(seed):
        model = Tied().to(dtype)
    ids, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    return Fixture(model, (ids.repeat(rows, 1), targets.repeat(rows, 1)), next_token_error)


def bn(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = 8,
    checkpoint: bool = False,
    use_reentrant: bool = False,
) -> Fixture:
    """BN: Linear(4, 4), BatchNorm1d(4), Linear(4, 1); with `checkpoint` the BatchNorm is in a checkpointed region."""
    with seeded(seed):
        norm: nn.Module = nn.BatchNorm1d(4)
        if checkpoint:
            norm = Checkpointed(norm, use_reentrant)
        model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1)).to(dtype)
        batch = torch.randn(rows, 4).to(dtype)
    return Fixture(model, batch, mean_square)


def drop(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = 3,
    checkpoint: bool = True,
    use_reentrant: bool = False,
) -> Fixture:
    """DROP: Linear(4, 64), Tanh and Dropout(0.5) in one checkpointed region, then Linear(64, 1)."""
    with seeded(seed):
        body: nn.Module = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.5))
        if checkpoint:
            body = Checkpointed(body, use_reentrant)
        model = nn.Sequential(body, nn.Linear(64, 1)).to(dtype)
        batch = torch.randn(rows, 4).to(dtype)
    return Fixture(model, batch, mean_square)


class Lora(nn.Module):
    """A frozen linear map with a trainable low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(8, 2) * 0.5)
        self.B = nn.Parameter(torch.randn(2, 8) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A @ self.B


def lora(seed: int = 0, *, dtype: torch.dtype = torch.float32, rows: int = 5) -> Fixture:
    """LORA: frozen Linear(8, 8) plus trainable A (8, 2) and B (2, 8), neither of them zero."""
    with seeded(seed):
        model = Lora().to(dtype)
        batch = torch.randn(rows, 8).to(dtype)
    return Fixture(model, batch, mean_square)


class Odd(nn.Module):
    """Parameters of 5, 3 and 1 elements and a 0-dim one; the output is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.five = nn.Parameter(torch.randn(5))
        self.three = nn.Parameter(torch.randn(3))
        self.one = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x * self.five).sin().sum(-1, keepdim=True) * self.three
        return (mixed.tanh() * self.scalar + self.one).square().sum()


def odd(seed: int = 0, *, dtype: torch.dtype = torch.float32, rows: int = 4) -> Fixture:
    """ODD: parameters of numel 5, 3, 1 and one 0-dim scalar, in a sum that makes each gradient depend on all."""
    with seeded(seed):
        model = Odd().to(dtype)
        batch = torch.randn(rows, 5).to(dtype)
    return Fixture(model, batch, own_output)


def gpt(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = 2,
    dropout: float = 0.1,
    checkpoint: bool = False,
    use_reentrant: bool = False,
) -> Fixture:
    """GPT: Hugging Face GPT-2 with 2 layers, hidden 16, 2 heads, vocabulary 50, tied head; ids (2, 8)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    with seeded(seed):
        model = GPT2LMHeadModel(config).to(dtype).train()
        ids = torch.randint(1, 50, (rows, 8))
    if checkpoint:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    return Fixture(model, {"input_ids": ids, "labels": ids.clone()}, own_loss)


FIXTURES: dict[str, Callable[..., Fixture]] = {
    "MLP": mlp,
    "TIED": tied,
    "BN": bn,
    "DROP": drop,
    "LORA": lora,
    "ODD": odd,
    "GPT": gpt,
}


def batches(make: Callable[..., Fixture], steps: int, seed: int = 0, **options: Any) -> list[Any]:
    """One batch a step for a fixture, each from a seed of its own; the first is the fixture's at `seed`."""
    return [make(seed + step, **options).batch for step in range(steps)]
