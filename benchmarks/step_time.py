"""Step time of plain eager, ``torch.compile`` and stepgraph, on Llama-shaped models in single precision.

Peers get the same fused AdamW and the same ``clip_grad_norm_``. Beside each time stands its fraction of the limit: the step's
floating-point operations (6 per parameter of a matrix product and token, and attention) at the rate of a large matrix product,
measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import Measurement, gemm_flops_per_second, measure, table, write
from torch import Tensor, nn

import stepgraph as sg

MAX_NORM = 1.0
VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """A model and its batch.

    Attributes:
        calls: how many calls in a row a round takes.
    """

    hidden: int
    layers: int
    batch: int
    sequence: int
    rounds: int
    calls: int

    @property
    def name(self) -> str:
        """As ``64 x 2 (2 x 32)``."""
        return f"{self.hidden} x {self.layers} ({self.batch} x {self.sequence})"


SIZES = {"64": Size(64, 2, 2, 32, 40, 20), "256": Size(256, 4, 4, 128, 24, 2), "512": Size(512, 4, 8, 128, 12, 1)}


def build(size: Size) -> nn.Module:
    """The same weights at every call."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=size.layers,
        num_attention_heads=max(2, size.hidden // 64),
        num_key_value_heads=max(2, size.hidden // 64),
        max_position_embeddings=size.sequence,
        use_cache=False,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def flops(size: Size, model: nn.Module) -> float:
    """Floating-point operations of forward and backward."""
    tokens = size.batch * size.sequence
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = 2 * 2 * size.layers * size.batch * size.sequence**2 * size.hidden / 2  # causal
    return 6.0 * weights * tokens + 3 * attention


def by_hand(model: nn.Module, batch: dict[str, Tensor], *, compiles: bool, compiles_update: bool) -> Callable[[], Any]:
    """The plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not compiles_update)
    forward = torch.compile(model) if compiles else model
    update = torch.compile(optimizer.step) if compiles_update else optimizer.step

    def step() -> None:
        loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        update()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Callable[[], Any]:
    """The compiled step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = sg.compile_train_step(model, optimizer, max_norm=MAX_NORM, **options)
    return lambda: step(batch)


def candidates_for(size: Size) -> dict[str, Callable[[], Any]]:
    """What is compared."""
    ids = torch.randint(0, VOCABULARY, (size.batch, size.sequence), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    return {
        "eager": by_hand(build(size), batch, compiles=False, compiles_update=False),
        "torch.compile": by_hand(build(size), batch, compiles=True, compiles_update=False),
        "torch.compile, update too": by_hand(build(size), batch, compiles=True, compiles_update=True),
        "exact": ours(build(size), batch),
        "exact, inductor": ours(build(size), batch, lowering="inductor"),
        "fast": ours(build(size), batch, numerics="fast"),
    }


def report(size: Size, result: Measurement, limit_seconds: float) -> list[list[str]]:
    """One row for each candidate."""
    return [
        [
            size.name,
            name,
            f"{result.median(name) * 1e3:.2f}",
            f"{limit_seconds / result.median(name):.0%}",
            str(result.ratio("eager", name)),
            str(result.ratio("torch.compile", name)),
        ]
        for name in result.seconds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, results = [], {}
    for size in (SIZES[name] for name in args.sizes):
        candidates = candidates_for(size)
        for name, call in candidates.items():
            start = time.perf_counter()
            for _ in range(3):
                call()
            print(f"{size.name}: {name} is ready after {time.perf_counter() - start:.1f} s", flush=True)
        result = measure(candidates, rounds=size.rounds, calls=size.calls)
        rate = gemm_flops_per_second()
        limit_seconds = flops(size, build(size)) / rate
        rows += report(size, result, limit_seconds)
        results[size.name] = {
            **result.as_json(),
            "gemm_flops_per_second": rate,
            "limit_seconds": limit_seconds,
            "ratios": {
                f"{other} / {name}": vars(result.ratio(other, name))
                for other in ("eager", "torch.compile", "torch.compile, update too")
                for name in result.seconds
            },
        }
        print(
            f"{size.name}: {result.discarded} disturbed rounds of {result.discarded + len(result.seconds['eager'])}",
            flush=True,
        )
    print(table(["model", "step", "ms", "of limit", "x eager", "x torch.compile"], rows))
    print(f"wrote {write('step_time', {'sizes': results})}")


if __name__ == "__main__":
    main()
