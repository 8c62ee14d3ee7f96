"""One HTML file from a run folder."""

from __future__ import annotations

import html
from typing import Any


def build(run: Any) -> str:
    """The report of a run, as one self-contained page."""
    findings = "".join(f"<li>{html.escape(line)}</li>" for line in run.document.get("findings", []))
    title = html.escape(f"perpend {run.command}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><ul>{findings}</ul></html>"
    )
