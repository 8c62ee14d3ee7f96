"""A figure as a command gives it to the report: a question, a chart that answers it, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Detail:
    """What a click on one mark opens: its facts, and charts of its own arrays.

    keys    columns that a mark and a row of `table` share, such as ("layer", "head")
    table   one row a mark; plain columns are shown as facts, columns of lists feed the charts
    charts  title -> chart over `charts.chosen()`, which holds the chosen row's lists as columns, and `index`
    """

    keys: Sequence[str]
    table: pd.DataFrame
    charts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One figure of a report.

    title        a short noun phrase; figures of several runs are matched by it
    question     the question that the chart answers
    chart        an altair chart, or a mapping subtitle -> chart for charts side by side
    table        the numbers shown, tidy; the reader downloads them as CSV
    how_to_read  one or two sentences: what an axis, a colour, a shape means, and what would be remarkable
    detail       what a click on a mark opens
    overlay      for comparisons: a table like `table` with a column `run` -> one chart of all runs
    """

    title: str
    question: str
    chart: Any
    table: pd.DataFrame
    how_to_read: str
    detail: Detail | None = None
    overlay: Callable[[pd.DataFrame], Any] | None = None

    @property
    def charts(self) -> dict[str, Any]:
        """subtitle -> chart; a single chart has the empty subtitle."""
        return dict(self.chart) if isinstance(self.chart, Mapping) else {"": self.chart}

    def _repr_mimebundle_(self, *args: Any, **more: Any) -> dict[str, Any]:
        """In a notebook a figure shows its chart: live where there is Vega, else as a picture."""
        import base64

        import altair as alt
        import vl_convert

        drawing = self.drawn().to_dict()
        major = alt.SCHEMA_VERSION.lstrip("v").split(".")[0]
        # The specification itself, not altair's HTML: that one fetches its libraries from the network.
        bundle = {f"application/vnd.vegalite.v{major}+json": drawing}
        try:
            picture = vl_convert.vegalite_to_png(drawing, scale=1.5)
        except ValueError:  # a chart without a single mark has no size, and so no picture
            return {**bundle, "text/plain": self.title}
        return {**bundle, "image/png": base64.b64encode(picture).decode(), "text/plain": self.title}

    def drawn(self) -> Any:
        """The chart as one altair chart with perpend's type and colours; several side by side, two a row."""
        from perpend.report.charts import themed

        if len(self.charts) == 1:
            return themed(next(iter(self.charts.values())))
        import altair as alt

        named = [chart.properties(title=name, width=380) for name, chart in self.charts.items()]
        return themed(alt.concat(*named, columns=2))
