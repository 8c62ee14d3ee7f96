"""Every table and figure of both papers: the question it answers, what it needs, the commands that make it.

A list of data (items.json). An item names verbs with their options, `{model}` standing for each of its
models and `{run}` for the run of the step before, or says why there is none. `published` says whether the
paper's text carries its values, which then lie in a file of that name; `compare` names how a run is held
against them (perpend.papers.measures).

    for step in find("attention/table-6").commands([Named("gpt2", "path/to/folder")]):
        step.words        # attention path/to/folder --text wikitext103 …, then audit {run}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from perpend.errors import InputError, unknown_name

KINDS = ("decoder", "encoder", "image")
RUN = "{run}"


@dataclass(frozen=True)
class Named:
    """A model by the name it has in the papers (or its own), and where it lies: a name or a folder."""

    name: str
    place: str

    @classmethod
    def parse(cls, word: str) -> Named:
        """`gpt2`, `path/to/folder` or `gpt2=path/to/folder`."""
        name, equals, place = word.partition("=")
        if equals and not (name and place):
            raise InputError(f"{word!r}: write NAME=FOLDER, a short name or a folder")
        return cls(name, place) if equals else cls(Path(word).name if "/" in word else word, word)


@dataclass(frozen=True)
class Step:
    """One command of an item: a verb and its options. `{run}` in them is the folder of the step before."""

    item: str
    model: Named | None
    words: tuple[str, ...]

    @property
    def verb(self) -> str:
        return self.words[0]

    def folder(self, base: Path, before: Path | None = None) -> Path:
        """Where the run goes: the same words always go to the same folder, so that items share runs."""
        told = [str(before) if word == RUN else word for word in self.words]
        code = hashlib.sha256("\0".join(told).encode()).hexdigest()[:8]
        return base / (self.model.name if self.model else "no-model") / f"{self.verb}-{code}"


@dataclass(frozen=True)
class Item:
    """One table or figure.

    `models` those of the paper, `also` those that need no hub; `accepts` the kinds of model it is defined
    for. `steps` are the commands of a model in their order, `small` the options that make each of them fit
    for a model that is not the paper's. `needs`: hub, GPU, hours, days. `values`: the file that prints its
    numbers where it is not its own; `quantities`: how the names of its measured ones begin, of a run that
    measures more; `figure`: the titles of the figures of its runs that draw it.
    """

    item: str
    question: str
    needs: tuple[str, ...]
    published: bool
    steps: tuple[tuple[str, ...], ...] | None = None
    small: tuple[tuple[str, ...], ...] = ()
    models: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    accepts: tuple[str, ...] = KINDS
    compare: str | None = None
    quantities: tuple[str, ...] = ()
    figure: tuple[str, ...] = ()
    values: str = ""
    why: str = ""
    note: str = ""

    @property
    def paper(self) -> str:
        return self.item.partition("/")[0]

    @property
    def name(self) -> str:
        return self.item.partition("/")[2]

    @property
    def per_model(self) -> bool:
        return any("{model}" in words for words in self.steps or ())

    def default_models(self, here: Sequence[str]) -> list[Named]:
        """The paper's models among `here` (names that this machine has), and those that need no hub."""
        return [Named(name, name) for name in (*self.models, *self.also) if name in here]

    def commands(
        self,
        models: Sequence[Named] = (),
        *,
        more: Sequence[str] = (),
        builtin: bool = False,
        accelerator: bool = False,
    ) -> list[list[Step]]:
        """The steps of each model, one list a model; a single list without a model where none enters.

        `more` joins the first step. `builtin` leaves hub data sets out, so that verbs read their built-in
        text. A model of the catalog brings its own protocol (`protocol_of`).
        """
        if self.steps is None:
            return []
        if not self.per_model:
            return [[Step(self.item, None, tuple(overridden(words, more))) for words in self.steps]]
        return [list(self._steps(model, more, builtin, accelerator)) for model in models]

    def _steps(self, model: Named, more: Sequence[str], builtin: bool, accelerator: bool) -> Iterator[Step]:
        small = builtin or model.name not in self.models
        for position, words in enumerate(self.steps or ()):
            filled = [word.replace("{model}", model.place) for word in words]
            if builtin or "--images" in more:
                filled = without_hub_texts(filled)
            for further in (
                protocol_of(model.name, filled[0], accelerator=accelerator),
                self.small[position] if small and self.small else (),
                more if position == 0 else (),
            ):
                filled = overridden(filled, further)
            yield Step(self.item, model, tuple(filled))


@cache
def catalog() -> dict[str, Item]:
    """All items by name, in the papers' order."""
    raw = json.loads((resources.files("perpend.papers") / "items.json").read_text("utf-8"))
    return {record["item"]: Item(**{key: _frozen(value) for key, value in record.items()}) for record in raw}


def _frozen(value: object) -> object:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def find(name: str) -> Item:
    """The item of that name, with or without its paper where only one has it; InputError with near ones."""
    known = catalog()
    if name in known:
        return known[name]
    ending = [item for item in known.values() if item.name == name]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise InputError(f"both papers have a {name}: write {' or '.join(item.item for item in ending)}")
    raise unknown_name("table or figure", name, known)


def without_hub_texts(words: Sequence[str]) -> list[str]:
    """The words without `--text`, `--held-out` and the like where they name a data set of the hub."""
    from perpend.reading import HUB_TEXTS

    kept, index = [], 0
    while index < len(words):
        after = words[index + 1] if index + 1 < len(words) else ""
        if words[index].startswith("--") and after.partition(":")[0] in HUB_TEXTS:
            index += 2
            continue
        kept.append(words[index])
        index += 1
    return kept


def overridden(words: Sequence[str], further: Sequence[str]) -> list[str]:
    """The words with those of `further` added; an option that `further` sets is left out before them."""
    named = {word.partition("=")[0] for word in further if word.startswith("--")}
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in named
        if not skipping:
            kept.append(word)
    return [*kept, *further]


def protocol_of(name: str, verb: str, *, accelerator: bool = False) -> list[str]:
    """Options that a catalog model's protocol adds: dtype, and for verbs that read rows sink, length, window.

    Models whose rows have the default protocol (first key, 192 tokens, 64 keys) add nothing. Without an
    accelerator a model is read in float32, whatever the paper ran it in.
    """
    from perpend.models.catalog import find as entry_of

    entry = entry_of(name)
    if entry is None or verb == "audit":
        return []
    words = ["--dtype", entry.dtype] if accelerator and entry.dtype != "float32" else []
    if verb not in ("attention", "prune"):
        return words
    words += [] if entry.sink == "first" else ["--sink", entry.sink]
    words += [] if entry.length in (192, None) else ["--length", str(entry.length)]
    return words + ([] if entry.window in (64, None) else ["--window", str(entry.window)])
