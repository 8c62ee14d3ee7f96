"""Results in a notebook: what was found, in words, and the tables, as HTML that carries its own style.

@dataclass(frozen=True, repr=False)
class Survey(Rich):
    results: dict; tables: dict[str, DataFrame]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from perpend.rounding import cell, digits

if TYPE_CHECKING:
    import pandas as pd

ROWS = 12

_STYLE = (
    "<style scoped>.perpend{font:14px/1.5 system-ui,sans-serif;max-width:60em}"
    ".perpend h4{font-weight:600;margin:1em 0 .3em}.perpend ol{margin:.3em 0;padding-left:1.4em}"
    ".perpend table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}"
    ".perpend th,.perpend td{padding:.25em .9em .25em 0;text-align:left;border-bottom:1px solid #8884}"
    ".perpend td.n,.perpend th.n{text-align:right}.perpend .dim{opacity:.7}</style>"
)


class Rich:
    """Gives a result object its forms for reading from whichever of `findings`, `results`, `tables` it has.

    In a notebook HTML, printed a few lines. A dataclass keeps them with `@dataclass(repr=False)`.
    """

    def __repr__(self) -> str:
        parts = [
            f"{name}: {', '.join(map(str, getattr(self, name)))}"
            for name in ("results", "tables", "arrays")
            if getattr(self, name, None)
        ]
        return "\n".join(
            [
                f"{type(self).__name__} ({'; '.join(parts)})",
                *(f"  · {line}" for line in getattr(self, "findings", ())),
            ]
        )

    def _repr_html_(self) -> str:
        return html_of(
            type(self).__name__,
            findings=getattr(self, "findings", ()),
            results=getattr(self, "results", None),
            tables=getattr(self, "tables", None),
        )


def html_of(
    title: str,
    *,
    findings: Sequence[str] = (),
    results: Mapping[str, Any] | None = None,
    tables: Mapping[str, pd.DataFrame] | None = None,
) -> str:
    """HTML of a result; everything in it is escaped."""
    parts = [f'{_STYLE}<div class="perpend"><b>{escape(title)}</b>']
    if findings:
        parts.append("<ol>" + "".join(f"<li>{escape(str(line))}</li>" for line in findings) + "</ol>")
    numbers = [(name, value) for name, value in _numbers(results or {}) if value is not None]
    if numbers:
        rows = "".join(
            f'<tr><th>{escape(k)}</th><td class="n">{escape(cell(v))}</td></tr>' for k, v in numbers
        )
        parts.append(f"<table><tbody>{rows}</tbody></table>")
    for name, table in (tables or {}).items():
        parts.append(f"<h4>{escape(str(name))}</h4>{table_html(table)}")
    return "".join(parts) + "</div>"


def table_html(table: pd.DataFrame, rows: int = ROWS) -> str:
    """The first rows of a table; how many there are in all is said."""
    kinds = ["n" if kind.kind in "fiu" else "t" for kind in table.dtypes]
    enough = [digits(table.iloc[:, i]) for i in range(table.shape[1])]
    head = "".join(f'<th class="{kind}">{escape(str(c))}</th>' for kind, c in zip(kinds, table.columns))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}">{escape(cell(value, each))}</td>'
            for kind, value, each in zip(kinds, row, enough)
        )
        + "</tr>"
        for row in table.head(rows).itertuples(index=False)
    )
    more = f'<div class="dim">{rows} of {len(table)} rows</div>' if len(table) > rows else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _numbers(value: Mapping[str, Any], name: str = "") -> list[tuple[str, Any]]:
    """Scalars of nested results, by dotted name; lists are left to the tables."""
    out: list[tuple[str, Any]] = []
    for key, item in value.items():
        path = f"{name}.{key}" if name else str(key)
        if isinstance(item, Mapping):
            out += _numbers(item, path)
        elif isinstance(item, (str, bool, int, float)):
            out.append((path, item))
    return out
