"""Values live no longer than in eager, gradients not longer than the step, and the weights are the module's own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stepgraph as sg

from . import fixtures, oracle


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._watch(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _watch(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.live += size

        def dead() -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.finalize(storage, dead)


def peak_of(run: Callable[[], Any]) -> int:
    """Highest number of bytes that the run's own tensors take at once, from torch's record of allocations."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    live = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert events, "the profiler recorded nothing"
    return peak


def deep(width: int = 128, depth: int = 12) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """Blocks with branches, whose values must not outlive their last use."""

    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(width, 2 * width), "b": nn.Linear(2 * width, width)}) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["b"](nn.functional.silu(block["a"](x)).square())
        return x


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "wide_batch": deep,
    "many_weights": lambda: deep(256, 6),
    "residual": Residual,
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_forloop", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", BUILDS)
def test_peak_is_no_higher_than_eager_s(name: str, max_norm: float | None, optimizer: str) -> None:
    """Eager frees its gradients after the step, as the graph does."""
    rows = 16 if name == "many_weights" else 512
    width = 256 if name == "many_weights" else 128
    batch = torch.randn(rows, width)
    eager, model = oracle.twin(BUILDS[name])
    eager_optimizer, built = (oracle.OPTIMIZERS[optimizer](m.parameters()) for m in (eager, model))

    def eager_step() -> None:
        loss = fixtures.mean_square(eager, batch)
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(eager.parameters(), max_norm)
        eager_optimizer.step()
        eager_optimizer.zero_grad(set_to_none=True)

    step = sg.compile_train_step(model, built, loss_fn=fixtures.mean_square, max_norm=max_norm)
    for _ in range(2):  # so that optimizer state exists in both, and everything is captured
        eager_step()
        step(batch)
    eager_peak, graph_peak = peak_of(eager_step), peak_of(lambda: step(batch))
    scalars = 4096  # norms and hyperparameters, 0-dim tensors that the allocator rounds up
    assert graph_peak <= eager_peak + scalars, f"{graph_peak} bytes against eager's {eager_peak}"


def test_nothing_but_the_results_outlives_a_step() -> None:
    model = deep()
    step = sg.compile_train_step(
        model, torch.optim.AdamW(model.parameters()), loss_fn=fixtures.mean_square, max_norm=1.0
    )
    batch = torch.randn(64, 128)
    for _ in range(2):
        step(batch)
    gc.collect()
    with LiveBytes() as bytes_:
        result = step(batch)
        assert bytes_.peak > 64 * 128 * 4 * 12
        assert bytes_.live <= 256, "the loss, the norm, the factor"
        del result


def test_no_tensors_pile_up_over_steps() -> None:
    model = deep(32, 4)
    step = sg.compile_train_step(
        model, torch.optim.AdamW(model.parameters()), loss_fn=fixtures.mean_square, max_norm=1.0
    )

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    batch = torch.randn(8, 32)
    for _ in range(3):
        step(batch)
    before = tensors()
    for _ in range(5):
        step(batch)
    assert tensors() == before


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw_forloop", "adamw_foreach", "adamw_fused"])
def test_gradients_are_not_kept(optimizer: str) -> None:
    fixture = fixtures.mlp()
    built = oracle.OPTIMIZERS[optimizer](fixture.model.parameters())
    step = sg.compile_train_step(fixture.model, built, loss_fn=fixture.loss_fn, max_norm=1.0)
    for _ in range(3):
        step(fixture.batch)
        assert all(p.grad is None for p in fixture.model.parameters())


def test_gradients_that_were_there_are_left_alone() -> None:
    fixture, plain = fixtures.mlp(), fixtures.mlp()
    steps = [
        sg.compile_train_step(f.model, torch.optim.SGD(f.model.parameters(), lr=0.1), loss_fn=f.loss_fn)
        for f in (fixture, plain)
    ]
    old = {p: torch.full_like(p, 7.0) for p in fixture.model.parameters()}
    for parameter, grad in old.items():
        parameter.grad = grad
    for step in steps:
        step(fixture.batch)
    for parameter, twin in zip(fixture.model.parameters(), plain.model.parameters(), strict=True):
        assert parameter.grad is old[parameter]
        assert bool((parameter.grad == 7.0).all())
        assert torch.equal(parameter, twin), "an old gradient takes no part in the step"


def test_batch_is_not_kept_alive() -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    for _ in range(2):
        batch = tuple(t.clone() for t in fixture.batch)
        alive = [weakref.ref(t) for t in batch]
        step(batch)
        del batch
        gc.collect()
        assert all(ref() is None for ref in alive)


def test_compiled_step_does_not_keep_the_model_alive_in_a_registry() -> None:
    fixture = fixtures.mlp()
    alive = weakref.ref(fixture.model)
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixtures.squared_error
    )
    step(fixture.batch)
    del step, fixture
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", ["MLP", "BN", "TIED"])
def test_module_sees_the_new_weights_after_each_step(name: str) -> None:
    make = fixtures.FIXTURES[name]
    fixture, eager = make(), make()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    eager_optimizer = torch.optim.SGD(eager.model.parameters(), lr=0.1)
    before = [(p, p.data_ptr()) for p in fixture.model.parameters()]
    for batch in fixtures.batches(make, 4):
        step(batch)
        eager.loss_fn(eager.model, batch).backward()
        eager_optimizer.step()
        eager_optimizer.zero_grad()
        x = batch[0] if isinstance(batch, tuple) else batch
        for module in (fixture.model, eager.model):
            module.eval()
        with torch.no_grad():
            assert torch.equal(fixture.model(x), eager.model(x))
        for module in (fixture.model, eager.model):
            module.train()
    assert before == [(p, p.data_ptr()) for p in fixture.model.parameters()], "updated in place"


def test_module_can_be_trained_in_eager_between_steps() -> None:
    fixture, eager = fixtures.mlp(), fixtures.mlp()
    optimizer, eager_optimizer = (torch.optim.AdamW(f.model.parameters(), lr=0.1) for f in (fixture, eager))
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    zero = torch.zeros(())
    for number, batch in enumerate(fixtures.batches(fixtures.mlp, 6)):
        for f, o in ((fixture, optimizer), (eager, eager_optimizer)):
            if f is fixture and number % 2:
                step(batch)
                continue
            f.loss_fn(f.model, batch).backward()
            o.step()
            o.zero_grad()
        oracle.assert_bitwise(
            oracle.snapshot(eager.model, eager_optimizer, number, zero, zero),
            oracle.snapshot(fixture.model, optimizer, number, zero, zero),
        )


def test_results_do_not_change_under_later_steps() -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(
        fixture.model,
        torch.optim.SGD(fixture.model.parameters(), lr=0.1),
        loss_fn=lambda m, b: ((loss := fixtures.squared_error(m, b)), {"loss": loss, "out": m(b[0])}),
        max_norm=1.0,
    )
    first = step(fixture.batch)
    kept = [t.clone() for t in (first.loss, first.grad_norm, first.clip_factor, first.aux["loss"], first.aux["out"])]
    for _ in range(3):
        step(fixture.batch)
    now = (first.loss, first.grad_norm, first.clip_factor, first.aux["loss"], first.aux["out"])
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_executor_frees_each_value_after_its_last_use() -> None:
    """The generated code deletes every value but the results."""
    fixture = fixtures.mlp()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn, max_norm=1.0
    )
    step.prepare(fixture.batch)
    _, variant, _ = step._captures.find(fixture.batch)
    deleted = {
        name.strip()
        for line in variant.executor.source.splitlines()
        if line.strip().startswith("del ")
        for name in line.strip().removeprefix("del ").split(",")
    }
    values = [f"v{i}" for i, _ in enumerate(variant.graph.calls)] + [
        f"i{i}" for i, _ in enumerate(variant.graph.inputs)
    ]
    returned = variant.executor.source.splitlines()[-1]
    for name in values:
        is_returned = name in returned.replace("[", " ").replace("]", " ").replace(",", " ").split()
        assert (name in deleted) is not is_returned, name
