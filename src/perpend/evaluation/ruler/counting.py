"""Which words are frequent: ten common ones of a numbered list, three of a coded text that follows Zipf's
law.
"""

from __future__ import annotations

import math
import random
import string

from perpend.evaluation.ruler._kinds import RulerTask, Sample, Sources
from perpend.evaluation.ruler._words import draw

COMMON = 10
LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
    " Answer: The top 10 words that appear most often in the list are:"
)
CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
ALPHA = 2.0  # exponent of the law; ζ(2) = π²/6
LETTERS = 6


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _list(rng: random.Random, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
    words = draw(rng, size)
    common = words[:COMMON]
    shown = common * often + words[COMMON:] * seldom
    rng.shuffle(shown)
    return LIST.format(context=_numbered(shown)), common


def common_words(rng: random.Random, size: int, index: int, sources: Sources) -> Sample:
    """A solved small list, then the list asked about. Below 4096 tokens the counts are smaller."""
    short = sources.length < 4096
    example, solved = _list(rng, 20, 3, 1) if short else _list(rng, 40, 10, 3)
    text, common = _list(rng, size, 6, 1) if short else _list(rng, size, 30, 3)
    # no blank after the colon: the published example has none, and the answer follows the example
    return Sample(f"{example}{_numbered(solved)}\n{text}", tuple(common), _numbered(common))


def frequent_words(rng: random.Random, size: int, index: int, sources: Sources) -> Sample:
    """`size` coded words; word number k comes size·k^-2/ζ(2) times; the most frequent is noise, "..."."""
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < max(4, sources.length // 50):
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
    words = list(vocabulary)
    words[0] = "..."
    zeta = math.pi**2 / 6
    text = [word for k, word in enumerate(words, 1) for _ in range(int(size * k**-ALPHA / zeta))]
    rng.shuffle(text)
    outputs = tuple(words[1:4])
    return Sample(CODED.format(context=" ".join(text)), outputs, " " + ", ".join(outputs))


TASKS = (
    RulerTask("cwe", common_words, steps=120, smallest=COMMON + 1),
    # below 26 words the fourth most frequent would not appear
    RulerTask("fwe", frequent_words, steps=50, smallest=64),
)
