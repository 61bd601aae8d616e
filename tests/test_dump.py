"""`stepgraph dump`: golden texts of three models, selections, jobs of every kind, and errors that say what to do."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph as sg
from stepgraph.tools.cli import main
from stepgraph.tools.job import load_job
from stepgraph.tools.presets import PRESETS

GOLDEN = Path(__file__).parent / "golden"


def dumped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["dump", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("job", ["llama-tiny", "bert-tiny", "resnet-tiny"])
def test_golden(job: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    text = dumped(capsys, job)
    path = GOLDEN / "dump" / f"{job}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()
    assert max(map(len, text.splitlines())) <= 100


def test_one_parameter_is_followed_through_norm_clip_and_update(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    text = dumped(capsys, "llama-tiny", "--module", name)
    (number,) = [
        line.split()[0] for line in dumped(capsys, "llama-tiny", "--no-fold").splitlines() if line.endswith(name)
    ][:1]
    lines = text.splitlines()
    assert [line.strip().split(" = ")[1].split("(")[0] for line in lines if " = " in line] == [
        "_foreach_norm",
        "stepgraph.nonfinite_code",
        "_foreach_mul_",
        "_foreach_add_",
        "stepgraph.fused_adamw_",
    ]
    assert f"[{number} and 20 others]" in text


def test_phase_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    text = dumped(capsys, "llama-tiny", "--phase", "forward", "--module", "model.layers.1.mlp", "--stage", "captured")
    assert text.splitlines()[0].startswith("forward: ")
    assert {line.strip() for line in text.splitlines() if line.startswith("  model")} == {
        f"model.layers.1.mlp{end}" for end in ("", ".gate_proj", ".up_proj", ".down_proj", ".act_fn")
    }


def test_around(capsys: pytest.CaptureFixture[str]) -> None:
    by_key = dumped(capsys, "llama-tiny", "--around", "norm/clamp#0@norm", "--radius", "2")
    assert by_key.splitlines()[0] == "norm/clamp#0@norm f32[]"
    (marked,) = [line for line in by_key.splitlines() if line.startswith(" -> ")]
    assert sum(" = " in line for line in by_key.splitlines()) == 5
    assert dumped(capsys, "llama-tiny", "--around", marked.split()[1], "--radius", "2") == by_key


def test_json_and_folding(capsys: pytest.CaptureFixture[str]) -> None:
    records = json.loads(dumped(capsys, "llama-tiny", "--json", "--phase", "update"))
    assert records[-1]["operator"] == "stepgraph.fused_adamw_.default"
    assert set(records[0]) == {"number", "key", "operator", "phase", "module", "type", "bytes", "operands", "source"}
    folded, full = dumped(capsys, "llama-tiny"), dumped(capsys, "llama-tiny", "--no-fold")
    assert "operators, as in model.layers.1" in folded
    assert "as in" not in full
    assert len(full.splitlines()) > len(folded.splitlines()) + 100


def test_the_first_update_and_the_fast_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert "exp_avg" in dumped(capsys, "llama-tiny", "--first").rpartition("outputs")[2]
    assert "stepgraph.pack" in dumped(capsys, "llama-tiny", "--numerics", "fast", "--phase", "update")


@pytest.mark.parametrize("name", [p for p in PRESETS if p != "gpt2"])
def test_every_preset_is_captured(name: str) -> None:
    job = load_job(name)
    step = job.compile()
    assert step.prepare(job.batch).op_counts_by_phase().keys() == {"forward", "backward", "norm", "update"}


# Jobs

MODULE = """
import torch, stepgraph as sg
def job():
    model = torch.nn.Linear(4, 2)
    return sg.Job(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 4), loss_fn=lambda m, x: m(x).sum())
def nothing():
    return 3
"""


@pytest.mark.feature("CLIP-22")
def test_jobs_from_a_function_and_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_job_module.py").write_text(MODULE)
    (tmp_path / "job.yaml").write_text("job: my_job_module:job\noptions: {max_norm: 0.5}\n")
    (tmp_path / "job.json").write_text(json.dumps({"job": "my_job_module:job", "options": {"max_norm": 0.5}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert "norm: 4 operators" not in dumped(capsys, "my_job_module:job")
    assert "clamp" not in dumped(capsys, "my_job_module:job")
    for path in ("job.yaml", "job.json"):
        assert "clamp" in dumped(capsys, path)
    assert isinstance(load_job("my_job_module:job"), sg.Job)
    sys.modules.pop("my_job_module")


WRONG: dict[str, tuple[list[str], str]] = {
    "no such preset": (["lama"], "is no job: give a preset"),
    "no such module": (["no_such_module_here:job"], "No module named"),
    "no such function": (["json:job"], "has no attribute 'job'"),
    "not a job": (["json:JSONDecoder"], "returned a JSONDecoder"),
    "no such file": (["missing.yaml"], "No such file"),
    "no such module path": (["llama-tiny", "--module", "layers"], "module 'layers' selects no operator"),
    "no such node": (["llama-tiny", "--around", "%99999"], "no operator is called '%99999'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_one_line_and_say_what_to_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, says = WRONG[name]
    assert main(["dump", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("stepgraph: ")
    assert says in error
    assert "Traceback" not in error


@pytest.mark.parametrize("text", ["- a", "jobs: x", "job: [1", "job: llama-tiny\nextra: 1"])
def test_wrong_job_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(sg.ConfigError, match="job file"):
        load_job(str(path))


def test_a_fake_batch_can_be_prepared_for_a_dump() -> None:
    """As a job may hold one: nothing is run, so only the first step can be shown."""
    model = nn.Linear(4, 2)
    job: Any = sg.Job(
        model,
        torch.optim.SGD(model.parameters()),
        torch.ones(3, 4, device="meta"),
        loss_fn=lambda m, x: m(x).sum(),
    )
    assert job.compile().prepare(job.batch).op_counts()["aten.t.default"] >= 1


def test_a_parameter_s_way_through_norm_clip_and_update_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Every number in the lines is said to be something, and each stage what it does."""
    name = "model.layers.0.self_attn.q_proj.weight"
    text = dumped(capsys, "llama-tiny", "--module", name)
    legend = dict(re.findall(r"^    (%\d+)  \S+  (.*)$", text.partition("\nnorm: ")[0], re.MULTILINE))
    by_meaning = {what: number for number, what in legend.items()}
    assert {
        f"param {name}",
        f"gradient of {name}",
        "the norm",
        "the factor of clipping",
        "hyper group.0.lr",
    } <= by_meaning.keys()
    grad = by_meaning[f"gradient of {name}"]
    assert re.search(rf"_foreach_norm\(\[{grad} and .*?# a norm for each gradient", text, re.DOTALL)
    assert re.search(
        rf"_foreach_mul_\(\[{grad} and .*{by_meaning['the factor of clipping']}\).*# clips the gradients", text
    )
    assert re.search(rf"stepgraph.fused_adamw_\(\[{by_meaning[f'param {name}']} and .*\[{grad} and", text)
    shown = set(re.findall(r"%\d+", text.partition("\nnorm: ")[2]))
    defined = set(re.findall(r"^    (%\d+) =", text, re.MULTILINE))
    assert shown - defined <= legend.keys()


def job_that_wants_an_argument(size: int) -> Any:
    raise AssertionError(size)


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ("job: llama-tiny\noptions: {max_nrom: 0.25}\n", "did you mean max_norm"),
        ("job: llama-tiny\noptions: {zzz: 1}\n", "options are .*max_norm"),
        ("job: llama-tiny\noptions: [1]\n", "names and values"),
        ("job: llama-tiny\nmax_norm: 0.25\n", "under options"),
    ],
)
def test_mistakes_in_a_job_file_are_told(tmp_path: Path, contents: str, says: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(contents)
    with pytest.raises(sg.ConfigError, match=says) as caught:
        load_job(str(file))
    assert str(file) in str(caught.value)


def test_a_job_function_that_wants_arguments_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("jobs_of_a_test")
    module.job = job_that_wants_an_argument  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jobs_of_a_test", module)
    with pytest.raises(sg.ConfigError, match="called without arguments, and missing a required argument: 'size'"):
        load_job("jobs_of_a_test:job")
