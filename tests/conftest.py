"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(max(1, min(2, os.cpu_count() or 1)))

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of third-party data for measuring; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("PERPEND_SHARED", REPO.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"the measuring data is not at {folder} (set PERPEND_SHARED to its folder)")
    return folder
