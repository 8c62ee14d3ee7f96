"""Needles in a haystack: sentences that give a number or a UUID for a key, hidden in noise, essays or more
needles.
"""

from __future__ import annotations

import random
import re
import uuid
from functools import lru_cache

from perpend.evaluation.ruler._kinds import Build, RulerTask, Sample, Sources
from perpend.evaluation.ruler._words import compounds

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text are"
)
DEPTHS = [round(100 * step / 39) for step in range(40)]  # per cent of the essay's sentences


def _word(rng: random.Random) -> str:
    return rng.choice(compounds())


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_MAKE = {"words": _word, "numbers": _number, "uuids": _uuid}


@lru_cache(maxsize=64)
def _sentences(text: str) -> tuple[str, ...]:
    """Cut after . ! or ? and a blank (the original uses NLTK's trained splitter)."""
    return tuple(re.split(r"(?<=[.!?])\s+", text.strip()))


def _essay(rng: random.Random, size: int, needles: list[str], sources: Sources) -> str:
    """The essays' first `size` words with the needles between sentences, at random of 40 depths."""
    words = sources.words
    text = " ".join(words[i % len(words)] for i in range(size))
    sentences = _sentences(text)
    cuts = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
    pieces, last = [], 0
    for cut, needle in zip(cuts, needles):
        pieces += [" ".join(sentences[last:cut]), needle]
        last = cut
    return " ".join([*pieces, " ".join(sentences[last:])])


def needles_in(
    haystack: str, keys: str = "words", values: str = "numbers", *, of: int = 1, each: int = 1, asked: int = 1
) -> Build:
    """A builder: `of` keys with `each` values, `asked` of the keys in the question."""

    def build(rng: random.Random, size: int, index: int, sources: Sources) -> Sample:
        drawn: dict[str, list[str]] = {}
        while len(drawn) < max(of, asked):
            drawn.setdefault(_MAKE[keys](rng), [_MAKE[values](rng) for _ in range(each)])
        needles = [
            NEEDLE.format(kind=values, key=key, value=value)
            for key, several in drawn.items()
            for value in several
        ]
        rng.shuffle(needles)
        if haystack == "essay":
            context = _essay(rng, size, needles, sources)
        else:
            lines = [NOISE] * size
            if haystack == "needles":
                lines = [
                    NEEDLE.format(kind=values, key=_MAKE[keys](rng), value=_MAKE[values](rng))
                    for _ in range(size)
                ]
            for position, needle in zip(sorted(rng.sample(range(size), len(needles)), reverse=True), needles):
                lines.insert(position, needle)
            context = "\n".join(lines)
        queries = rng.sample(sorted(drawn), asked)
        query = queries[0] if asked == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1]
        outputs = tuple(value for one in queries for value in drawn[one])
        single = asked * each == 1
        template, kind = (ONE, values[:-1]) if single else (SEVERAL, values)
        return Sample(
            template.format(kind=kind, context=context, query=query), outputs, " " + ", ".join(outputs)
        )

    return build


def _task(name: str, haystack: str, keys: str = "words", values: str = "numbers", **counts: int) -> RulerTask:
    return RulerTask(
        name,
        needles_in(haystack, keys, values, **counts),
        steps=128,
        needs=("essays",) if haystack == "essay" else (),
        smallest=max([4, *counts.values()]),
    )


TASKS = (
    _task("niah_single_1", "noise"),
    _task("niah_single_2", "essay"),
    _task("niah_single_3", "essay", values="uuids"),
    _task("niah_multikey_1", "essay", of=4),
    _task("niah_multikey_2", "needles"),
    _task("niah_multikey_3", "needles", keys="uuids", values="uuids"),
    _task("niah_multivalue", "essay", each=4),
    _task("niah_multiquery", "essay", of=4, asked=4),
)
