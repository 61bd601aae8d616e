"""Settings shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepgraph import knobs

# The asserts of shared modules explain themselves as those of test files do.
pytest.register_assert_rewrite(
    "tests.graphs", "tests.mutants", "tests.portrait", "tests.refusals", "tests.side_by_side"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the golden texts instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt from the present output")


@pytest.fixture
def no_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variables of stepgraph are unset, as they are by default."""
    for name in knobs.KNOBS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One thread for this process: tiny kernels are many times slower when threads compete for few cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plans go by the built-in figures, whatever was measured on this machine."""
    monkeypatch.setenv("STEPGRAPH_CACHE", str(tmp_path / "cache"))
