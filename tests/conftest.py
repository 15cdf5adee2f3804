"""Fixtures shared by several test modules."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# A landing must not depend on luck; at a desk every run looks at new examples.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are done before a second thread has woken up, and waiting for it can take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
