"""Variable tracking: one chain of assignments scattered through noise; name every variable that holds the
value.
"""

from __future__ import annotations

import random
import string
from itertools import pairwise

from perpend.evaluation.ruler._kinds import RulerTask, Sample, Sources
from perpend.evaluation.ruler.niah import NOISE

HOPS = 4
TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
# "assgined" is how the published prompt has it
ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assgined the value {value}, they are: "
)
EXAMPLE_NOISE = 12  # sentences of noise in the worked example; the original fills 500 tokens


def _names(rng: random.Random, count: int, letters: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _problem(rng: random.Random, size: int, letters: int) -> tuple[str, list[str]]:
    names = _names(rng, HOPS + 1, letters)
    value = str(rng.randint(10000, 99998))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    lines = [NOISE + "\n"] * size
    for offset, (position, line) in enumerate(zip(sorted(rng.sample(range(size), len(chain))), chain)):
        lines.insert(position + offset, line)
    context = " ".join(lines).replace(". \n", ".\n")
    text = TEMPLATE.format(context=context, value=value) + ANSWER.format(count=HOPS + 1, value=value)
    return text, names


def build(rng: random.Random, size: int, index: int, sources: Sources) -> Sample:
    example, solved = _problem(rng, EXAMPLE_NOISE, letters=3)
    text, names = _problem(rng, size, letters=5)
    prompt = f"{example} {' '.join(solved)}\n\n\n\n{text}"
    # a trailing blank would be a token of its own, which no model writes before a name
    return Sample(prompt.rstrip(" "), tuple(names), " " + " ".join(names))


TASKS = (RulerTask("vt", build, steps=30, smallest=HOPS + 2),)
