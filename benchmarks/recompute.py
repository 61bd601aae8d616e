"""Time against peak: plans at several budgets, beside what else there is to save activation memory.

A Llama-shaped model of 12 layers, hidden size 256, four sequences of 256 tokens, fused AdamW; others with ``--model``. Beside
it, in the same rounds: eager; eager with ``torch.utils.checkpoint`` around each layer; ``torch.compile`` with
``activation_memory_budget`` by each of its solvers, and no compiler behind the partitioner. Settings that give the same
graphs are measured once. Peaks are the allocator's, of a whole step, above parameters and optimizer state; plans are made for
the peaks of what else there is, and each of those is compared with the fastest plan that needs no more memory.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Measurement, measure, table, write
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.device import allocation_peak

BARS = {250: 1.01, 180: 1.03, 140: 1.06, 112: 1.09, 85: 1.18}
LEAST_MB = 72
SOLVERS = ("dp", "ilp", "greedy")
Call = Callable[[], Any]
Batch = dict[str, Tensor]


def _text(model: Any, tokens: int, vocabulary: int) -> Batch:
    ids = torch.randint(0, vocabulary, (4, tokens))
    return {"input_ids": ids, "labels": ids.clone()}


def _images(size: int, count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(0, 10, (count,))}


def _models(layers: int, hidden: int) -> dict[str, Callable[[Any], tuple[nn.Module, Batch]]]:
    """By name: from the transformers library to a model in train mode and a batch."""
    wide = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * hidden,
    }

    def causal(t: Any, config: Any) -> tuple[nn.Module, Batch]:
        return t.AutoModelForCausalLM.from_config(config).train(), _text(config, 256, config.vocab_size)

    return {
        "llama": lambda t: causal(
            t, t.LlamaConfig(**wide, num_key_value_heads=4, vocab_size=1000, use_cache=False)
        ),
        "gpt2": lambda t: causal(
            t, t.GPT2Config(n_embd=hidden, n_layer=layers, n_head=4, vocab_size=1000, use_cache=False)
        ),
        "bert": lambda t: (t.BertForMaskedLM(t.BertConfig(**wide, vocab_size=1000)).train(), _text(t, 256, 1000)),
        "t5": lambda t: (
            t.T5ForConditionalGeneration(
                t.T5Config(
                    d_model=hidden, num_layers=layers // 2, num_heads=4, d_kv=hidden // 4, d_ff=4 * hidden, vocab_size=1000,
                    use_cache=False, decoder_start_token_id=0,
                )
            ).train(),
            _text(t, 128, 1000),
        ),
        "vit": lambda t: (
            t.ViTForImageClassification(t.ViTConfig(**wide, image_size=64, patch_size=8, num_labels=10)).train(),
            _images(64, 16),
        ),
        "resnet": lambda t: (
            t.ResNetForImageClassification(
                t.ResNetConfig(
                    embedding_size=32, hidden_sizes=[64, 128, 256], depths=[3, 4, 3], layer_type="basic", num_labels=10
                )
            ).train(),
            _images(64, 16),
        ),
    }  # fmt: skip


MODELS = tuple(_models(2, 32))


def build(name: str = "llama", layers: int = 12, hidden: int = 256) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """The same weights at every call, a fused AdamW, and a batch."""
    import transformers

    torch.manual_seed(0)
    model, batch = _models(layers, hidden)[name](transformers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), batch


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Call:
    """A step by hand."""

    def run() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def eager(checkpoints: bool = False, **sizes: Any) -> Call:
    """Eager, with or without a checkpoint around each layer."""
    model, optimizer, batch = build(**sizes)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return loop(model, optimizer, batch)


def partitioned(budget: float, solver: str, **sizes: Any) -> tuple[Call, str]:
    """``activation_memory_budget``, the operators as eager runs them; and a digest of the graphs that this gives."""
    import torch._functorch.config as functorch_config
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.backends.common import aot_autograd

    digest = hashlib.sha256()

    def as_it_is(module: torch.fx.GraphModule, inputs: Any) -> Call:
        digest.update(module.code.encode())
        return make_boxed_func(module.forward)

    model, optimizer, batch = build(**sizes)
    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=min_cut_rematerialization_partition)
    run = loop(torch.compile(model, backend=backend), optimizer, batch)
    setting = {"activation_memory_budget": budget, "activation_memory_budget_solver": solver}
    with (
        functorch_config.patch(setting),
        dynamo_config.patch(recompile_limit=1000, accumulated_recompile_limit=1000, fail_on_recompile_limit_hit=True),
    ):
        run()
    return run, digest.hexdigest()


def planned(plan: str, megabytes: float | None, **sizes: Any) -> tuple[Call, sg.TrainStep]:
    """A compiled step at a budget above parameters and optimizer state."""
    model, optimizer, batch = build(**sizes)
    budget = None if megabytes is None else int(held_bytes(model) + megabytes * 1e6)
    step = sg.compile_train_step(model, optimizer, plan, memory_budget=budget)
    step.prepare(batch)
    return (lambda: step(batch)), step


def peers(shares: list[float], solvers: list[str], **sizes: Any) -> Iterator[tuple[str, Call]]:
    """What else there is, by name. Not every model can be checkpointed or compiled."""
    yield "eager", eager(**sizes)
    try:
        yield "eager, checkpoint each layer", eager(checkpoints=True, **sizes)
    except ValueError as error:
        print(f"this model cannot be checkpointed by layer: {error}")
    found: dict[str, str] = {}
    for solver, share in itertools.product(solvers, shares):
        if share in (0, 1) and solver != solvers[0]:
            continue  # no solver is asked: everything that can be is computed again, or nothing
        name = f"{solver} {share:g}"
        try:
            call, graphs = partitioned(share, solver, **sizes)
        except Exception as error:
            print(
                f"activation_memory_budget {name} does not run: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
            )
            continue
        if graphs in found:
            print(f"activation_memory_budget {name} gives the graphs of {found[graphs]}")
            continue
        found[graphs] = name
        yield f"activation_memory_budget {name}", call


def held_bytes(model: nn.Module) -> int:
    """Parameters and their optimizer state."""
    return 3 * sum(p.numel() * p.element_size() for p in model.parameters())


def plans(asked: list[tuple[str, float | None]], **sizes: Any) -> Iterator[tuple[str, Call, float]]:
    """Names, calls and predicted peaks in MB."""
    made: set[float] = set()
    for plan, megabytes in asked:
        try:
            call, step = planned(plan, megabytes, **sizes)
        except sg.PlanError as error:
            print(f"no plan at {megabytes:g} MB: {error}")
            continue
        assert step.plan.prediction is not None
        if plan == "auto" and step.plan.prediction.peak_bytes in made:
            continue  # what a smaller budget gave
        made.add(step.plan.prediction.peak_bytes)
        name = f'plan="{plan}"' + ("" if megabytes is None else f" at {megabytes:g} MB")
        yield name, call, (step.plan.prediction.peak_bytes - held_bytes(step.model)) / 1e6


def run(rounds: int, budgets: list[float], shares: list[float], solvers: list[str], **sizes: Any) -> dict[str, Any]:
    """Measures, prints the table and returns what is written."""
    calls: dict[str, Call] = {}
    predicted: dict[str, float | None] = {}
    peaks: dict[str, float] = {}

    def add(name: str, call: Call, megabytes: float | None = None) -> None:
        call()
        call()
        peaks[name] = allocation_peak(call, torch.device("cpu"))[1] / 1e6
        calls[name], predicted[name] = call, megabytes
        print(f"{name} is ready: {peaks[name]:.1f} MB", flush=True)

    for name, call in peers(shares, solvers, **sizes):
        add(name, call)
    for name, call, megabytes in plans([("none", None), ("sqrt", None)], **sizes):
        add(name, call, megabytes)
    limits = sorted({*budgets, *(round(p, 1) for p in peaks.values())})
    for name, call, megabytes in plans([("auto", limit) for limit in limits], **sizes):
        add(name, call, megabytes)
    times = measure(calls, rounds=rounds)
    rows = []
    for name in sorted(calls, key=lambda name: -peaks[name]):
        bar = next((f"{b:.2f}" for megabytes, b in BARS.items() if name.endswith(f"at {megabytes:g} MB")), "")
        told = "" if predicted[name] is None else f"{predicted[name]:.1f}"
        rows.append(
            [name, told, f"{peaks[name]:.1f}", f"{times.median(name) * 1e3:.0f}", str(times.ratio(name, "eager")), bar]
        )
    print(f"{times.discarded} rounds were disturbed")
    print(table(["how", "predicted MB", "peak MB", "ms", "x eager", "bar"], rows))
    beside = beaten(peaks, times)
    print(
        table(
            ["what else there is", "peak MB", "the fastest plan below it", "peak MB", "its time over that one's"],
            beside,
        )
    )
    return {
        "sizes": sizes,
        **times.as_json(),
        "peak_mb": peaks,
        "predicted_mb": predicted,
        "x_eager": {name: vars(times.ratio(name, "eager")) for name in calls},
        "beaten": [
            dict(zip(("how", "peak_mb", "plan", "plan_peak_mb", "time_ratio"), row, strict=True)) for row in beside
        ],
    }


def beaten(peaks: dict[str, float], times: Measurement) -> list[list[str]]:
    """For what no search of ours made: its peak, the fastest plan that peaks no higher, its peak, the ratio of their times."""
    rows = []
    for name in peaks:
        if not name.startswith('plan="auto"') and name != 'plan="none"':
            below = [p for p in peaks if p.startswith('plan="auto"') and peaks[p] <= peaks[name]]
            best = min(below, key=times.median, default=None)
            found = [best, f"{peaks[best]:.1f}", str(times.ratio(best, name))] if best else ["none", "", ""]
            rows.append([name, f"{peaks[name]:.1f}", *found])
    return rows


def draw(results: dict[str, Any], path: Path) -> None:
    """Peaks against times, plans as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    seconds, peaks = results["median_seconds"], results["peak_mb"]
    plans = sorted((peaks[n], 1e3 * seconds[n]) for n in peaks if n.startswith(('plan="auto"', 'plan="none"')))
    axes.plot(*zip(*plans, strict=True), "o-", label="stepgraph, by budget")
    for name, mark in (("eager", "s"), ("activation_memory_budget", "x"), ('plan="sqrt"', "^")):
        for number, n in enumerate(n for n in peaks if n.startswith(name)):
            axes.plot(peaks[n], 1e3 * seconds[n], mark, color=f"C{' sx^'.index(mark)}", label=None if number else name)
            label = n.removeprefix(name).lstrip(", ")
            aside = {"xytext": (-6, -2), "ha": "right"} if label.startswith("ilp") else {"xytext": (6, -2)}
            axes.annotate(label, (peaks[n], 1e3 * seconds[n]), textcoords="offset points", fontsize=7, **aside)
    axes.set(xlabel="peak above parameters and optimizer state, MB", ylabel="milliseconds a step")
    axes.margins(x=0.1)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--budgets",
        type=float,
        nargs="*",
        default=[],
        help="MB above parameters and state, beside the peaks of what else there is",
    )
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[1.0, 0.75, 0.5, 0.25, 0.1, 0.0], help="activation_memory_budget"
    )
    parser.add_argument("--solvers", nargs="*", choices=SOLVERS, default=SOLVERS, help="of activation_memory_budget")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    budgets = arguments.budgets + ([*BARS, LEAST_MB] if arguments.model == "llama" else [])
    results = run(
        arguments.rounds, budgets, arguments.shares, arguments.solvers, name=arguments.model, layers=arguments.layers
    )
    file = f"recompute-{arguments.model}"
    print(f"wrote {write(file, results)}")
    draw(results, RESULTS / f"{file}.png")


if __name__ == "__main__":
    main()
