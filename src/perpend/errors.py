"""Errors a user can act on: every message names the remedy."""

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
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    return InputError(f"unknown {kind} {name!r}{hint} known: {', '.join(known)}")
