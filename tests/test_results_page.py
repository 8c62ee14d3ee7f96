"""The results page is what the stored run summaries say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def test_the_page_is_current() -> None:
    script = [sys.executable, str(REPO / "scripts" / "results.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_summaries_name_no_path_of_a_machine() -> None:
    for path in (REPO / "docs" / "runs").glob("*.json"):
        text = path.read_text("utf-8")
        json.loads(text)
        assert "/tmp/" not in text, path.name
        assert "/home/" not in text, path.name
        assert '"/' not in text, path.name
