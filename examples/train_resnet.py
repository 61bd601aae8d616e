"""ResNet-34 on CIFAR-10 with clipping by norm: SGD with momentum and weight decay, cosine schedule over 200 epochs.

Takes four steps and shows the loss and the first element of the first parameter after each; `--epochs 200` trains for good.
`--eager` takes the same steps by hand, with the same numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

# Both ways work: `python examples/train_resnet.py` from a clone, `python -m stepgraph.examples.train_resnet` once installed.
if __package__:
    from .images import Images, ImagesError, load_images
    from .resnet import ResNet34, first_parameter_element
else:
    from images import Images, ImagesError, load_images
    from resnet import ResNet34, first_parameter_element

import stepgraph as sg

EPOCHS = 200
MAX_NORM = 0.1
TakeStep = Callable[[tuple[Tensor, Tensor]], Tensor]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("DATA", "./data")), help="default: $DATA or ./data"
    )
    parser.add_argument("--batch", type=_positive, default=128)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--iterations", type=_positive, default=4, help="steps to take")
    length.add_argument("--epochs", type=_positive, help=f"whole epochs to train instead, of a schedule of {EPOCHS}")
    parser.add_argument("--eager", action="store_true", help="plain PyTorch, for comparison")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, eager: bool) -> TakeStep:
    """A function that takes one step on a batch of images and labels, and returns the loss."""
    criterion = nn.CrossEntropyLoss()
    if not eager:
        step = sg.compile_train_step(model, optimizer, criterion=criterion, max_norm=MAX_NORM)
        return lambda batch: step(batch).loss

    def by_hand(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(batch[0]), batch[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    return by_hand


def train(args: argparse.Namespace, images: Images) -> None:
    """Trains and prints as it goes."""
    torch.manual_seed(0)
    model = ResNet34().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    take_step = make_step(model, optimizer, eager=args.eager)
    generator = torch.Generator().manual_seed(0)
    done = 0
    for epoch in range(args.epochs or EPOCHS):
        began, loss = time.perf_counter(), 0.0
        for pixels, labels in images.batches(args.batch, generator):
            loss = float(take_step((pixels.to(args.device), labels.to(args.device))))
            done += 1
            if done <= 4 or not args.epochs:
                print(
                    f"iteration {done}: loss {loss:.6f}, first parameter {first_parameter_element(model):.8f}",
                    flush=True,
                )
            if not args.epochs and done == args.iterations:
                return
        scheduler.step()
        if args.epochs:
            seconds = time.perf_counter() - began
            print(
                f"epoch {epoch + 1}: last loss {loss:.4f}, lr {scheduler.get_last_lr()[0]:.5f}, {seconds:.0f} s",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        images = load_images(args.data)
        if args.batch > len(images.labels):
            raise ImagesError(f"--batch {args.batch} is more than the {len(images.labels)} images of {images.name}")
    except ImagesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if images.name != "CIFAR-10":
        print(f"no CIFAR-10 in {args.data}: training on {images.name} instead (set DATA, or --data FOLDER)")
    print(f"{len(images.labels):,} images, {'eager' if args.eager else 'compiled'} step, on {args.device}")
    train(args, images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
