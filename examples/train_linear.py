"""Twenty steps of a small linear model, and what the step log says when something goes wrong.

python examples/train_linear.py --inject-inf 5            # an infinity in the inputs of step 5: one SKIP line
python examples/train_linear.py --spike 1e8               # targets times 1e8 at one step: a spike of the loss
python examples/train_linear.py --precision bf16          # needs no loss scaling, skips nothing
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error in float32, whatever the model computes in."""
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets)


def batches(steps: int, inject_inf: int | None, spike: float | None) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of a linear map, the same at every call, one of them bad where that is asked for."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 32, generator=random)
    found = []
    for number in range(1, steps + 1):
        inputs = torch.randn(64, 32, generator=random)
        targets = inputs @ weight.T
        if number == inject_inf:
            inputs[0, 0] = torch.inf
        if spike is not None and number == max(1, steps // 2):
            targets = targets * spike
        found.append((inputs, targets))
    return found


def main() -> int:
    """Trains, prints one line a step, and returns 0 where the run ended well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp16", help="(%(default)s)")
    parser.add_argument("--inject-inf", type=int, metavar="STEP", help="puts an infinity into the inputs of this step")
    parser.add_argument("--spike", type=float, metavar="FACTOR", help="multiplies the targets of the middle step")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/linear"), metavar="DIR", help="the log (%(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be 1 or more")
    if arguments.inject_inf is not None and not 1 <= arguments.inject_inf <= arguments.steps:
        parser.error(f"--inject-inf must be a step from 1 to {arguments.steps}")

    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (arguments.out / "steps.csv").unlink(missing_ok=True)
    log = sg.StepLog(arguments.out / "steps.csv", console=True)
    scale: dict[str, Any] = {"loss_scale": sg.LossScale(init_scale=2.0**12)} if arguments.precision == "fp16" else {}
    step = sg.compile_train_step(
        model, optimizer, loss_fn=loss_fn, precision=arguments.precision, max_norm=1.0, log=log, **scale
    )
    skipped = sum(step(batch).skipped for batch in batches(arguments.steps, arguments.inject_inf, arguments.spike))
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    print(
        f"{arguments.steps} steps, {skipped} skipped; every parameter is {'finite' if finite else 'NOT finite'}; {log.path}"
    )
    return 0 if finite else 1


if __name__ == "__main__":
    sys.exit(main())
