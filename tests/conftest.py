"""Settings shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One thread for this process: tiny kernels are many times slower when threads compete for few cores."""
    torch.set_num_threads(1)
