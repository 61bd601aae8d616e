"""What comes between backward and the next forward: unscale, norm, clip and update, folded and by hand, on 50 M parameters.

By hand: ``GradScaler.unscale_``, ``clip_grad_norm_``, fused AdamW and ``GradScaler.update``, without and with
``zero_grad(set_to_none=True)``. Folded: ``flush()`` of a window of one micro-batch under ``numerics="fast"``, which divides by
the window's weight and frees the gradients too. The memory floor is 32 bytes a parameter (the gradient once for the norm;
gradient, parameter and two moments read and three of them written for the update) at the bandwidth of a copy, measured in the
same rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import measure, table, write
from torch import Tensor, nn

import stepgraph as sg

MAX_NORM = 1.0
BYTES_AT_THE_FLOOR = 32
BYTES_OF_A_COPY = 8
BAR = 0.70
FREED = "by hand, freed"


class Tower(nn.Module):
    """An embedding and blocks of two layers: 50 M parameters at the default sizes."""

    def __init__(self, vocabulary: int = 24_000, width: int = 512, blocks: int = 18) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Loss of ``ids``, int64 of any shape."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def build(**sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same weights at every call, and fused AdamW."""
    torch.manual_seed(0)
    model = Tower(**sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


Candidate = tuple[Callable[[], Any], Callable[[], Any]]


def by_hand(ids: Tensor, **sizes: int) -> tuple[Candidate, Candidate]:
    """Forward and backward, and the tail of the plain loop; the same, and freeing the gradients."""
    model, optimizer = build(**sizes)
    scaler = torch.amp.GradScaler("cpu")

    def backward() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.float16):
            loss = model(ids)
        scaler.scale(loss).backward()

    def tail() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return (backward, tail), (backward, lambda: optimizer.zero_grad(set_to_none=True))


def ours(ids: Tensor, numerics: str, **sizes: int) -> Candidate:
    """A micro-batch, and the update of the window."""
    model, optimizer = build(**sizes)
    step = sg.compile_train_step(model, optimizer, precision="fp16", max_norm=MAX_NORM, accumulate=2, numerics=numerics)

    def tail() -> None:
        result = step.flush()
        assert result is not None
        assert result.applied

    return lambda: step(ids), tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=24_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=18)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"vocabulary": args.vocabulary, "width": args.width, "blocks": args.blocks}
    parameters = sum(p.numel() for p in build(**sizes)[0].parameters())
    ids = torch.randint(0, args.vocabulary, (8,), generator=torch.Generator().manual_seed(0))
    hand, freeing = by_hand(ids, **sizes)
    made = {"by hand": hand, "zero_grad": freeing}
    made |= {"exact": ours(ids, "exact", **sizes), "folded": ours(ids, "fast", **sizes)}
    for before, call in made.values():  # the first update creates the state, the second is compiled
        for _ in range(3):
            before()
            call()
    source, target = torch.randn(parameters), torch.empty(parameters)
    calls: dict[str, Callable[[], Any]] = {name: call for name, (_, call) in made.items()}
    calls["copy"] = lambda: target.copy_(source)
    result = measure(calls, rounds=args.rounds, before={name: before for name, (before, _) in made.items()})
    floor = BYTES_AT_THE_FLOOR / BYTES_OF_A_COPY
    seconds = result.seconds
    seconds[FREED] = [a + b for a, b in zip(seconds["by hand"], seconds.pop("zero_grad"), strict=True)]
    names = ("by hand", FREED, "exact", "folded")
    rows = [
        [
            name,
            f"{result.median(name) * 1e3:.1f}",
            *(str(result.ratio(name, hand)) for hand in ("by hand", FREED)),
            f"{result.median(name) / (floor * result.median('copy')):.2f}",
        ]
        for name in names
    ]
    print(f"{parameters / 1e6:.1f} M parameters, {result.discarded} disturbed rounds")
    print(table(["tail", "ms", "/ by hand", f"/ {FREED}", "/ memory floor"], rows))
    folded = result.ratio("folded", "by hand")
    print(f"folded <= {BAR:.2f} x by hand: {'met' if folded.low <= BAR else 'not met'}")
    contents = {
        **result.as_json(),
        "parameters": parameters,
        "ratios": {f"{name} / {hand}": vars(result.ratio(name, hand)) for name in names for hand in names[:2]},
        "ratios_to_memory_floor": {name: result.median(name) / (floor * result.median("copy")) for name in names},
        "copy_bytes_per_second": BYTES_OF_A_COPY * parameters / result.median("copy"),
    }
    print(f"wrote {write('update_tail', contents)}")


if __name__ == "__main__":
    main()
