"""The ``stepgraph`` command."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ..device import require_supported
from ..errors import ConfigError, StepGraphError
from ..graph import Phase
from ..planner import SPECS, Plan
from ..runtime.calibrated import calibration_path
from ..runtime.planning import parse_bytes
from .calibrate import calibrate
from .dump import Dump, Selection
from .job import load_job
from .norms import draw, norm_report
from .presets import PRESETS

_JOB = f"a preset ({', '.join(PRESETS)}), package.module:function, or a YAML or JSON file"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["demo"]:
        return _demo(arguments[1:])
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except StepGraphError as error:
        print(f"stepgraph: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `stepgraph dump ... | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepgraph", description="Look at compiled PyTorch training steps.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser(
        "demo",
        help="train a small GPT on real text; with --inject-inf 5, --spike 1e8 or --precision bf16 a small linear model, to "
        "show what a step log says",
    )
    dump = commands.add_parser("dump", help="print the graph of a training step", description="Prints a step graph.")
    dump.set_defaults(run=_dump)
    dump.add_argument("job", metavar="JOB", help=_JOB)
    dump.add_argument("--stage", choices=("rewritten", "captured"), default="rewritten", help="(%(default)s)")
    dump.add_argument("--phase", choices=[str(p) for p in Phase], help="only this phase")
    dump.add_argument("--module", metavar="PATH", help="only this module or parameter, and what is below it")
    dump.add_argument("--around", metavar="NODE", help="only the neighbourhood of %%36, of a key, or of a node name")
    dump.add_argument("--radius", type=_count, default=6, help="operators before and after --around (%(default)s)")
    dump.add_argument("--width", type=_count, default=100, help="longest line (%(default)s)")
    dump.add_argument("--no-fold", action="store_true", help="print repeated blocks and long operand lists in full")
    dump.add_argument("--json", action="store_true", help="one record for each operator")
    dump.add_argument(
        "--first", action="store_true", help="the first step, which creates the optimizer's state; runs nothing"
    )
    dump.add_argument("--numerics", choices=("exact", "fast"), help="instead of the job's")
    plan = commands.add_parser(
        "plan",
        help="what a training step needs in memory and time, and what to compute again within a budget",
        description="Captures and plans a step, and runs nothing. The model may be on the meta device, and the plan "
        "for other hardware.",
    )
    plan.set_defaults(run=_plan)
    plan.add_argument("job", metavar="JOB", help=_JOB)
    plan.add_argument(
        "--plan", default="auto", metavar="PLAN", help="none, sqrt, auto or the file of a plan (%(default)s)"
    )
    plan.add_argument("--budget", metavar="BYTES", help="peak of the whole step, such as 80GB or 24GiB")
    plan.add_argument(
        "--hardware", metavar="NAME", help=f"{', '.join(SPECS)}, or the file of a spec; by default this machine"
    )
    plan.add_argument("--frontier", action="store_true", help="peaks and times of the plans beside it")
    plan.add_argument("--save", type=Path, metavar="PATH", help="writes the plan, which plan= takes")
    calibration = commands.add_parser(
        "calibrate",
        help="measure what this machine can do, for the planner's clock",
        description="Measures operators of training steps at several sizes, in about a minute on a CPU, and keeps the "
        "result for this device, number of threads and version of torch. Plans made here then go by it.",
    )
    calibration.set_defaults(run=_calibrate)
    calibration.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (%(default)s)")
    calibration.add_argument("--threads", type=_count, help="threads of torch's operators on the CPU (as torch has it)")
    norms = commands.add_parser(
        "norms", help="what the gradient norms of a run say about max_norm", description="Reads the CSV of a step log."
    )
    norms.set_defaults(run=_norms)
    norms.add_argument("csv", type=Path, metavar="CSV", help="as log= of compile_train_step writes it")
    norms.add_argument(
        "--png", type=Path, metavar="PATH", help="the picture (beside the CSV, with the suffix .norms.png)"
    )
    norms.add_argument("--no-plot", action="store_true", help="print only")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _dump(args: argparse.Namespace) -> int:
    job = load_job(args.job)
    options = {} if args.numerics is None else {"numerics": args.numerics}
    step = job.compile(**options, lowering="eager")
    if not args.first:
        step(job.batch)  # creates the optimizer's state; what follows is the update of every later step
    rewritten = step.prepare(job.batch)
    graph = rewritten if args.stage == "rewritten" else step.captured_graph
    dump = Dump(graph, width=args.width, folds=not args.no_fold)
    phase = None if args.phase is None else Phase(args.phase)
    selection = Selection(phase, args.module, args.around, args.radius)
    print(json.dumps(dump.records(selection), indent=1) if args.json else dump.text(selection))
    return 0


def _plan(args: argparse.Namespace) -> int:
    job = load_job(args.job)
    budget = None if args.budget is None else parse_bytes(args.budget, "--budget")
    given = {"memory_budget": budget, "hardware": args.hardware}
    step = job.compile(plan=args.plan, lowering="eager", **{k: v for k, v in given.items() if v is not None})
    step.prepare(job.batch)
    plan = step.plan
    print(plan)
    if args.frontier:
        print("\n".join(_frontier(plan)))
    if args.save is not None:
        print(f"wrote {plan.save(args.save)}")
    return 0


def _frontier(plan: Plan) -> Iterator[str]:
    """Lines: peak, time, and a bar for the time beyond the fastest."""
    if not plan.frontier:
        yield "no frontier: everything fits, so nothing was searched"
        return
    fastest = min(seconds for _, seconds in plan.frontier)
    taken = plan.prediction.peak_bytes if plan.prediction is not None else 0
    yield f"{'peak bytes':>18} {'ms':>10}  slower"
    for peak_bytes, seconds in plan.frontier:
        slower, mark = seconds / fastest - 1, " <- this plan" if peak_bytes == taken else ""
        yield f"{peak_bytes:18,} {seconds * 1e3:10.2f}  {slower:6.1%} {'#' * round(100 * slower)}{mark}"


def _calibrate(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise ConfigError(f"--device must be cpu, cuda or cuda:1, got {args.device!r}") from error
    require_supported(device, "--device")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here")
    start = time.perf_counter()
    spec = calibrate(device, _progress_bar if sys.stderr.isatty() else lambda done, of, name: None)
    print(f"{spec.name}, in {time.perf_counter() - start:.0f} s")
    rates = ", ".join(f"{dtype} {rate / 1e9:.3g}" for dtype, rate in sorted(spec.matmul_flops.items()))
    print(f"  matrix products   {rates} GFLOP/s")
    print(f"  memory            {spec.memory_bytes_per_second / 1e9:.3g} GB/s")
    print(f"  exp               {spec.scalar_ops_per_second / 1e9:.3g} G/s")
    print(f"  disk              {spec.disk_bytes_per_second / 1e9:.3g} GB/s")
    each = spec.launch_seconds * spec.launch_factor
    print(f"  launch            {each * 1e6:.2g} us in a step, a step itself {spec.step_seconds * 1e6:.3g} us")
    print(f"wrote {calibration_path(device)}")
    return 0


def _progress_bar(done: int, of: int, name: str) -> None:
    width = 30
    filled = width * done // max(of, 1)
    line = "" if done == of else f"[{'#' * filled}{'.' * (width - filled)}] {100 * done // of:3d} %  {name}"
    sys.stderr.write(f"\r\033[K{line}")
    sys.stderr.flush()


def _norms(args: argparse.Namespace) -> int:
    report, points = norm_report(args.csv)
    print(report)
    if not args.no_plot:
        path = args.png or args.csv.with_suffix(".norms.png")
        draw(report, points, path)
        print(f"wrote {path}")
    return 0


_DEMO_HELP = """\
usage: stepgraph demo [options]
       stepgraph demo (--inject-inf STEP | --spike FACTOR | --precision fp32|bf16|fp16) [options]

The first trains a small GPT on real text and draws what it saw. The others take twenty steps of a linear model, by default in
fp16, and show what a step log says of an infinity, of targets that are FACTOR times too large, of a precision; they combine.

stepgraph demo --steps 1 --help        lists the options of the first
stepgraph demo --precision bf16 --help those of the others"""


def _demo(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(_DEMO_HELP)
        return 0
    is_about_numbers = any(a.partition("=")[0] in ("--inject-inf", "--spike", "--precision") for a in arguments)
    script = Path(__file__).parent.parent / "examples" / ("train_linear.py" if is_about_numbers else "train_gpt.py")
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
