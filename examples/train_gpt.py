"""Train a small byte-level GPT on Python's own documentation, with the whole training step as one graph.

python examples/train_gpt.py            # the compiled step, verified against eager first
python examples/train_gpt.py --eager    # the plain PyTorch loop: the same weights, bit for bit
python examples/train_gpt.py --budget 40MB   # within a memory budget: the same weights again
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from text import Batch, Corpus, TextError, read_text
from torch import Tensor, nn

MAX_NORM = 1.0
WARM_UP_STEPS = 30
HELD_OUT_POINTS = 10
SAMPLE_BYTES = 400
TEMPERATURE = 0.5

console = Console(highlight=False)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# ---- the training step, compiled and plain ---------------------------------------------------------------------------


def compiled_step(model: GPT, optimizer: torch.optim.Optimizer, numerics: str, budget: str | None) -> Any:
    """Forward, backward, norm, clip and update as one graph, planned to keep to a budget where there is one."""
    import stepgraph as sg

    return sg.compile_train_step(
        model, optimizer, plan="auto", memory_budget=budget, loss_fn=loss_fn, max_norm=MAX_NORM, numerics=numerics
    )


class EagerResult(NamedTuple):
    """What a plain step knows about itself, under the names that a compiled step uses."""

    loss: Tensor
    grad_norm: Tensor
    clip_factor: Tensor
    skipped: bool = False
    skip_reason: str | None = None
    applied: bool = True


def eager_step(model: GPT, optimizer: torch.optim.Optimizer) -> Callable[[Batch], EagerResult]:
    """The same step as everyone writes it by hand."""

    def step(batch: Batch) -> EagerResult:
        loss = loss_fn(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return EagerResult(loss.detach(), norm, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))

    return step


def make_optimizer(model: GPT, lr: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices, and leaves biases and norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 4))

    def factor(done: int) -> float:
        if done < warm_up:
            return (done + 1) / warm_up
        progress = min(1.0, (done - warm_up) / max(1, steps - warm_up))
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- what is recorded ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One training step, as it stands in the CSV."""

    step: int
    lr: float
    grad_l2_pre_clip: float
    grad_l2_post_clip: float
    loss: float
    skipped: bool
    skip_reason: str
    tokens_per_second: float

    @classmethod
    def of(cls, step: int, lr: float, result: Any, tokens_per_second: float) -> Row:
        norm = result.grad_norm.item()
        return cls(
            step=step,
            lr=lr,
            grad_l2_pre_clip=norm,
            grad_l2_post_clip=norm * result.clip_factor.item(),
            loss=result.loss.item(),
            skipped=bool(result.skipped),
            skip_reason=result.skip_reason or "",
            tokens_per_second=tokens_per_second,
        )

    def cells(self) -> list[str]:
        """Nine digits give a float32 back exactly."""
        return [f"{value:.9g}" if isinstance(value, float) else str(value) for value in astuple(self)]


@contextmanager
def csv_log(path: Path) -> Iterator[Callable[[Row], None]]:
    """A CSV that is complete up to its last row at any moment, however the run ends."""
    with path.open("w", newline="", encoding="utf-8", buffering=1) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Row))
        yield lambda row: writer.writerow(row.cells())


@dataclass
class History:
    """All rows so far, and the held-out loss by step."""

    rows: list[Row]
    held_out: dict[int, float]
    interrupted: bool = False


@torch.no_grad()
def evaluate(model: GPT, windows: Batch, batch_size: int = 32) -> float:
    """Mean loss over `windows`, without dropout."""
    model.eval()
    total = 0.0
    for inputs, targets in zip(windows[0].split(batch_size), windows[1].split(batch_size), strict=True):
        total += loss_fn(model, (inputs, targets)).item() * len(inputs)
    model.train()
    return total / len(windows[0])


def weights_sha256(model: nn.Module) -> str:
    """One fingerprint of all weights: equal exactly when every bit is."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# ---- training --------------------------------------------------------------------------------------------------------


class ProgressView:
    """A live bar on a terminal, an occasional line anywhere else."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.live = console.is_terminal
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/]  norm {task.fields[norm]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.live,
        )
        self.task = self.bar.add_task("", total=steps, loss="-", norm="-", speed="-")

    def __enter__(self) -> ProgressView:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, row: Row, speed: float) -> None:
        shown = {"loss": f"{row.loss:.3f}", "norm": f"{row.grad_l2_pre_clip:.2f}", "speed": f"{speed:,.0f}"}
        self.bar.update(self.task, completed=row.step, **shown)
        if not self.live and (row.step == 1 or row.step % max(1, self.steps // 10) == 0 or row.step == self.steps):
            line = "step {:>4}/{}  loss {loss}  norm {norm:>5}  {speed:>6} tokens/s"
            console.print(line.format(row.step, self.steps, **shown))


def train(
    args: argparse.Namespace, step: Callable[[Batch], Any], model: GPT, scheduler: Any, corpus: Corpus
) -> History:
    """Run all steps; an interrupt ends the run early and keeps what there is."""
    history = History(rows=[], held_out={})
    held_out = corpus.held_out_windows()
    measured = {round(args.steps * (i + 1) / HELD_OUT_POINTS) for i in range(HELD_OUT_POINTS)}
    speed = 0.0
    with csv_log(args.out / "train.csv") as log, ProgressView(args.steps) as view:
        try:
            for number in range(1, args.steps + 1):
                began = time.perf_counter()
                lr = scheduler.get_last_lr()[0]
                call = getattr(step, "measure", step) if number == args.steps else step
                result = call(corpus.batch(number))
                if result.applied:
                    scheduler.step()
                now = args.batch * args.context / (time.perf_counter() - began)
                speed = 0.9 * speed + 0.1 * now if speed else now
                row = Row.of(number, lr, result, now)
                history.rows.append(row)
                log(row)
                view.show(row, speed)
                if number in measured:
                    history.held_out[number] = evaluate(model, held_out)
        except KeyboardInterrupt:
            history.interrupted = True
    return history


# ---- the report ------------------------------------------------------------------------------------------------------


def smooth(values: list[float], reach: int = 10) -> list[float]:
    """Means over a few neighbours on both sides, fewer of them near the ends: smooth, and not late."""
    last = len(values) - 1
    reaches = [min(reach, i, last - i) for i in range(len(values))]
    return [sum(values[i - r : i + r + 1]) / (2 * r + 1) for i, r in enumerate(reaches)]


def plot(history: History, title: str, path: Path) -> None:
    """Loss above, gradient norm below, one shared axis of steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    blue, orange, grey, ink = "#2f6db5", "#e07b28", "#8a94a3", "#2b3340"
    steps = [row.step for row in history.rows]
    losses = [row.loss for row in history.rows]
    norms = [row.grad_l2_pre_clip for row in history.rows]
    dots = {"marker": "o", "linestyle": "", "markersize": 7.5, "markeredgecolor": "white", "zorder": 3}
    style = {
        "font.size": 11,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": grey,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e9ee",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(9, 5.6), dpi=160, sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        top.plot(steps, losses, color=blue, alpha=0.3, linewidth=1, label="train, each step")
        top.plot(steps, smooth(losses), color=blue, linewidth=2.2, label="train, smoothed")
        points = list(history.held_out.items())
        if points:
            top.plot(*zip(*points, strict=True), **dots, color=orange, label="held out, without dropout")
            last, value = points[-1]
            beside = {"xytext": (9, 0), "textcoords": "offset points", "va": "center"}
            top.annotate(f"{value:.2f}", (last, value), **beside, color=orange, fontweight="bold")
        top.set_ylabel("loss (nats per byte)")
        top.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
        top.legend(loc="upper right")

        above = [norm > MAX_NORM for norm in norms]
        filled = {"color": orange, "alpha": 0.35, "linewidth": 0, "interpolate": True}
        bottom.plot(steps, norms, color=blue, linewidth=1.2, label="before clipping")
        bottom.fill_between(steps, MAX_NORM, norms, where=above, **filled, label="clipped away")
        bottom.axhline(MAX_NORM, color=orange, linestyle="--", linewidth=1.4, label=f"max_norm = {MAX_NORM:g}")
        bottom.set_yscale("log")
        bottom.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bottom.yaxis.set_major_formatter("{x:g}")
        bottom.yaxis.set_minor_formatter(NullFormatter())
        bottom.set_ylabel("gradient norm")
        bottom.set_xlabel("step")
        bottom.set_xlim(0, max(steps) * 1.07)
        bottom.legend(loc="upper right", ncols=3)
        figure.align_ylabels()
        figure.savefig(path)
        plt.close(figure)


def print_sample(model: GPT, prompt: bytes, seed: int) -> None:
    """A continuation of held-out text: the prompt dim, what the model wrote bright."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    written = model.generate(prompt, SAMPLE_BYTES, temperature=TEMPERATURE, generator=generator)
    model.train()
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in written.decode(errors="replace"))
    sample = Text.assemble((prompt.decode(errors="replace"), "dim"), ("|", "bold cyan"), shown)
    console.print(f"\n[bold]Sample[/] (held-out prompt up to the |, temperature {TEMPERATURE:g})")
    for line in sample.split("\n"):
        console.print(Text("  ") + line, soft_wrap=True)
    console.print()


def print_table(title: str, lines: dict[str, str]) -> None:
    """Names on the left, values on the right."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in lines.items():
        table.add_row("  " + name, value)
    console.print(f"[bold]{title}[/]")
    console.print(table)
    console.print()


def print_plan(step: Any) -> None:
    """What the step needs in memory and time, predicted and measured in the last step, and what it computes again."""
    console.print("[bold]Plan[/]")
    for line in step.report().partition("captures:")[0].splitlines():
        console.print(Text("  " + line), soft_wrap=True)
    console.print()


def print_op_counts(step: Any) -> None:
    """How many operators the graph of one training step holds."""
    counts = step.graph.op_counts_by_phase()
    lines = {phase: f"{count:,}" for phase, count in counts.items()}
    print_table("Operators in the graph of one step", lines | {"total": f"{sum(counts.values()):,}"})


def print_losses(args: argparse.Namespace, model: GPT, corpus: Corpus, history: History, seconds: float) -> None:
    clipped = sum(row.grad_l2_pre_clip > MAX_NORM for row in history.rows)
    skipped = sum(row.skipped for row in history.rows)
    print_table(
        "Result",
        {
            "train loss, without dropout": f"{evaluate(model, corpus.train_windows()):.3f} nats/byte",
            "held-out loss": f"{history.held_out[args.steps]:.3f} nats/byte",
            "steps clipped / skipped": f"{clipped} / {skipped} of {args.steps}",
            "tokens": f"{args.steps * args.batch * args.context:,}",
            "training": f"{seconds:.1f} s",
        },
    )


# ---- the script ------------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's own documentation.")
    parser.add_argument("--eager", action="store_true", help="the plain PyTorch loop instead of the compiled step")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact", help="fast: compiled by Inductor")
    parser.add_argument("--budget", metavar="BYTES", help="memory for everything, such as 40MB")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the first step with eager")
    parser.add_argument("--steps", type=int, default=500, help="training steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (%(default)s)")
    parser.add_argument("--width", type=int, default=160, help="width of the residual stream (%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.05, help="dropout probability (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout, batches and the sample (%(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this text instead")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="results (%(default)s)")
    parser.add_argument("--save-weights", type=Path, metavar="PATH", help="save the final state_dict here")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "context", "layers", "heads", "width"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if not 0 <= args.dropout < 1:
        parser.error("--dropout must be at least 0 and below 1")
    if not (args.lr > 0 and math.isfinite(args.lr)):
        parser.error("--lr must be a positive number")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


def verify_first_step(step: Any, batch: Batch) -> bool:
    """Run step 1 beside plain PyTorch, and say whether every bit agrees, or with --numerics fast how far it is off."""
    report = step.verify(batch)
    verdict = (str(report), "green" if report.ok else "bold red")
    console.print(Text.assemble("step 1 against eager: ", verdict), soft_wrap=True)
    return bool(report.ok)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.eager:
        return run(args)
    from stepgraph import StepGraphError

    try:
        return run(args)
    except StepGraphError as error:  # a budget that makes no sense, or that no plan keeps to
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Trains, and prints and writes what came of it."""
    try:
        corpus = Corpus(read_text(args.text), context=args.context, batch_size=args.batch, seed=args.seed)
    except TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(256, args.context, args.layers, args.heads, args.width, args.dropout))
    optimizer = make_optimizer(model, args.lr)
    scheduler = make_scheduler(optimizer, args.steps)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    source = args.text.name if args.text else "Python's documentation"
    console.print(f"byte-level GPT, {millions:.2f} M parameters, {'eager' if args.eager else 'compiled'} step")
    console.print(f"{source}: {len(corpus.train):,} bytes to learn, {len(corpus.held_out):,} held out", markup=False)

    step = eager_step(model, optimizer) if args.eager else compiled_step(model, optimizer, args.numerics, args.budget)
    if not args.eager and not args.no_verify and not verify_first_step(step, corpus.batch(1)):
        console.print("stopped: the graph differs from eager (--no-verify trains all the same)")
        return 1

    began = time.perf_counter()
    history = train(args, step, model, scheduler, corpus)
    seconds = time.perf_counter() - began
    if history.rows:
        title = f"A GPT of {millions:.1f} M parameters learns from {source}"
        plot(history, title, args.out / "train.png")
    if history.interrupted:
        console.print(f"interrupted after {len(history.rows)} steps; their rows are in {args.out / 'train.csv'}")
        return 130

    print_sample(model, corpus.prompt, args.seed)
    print_losses(args, model, corpus, history, seconds)
    if not args.eager:
        print_plan(step)
        print_op_counts(step)
    if args.save_weights:
        args.save_weights.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.save_weights)
    console.print(f"wrote {args.out / 'train.csv'} and {args.out / 'train.png'}", soft_wrap=True)
    console.print(f"weights sha256 {weights_sha256(model)}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
