"""Run folders: written atomically, resumable after any kill, one writer at a time, readable for ever."""

from __future__ import annotations

from perpend.runs.files import plain, to_json
from perpend.runs.reader import FinishedRun
from perpend.runs.run import AlreadyFinished, Run, differences

__all__ = ["AlreadyFinished", "FinishedRun", "Run", "differences", "plain", "to_json"]
