"""What a generated long-context task is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """prompt: the text that ends with the answer's opening words. outputs: the strings to be found in the
    answer.

    gold: one text that a right answer could begin with, whose log-likelihood is taken (the original takes
    none).
    """

    prompt: str
    outputs: tuple[str, ...]
    gold: str


@dataclass(frozen=True)
class Sources:
    """What generation reads: texts from the files that the user names, and the sample's number.

    words: of the essays, in order. documents: (passages, questions) by data set.
    """

    length: int
    words: tuple[str, ...] = ()
    documents: dict[str, Any] = field(default_factory=dict)


Build = Callable[[random.Random, int, int, Sources], Sample]


@dataclass(frozen=True)
class RulerTask:
    """build(rng, size, index, sources) makes a sample with `size` units of haystack (sentences, words,
    passages).

    steps: tokens the answer may take. match: "all" (share of the outputs found) or "part" (any of them
    found). needs: names of the files without which there is no haystack. smallest: units below which it
    cannot be built.
    """

    name: str
    build: Build
    steps: int
    match: str = "all"
    needs: tuple[str, ...] = ()
    smallest: int = 1
    most: Callable[[Sources], int] | None = None
