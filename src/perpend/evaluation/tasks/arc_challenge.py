"""ARC-Challenge: the questions of ARC that retrieval and word co-occurrence got wrong."""

from __future__ import annotations

from dataclasses import replace

from perpend.evaluation.tasks.arc_easy import TASK as EASY

TASK = replace(EASY, name="arc_challenge", files=("arc_challenge",))
