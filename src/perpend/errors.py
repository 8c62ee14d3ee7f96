"""Errors a user can act on: every message names the remedy.

A message names a parameter as Python writes it, `dtype=float32`; the command line tells it as its own option,
`--dtype float32` (perpend.options.as_flags).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PerpendError(Exception):
    """Something a user can put right; the command line prints its message without a traceback."""


class InputError(PerpendError, ValueError):
    """An argument, a file or a model that perpend cannot use as given."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> InputError:
    """An error for a name that is not there, with the nearest known ones first."""
    known = sorted(known)
    near = near_names(str(name), known)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    # names that hold commas are quoted: a list of them could not be told apart
    listed = map(repr, known) if any("," in one for one in known) else known
    return InputError(f"unknown {kind} {name!r}{hint} known: {', '.join(listed)}")


def near_names(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """The names that `name` may stand for: its long or short form, those it begins, those spelt alike.

    `smollm2` begins smollm2-135m; `js` and jensen_shannon are each other's.
    """
    known = list(known)
    word = name.lower()
    begun = [one for one in known if len(word) > 1 and one.lower().startswith(word)]
    short = [one for one in known if word in (one, _initials(one)) or _initials(word) == one.lower()]
    alike = difflib.get_close_matches(name, known, n=most, cutoff=cutoff)
    return list(dict.fromkeys([*short, *begun, *alike]))[:most]


def _initials(name: str) -> str:
    parts = [part for part in name.lower().replace("-", "_").split("_") if part]
    return "".join(part[0] for part in parts) if len(parts) > 1 else ""
