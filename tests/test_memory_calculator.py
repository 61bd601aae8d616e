"""What textbooks say about the memory of a 7B model, out of captures of a Llama of that size on the meta device.

The attention is written out, with its softmax in 16 bit, as those figures assume; weights are bfloat16 with fp32 masters.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.graph import InputRole, OutputRole, Phase, storage_bytes
from stepgraph.planner.cost import flops_of
from stepgraph.planner.memory import ACTIVATIONS, MASTERS, PARAMETERS, STATE

transformers = pytest.importorskip("transformers")
LAYERS, HIDDEN, TOKENS, HEADS = 32, 4096, 8192, 32
GB = 1e9


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    scores = query @ key.transpose(2, 3) * scaling + (0.0 if mask is None else mask)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def _step(layers: int, *, tokens: int = TOKENS, batch: int = 1, **options: Any) -> tuple[sg.TrainStep, Any]:
    transformers.AttentionInterface.register("plain", _plain_attention)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        vocab_size=32000,
        max_position_embeddings=TOKENS,
        use_cache=False,
        attn_implementation="plain",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(batch, tokens, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return sg.compile_train_step(model, optimizer, hardware="a100", **options), {
        "input_ids": ids,
        "labels": ids.clone(),
    }


class Figures(NamedTuple):
    """Bytes, of a step in which nothing is computed again."""

    numbers: float  # of parameters
    parameters: float
    gradients: float
    masters: float
    state: float
    activations: float
    forward_flops: float
    backward_flops: float

    @property
    def static(self) -> float:
        """What depends on neither batch nor sequence."""
        return self.parameters + self.gradients + self.masters + self.state


@functools.cache
def figures(layers: int, batch: int = 1) -> Figures:
    step, inputs = _step(layers, batch=batch, plan="none")
    graph = step.prepare(inputs)
    found = step.plan.prediction.by_category
    flops = {phase: sum(flops_of(n) for n in graph.calls if n.meta["phase"] is phase) for phase in Phase}
    return Figures(
        sum(n.meta["val"].numel() for n in graph.input_nodes(InputRole.PARAM).values()),
        found[PARAMETERS],
        sum(storage_bytes(n) for n in step.captured_graph.output_nodes(OutputRole.GRAD).values()),
        found[MASTERS],
        found[STATE],
        sum(d.bytes for d in step.plan.decisions),
        flops[Phase.FORWARD],
        flops[Phase.BACKWARD],
    )


def at_32_layers(batch: int = 1) -> Figures:
    """Everything is linear in the number of layers."""
    two, three = figures(2, batch), figures(3, batch)
    return Figures(*(a + (LAYERS - 2) * (b - a) for a, b in zip(two, three, strict=True)))


@pytest.mark.feature("MEM-1", "MEM-2", "MEM-3", "MEM-4")
def test_static_memory_is_16_bytes_a_parameter() -> None:
    found = at_32_layers()
    per_layer = figures(3).numbers - figures(2).numbers
    assert per_layer == pytest.approx(12 * HIDDEN**2, rel=0.01), "12 h² a layer"
    assert found.numbers == pytest.approx(7e9, rel=0.04)
    per_parameter = [v / found.numbers for v in (found.parameters, found.gradients, found.masters, found.state)]
    assert per_parameter == pytest.approx([2, 2, 4, 8], rel=1e-6)
    assert found.static == pytest.approx(112 * GB, rel=0.04)
    twice = at_32_layers(batch=2)
    assert twice.static == found.static, "only activations depend on the batch"
    assert found.parameters == pytest.approx(2 * found.numbers), "inference: two bytes a parameter"


@pytest.mark.feature("MEM-5", "MEM-11", "CKPT-9")
def test_activations_of_a_layer() -> None:
    step, inputs = _step(2, plan="none")
    step.prepare(inputs)
    of_layer = [d for d in step.plan.decisions if d.value.startswith("model.layers.1.")]
    sizes = [d.bytes for d in of_layer]
    assert sizes.count(TOKENS * HIDDEN * 2) >= 5, "67 MB each"
    square = HEADS * TOKENS**2 * 2
    assert sizes.count(square) == 1, "4.3 GB, without FlashAttention"
    assert square == pytest.approx(4.3 * GB, rel=0.01)
    linear = (sum(sizes) - square) / (TOKENS * HIDDEN * 2)
    assert 10 < linear < 23, "10 to 20 times b s h, and two norms in fp32"
    assert sum(sizes) > 5 * GB
    step, inputs = _step(2, plan="none", loss_fn=_with_fused_attention)
    step.prepare(inputs)
    assert max(d.bytes for d in step.plan.decisions if d.value.startswith("model.layers.1.")) < 0.2 * GB, (
        "s² is not stored"
    )


def _with_fused_attention(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    before = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    try:
        loss: Tensor = model(**batch).loss
    finally:
        model.config._attn_implementation = before
    return loss


@pytest.mark.feature("MEM-11")
def test_totals() -> None:
    found = at_32_layers()
    assert found.activations == pytest.approx(160 * GB, rel=0.2)
    assert found.static + found.activations == pytest.approx(270 * GB, rel=0.1)
    per_batch = at_32_layers(batch=2).activations - found.activations
    assert found.activations + 7 * per_batch == pytest.approx(1280 * GB, rel=0.2)


@pytest.mark.feature("CKPT-3")
def test_computing_everything_again_costs_a_third() -> None:
    found = at_32_layers()
    assert found.forward_flops / (found.forward_flops + found.backward_flops) == pytest.approx(1 / 3, rel=0.02)


@pytest.mark.slow
@pytest.mark.feature("MEM-9", "MEM-11", "CKPT-8")
def test_a_budget_brings_160_gb_of_activations_to_30() -> None:
    """All 32 layers, in little more than half of the 270 GB."""
    step, inputs = _step(LAYERS, plan="auto", memory_budget=int(138 * GB))
    step.prepare(inputs)
    plan = step.plan
    assert plan.prediction.peak_bytes <= plan.budget_bytes
    assert plan.prediction.by_category[ACTIVATIONS] < 30 * GB
    again = [d for d in plan.decisions if not d.keeps]
    assert sum(d.bytes == HEADS * TOKENS**2 * 2 for d in again) >= LAYERS - 4, "the softmax first of all"
    assert plan.prediction.extra_seconds / plan.prediction.seconds < 0.25
    assert plan.gap <= 0.01


def test_a_model_on_meta_is_planned_as_a_real_one_and_does_not_run() -> None:
    def plan(device: str, budget: int | None = None) -> tuple[sg.Plan, Any]:
        with torch.device(device):
            model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
            batch = torch.zeros(128, 64)
        step = sg.compile_train_step(
            model,
            torch.optim.AdamW(model.parameters(), foreach=True),
            memory_budget=budget,
            hardware="cpu",
            loss_fn=lambda m, x: m(x).square().mean(),
        )
        step.prepare(batch)
        return step.plan, lambda: step(batch)

    budget = int(0.9 * plan("meta")[0].prediction.peak_bytes)
    (on_meta, run), (real, _) = plan("meta", budget), plan("cpu", budget)
    assert on_meta.to_json() == real.to_json()
    assert on_meta.repeats
    with pytest.raises(sg.ConfigError, match="on the meta device"):
        run()
