"""Settings shared by all tests."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the golden texts instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt from the present output")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One thread for this process: tiny kernels are many times slower when threads compete for few cores."""
    torch.set_num_threads(1)
