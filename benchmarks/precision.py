"""What 16-bit precision buys in throughput: matrix products, and whole steps under autocast against single precision.

Models and rules are those of ``step_time.py``. A precision that the compiled step does not have yet is shown as such.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import measure, table, write
from step_time import MAX_NORM, SIZES, VOCABULARY, Size, build
from torch import Tensor, nn

import stepgraph as sg

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GEMM_SIZE = 512


def products() -> dict[str, Callable[[], Any]]:
    """A large matrix product in each precision."""
    matrices = {name: torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for name, dtype in DTYPES.items()}
    return {name: lambda a=a: torch.mm(a, a) for name, a in matrices.items()}


def eager_step(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype) -> Callable[[], Any]:
    """The plain loop, under autocast where ``dtype`` is not fp32. Without loss scaling, which costs little beside the rest."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def steps(size: Size) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Eager and compiled steps by precision, and the compiled ones that do not exist yet."""
    ids = torch.randint(0, VOCABULARY, (size.batch, size.sequence), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    candidates: dict[str, Callable[[], Any]] = {}
    missing = []
    for name, dtype in DTYPES.items():
        candidates[f"eager {name}"] = eager_step(build(size), batch, dtype)
        model = build(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        try:
            step = sg.compile_train_step(model, optimizer, max_norm=MAX_NORM, precision=name)
        except sg.NotYetError:
            missing.append(f"stepgraph {name}")
            continue
        candidates[f"stepgraph {name}"] = lambda step=step: step(batch)
    return candidates, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, help="default: 256 and 512; 64 where 16-bit products are slow"
    )
    parser.add_argument("--rounds", type=int, help="instead of each size's own number")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gemm = measure(products(), rounds=args.rounds or 10)
    rows = [
        [f"matrix product, {GEMM_SIZE}", name, f"{gemm.median(name) * 1e3:.2f}", str(gemm.ratio("fp32", name))]
        for name in gemm.seconds
    ]
    results = {"gemm": gemm.as_json()}
    is_emulated = gemm.ratio("fp32", "bf16").value < 0.5
    if is_emulated:
        print("this processor has no fast products in 16 bit: torch computes them far slower than in 32", flush=True)
    for size in (SIZES[name] for name in args.sizes or (["64"] if is_emulated else ["256", "512"])):
        candidates, missing = steps(size)
        result = measure(candidates, rounds=args.rounds or min(size.rounds, 12), calls=1 if is_emulated else size.calls)
        results[size.name] = result.as_json()
        for name in result.seconds:
            of_fp32 = result.ratio(f"{name.split()[0]} fp32", name)
            rows.append([size.name, name, f"{result.median(name) * 1e3:.2f}", str(of_fp32)])
        rows += [[size.name, name, "not implemented yet", ""] for name in missing]
    print(table(["what", "precision", "ms", "x fp32"], rows))
    print(f"wrote {write('precision', {'measured': results})}")


if __name__ == "__main__":
    main()
