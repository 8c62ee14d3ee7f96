"""Reports: figures from commands, charts for them, and one self-contained HTML page."""

from perpend.report.figure import Detail, Figure

__all__ = ["Detail", "Figure"]
