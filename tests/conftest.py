"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Tiny models gain nothing from a second thread, and where cores are shared two that wait for each other cost
# twenty times the work.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of third-party data for measuring; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("PERPEND_SHARED", REPO.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"the measuring data is not at {folder} (set PERPEND_SHARED to its folder)")
    return folder
