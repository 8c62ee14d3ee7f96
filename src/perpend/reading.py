"""One text from wherever it lies: file, folder, JSON lines, standard input, hub data set, or Python itself.

text = read_text("wiki.txt")
text.name, text.sha256
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perpend.errors import InputError, unknown_name

SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
BETWEEN = "\n\n"  # joins documents into one stream
LONGEST = 255  # bytes in one part of a path
OWN = 'a text of your own, in Python: texts.Text.of("...", name="mine")'


@dataclass(frozen=True)
class Text:
    """A text with where it came from; `sha256` is that of its UTF-8 bytes."""

    name: str
    text: str = field(repr=False)
    sha256: str

    @classmethod
    def of(cls, text: str, name: str = "own text") -> Text:
        """A text of one's own, from a string; InputError where it is empty or no string."""
        if not isinstance(text, str):
            raise InputError(f"a text is a string, not {type(text).__name__}")
        return _text(name, text)


@dataclass(frozen=True)
class HubText:
    """A data set on the hub: all of a small one, the first `documents` of a large one, streamed."""

    hub: str
    config: str
    split: str
    documents: int | None = None
    between: str = BETWEEN


# WikiText's rows are lines with their newline, so that joined by nothing they are the published file
HUB_TEXTS = {
    "wikitext2": HubText("Salesforce/wikitext", "wikitext-2-raw-v1", "validation", between=""),
    "wikitext103": HubText("Salesforce/wikitext", "wikitext-103-raw-v1", "validation", between=""),
    "c4": HubText("allenai/c4", "en", "validation", documents=2000),
    "openwebtext": HubText("Skylion007/openwebtext", "plain_text", "train", documents=2000),
    "fineweb": HubText("HuggingFaceFW/fineweb", "sample-10BT", "train", documents=2000),
}


def read_text(source: str | os.PathLike[str] | Sequence[str] | Text | None = None) -> Text:
    """One text from `source`.

    None: the prose of the Python language reference that comes with every CPython. A path: a text file, JSON
    lines with the key "text", or a folder of both. "-": standard input. A list of strings: documents. A name
    of `HUB_TEXTS` (`name:split` too): a data set, where a hub is reachable. A string is never the text
    itself: that is `Text.of(string)`.

    Raises InputError for a text that is empty, not UTF-8, or not there.
    """
    if isinstance(source, Text):
        return source
    if source is None:
        return _text("python-reference", _reference_prose())
    if not isinstance(source, (str, os.PathLike)):
        documents = list(source)
        if not all(isinstance(d, str) for d in documents):
            raise InputError("a text given as a list must hold strings only")
        return _text(f"{len(documents)} strings", BETWEEN.join(documents))
    name = os.fspath(source)
    if name == "-":
        return _text("stdin", _decode(sys.stdin.buffer.read(), "standard input"))
    check_place(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _text(name, BETWEEN.join(_read_file(f) for f in sorted(_files(path))))
    if path.exists():
        return _text(name, _read_file(path))
    dataset, _, split = name.partition(":")
    return _text(name, _from_hub(HUB_TEXTS[dataset], split, name))


def check_place(name: str) -> None:
    """InputError for a text that is not there, without reading it: no such file or name, a folder of none."""
    if "\n" in name or "\0" in name or any(len(os.fsencode(part)) > LONGEST for part in name.split("/")):
        raise InputError(f"a string of {len(name):,} characters is no path of a text; {OWN}")
    path = Path(name).expanduser()
    if path.is_dir():
        if next(_files(path), None) is None:
            raise InputError(f"{path} holds no {', '.join(SUFFIXES)} file")
    elif not (name == "-" or path.exists() or name.partition(":")[0] in HUB_TEXTS):
        if "/" in name or "\\" in name or "." in name:
            raise InputError(f"there is no text file or folder {path}; {OWN}")
        raise InputError(f"{unknown_name('text', name, HUB_TEXTS)}; a file is given by its path, {OWN}")


def _files(folder: Path) -> Iterator[Path]:
    """The text files under a folder, in no order."""
    return (f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())


def _text(name: str, text: str) -> Text:
    if not text.strip():
        raise InputError(f"the text {name} is empty; give another one, text=")
    # JSON can spell halves of a character, which no tokenizer takes: pairs are joined, a lone one is marked
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Text(name, text, hashlib.sha256(text.encode()).hexdigest())


def _read_file(path: Path) -> str:
    try:
        text = _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if path.suffix.lower() != ".jsonl":
        return text
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            keys = (
                f"the keys {', '.join(map(str, record))}"
                if isinstance(record, dict)
                else type(record).__name__
            )
            raise InputError(
                f'{path} line {number} has no "text" (it has {keys}); rename the key that holds the text'
            )
        documents.append(record["text"])
    return BETWEEN.join(documents)


def _decode(data: bytes, place: str) -> str:
    """UTF-8, with or without its mark; line ends as they are in Unix."""
    if b"\0" in data[:65536]:
        raise InputError(f"{place} is a binary file (or UTF-16), not UTF-8 text; convert it to text first")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place} is not UTF-8 text (byte {error.start}); convert it, for example with 'iconv -t utf-8'"
        ) from error
    return text.replace("\r\n", "\n")


def _reference_prose() -> str:
    """The paragraphs of the Python language reference, without its headings, code, grammar and tables."""
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise InputError("this Python comes without its reference texts; give a text, text=FILE") from error
    paragraphs: dict[str, None] = {}  # topics share sections: each paragraph once, in order
    for _, topic in sorted(topics.topics.items()):
        for paragraph in topic.split("\n\n"):
            prose = " ".join(line.strip() for line in paragraph.strip("\n").split("\n"))
            words = sum(c.isalpha() or c == " " for c in prose)
            whole = (
                len(prose) >= 60 and prose[-1] in ".:)" and not prose.startswith((">>>", "+", "|", "*", "-"))
            )
            if whole and words > 0.85 * len(prose) and "::=" not in prose:
                paragraphs[prose] = None
    return BETWEEN.join(paragraphs)


def _from_hub(where: HubText, split: str, name: str) -> str:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{name} is a hub data set: pip install 'perpend[hub]', or give a file, text=FILE"
        ) from error
    from perpend.models._source import hub_reachable

    reachable = hub_reachable()
    if where.documents is not None and not reachable:
        raise InputError(_unreachable(name))
    try:
        with contextlib.nullcontext() if reachable else _offline():
            return _joined(datasets, where, split)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if not reachable:
            raise InputError(_unreachable(name)) from error
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"the data set {name} ({where.hub}) cannot be read: {first}") from error


def _joined(datasets: Any, where: HubText, split: str) -> str:
    large = where.documents is not None
    rows = datasets.load_dataset(where.hub, where.config, split=split or where.split, streaming=large)
    return where.between.join(row["text"] for row in (rows.take(where.documents) if large else rows))


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Only what is on this machine: a look-up on an unreachable hub is else retried for half a minute."""
    import datasets.config
    import huggingface_hub.constants as hub

    before = datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE = before


def _unreachable(name: str) -> str:
    return (
        f"{name} is a data set on the model hub, which cannot be reached from here; give a file, "
        "text=FILE, or leave text= out for the text that comes with Python"
    )
