"""Where a task's JSON-lines file lies in a folder, and its records."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from perpend.errors import InputError
from perpend.evaluation.tasks._kinds import Document, Task


@dataclass(frozen=True)
class TaskData:
    """Documents of one file, in its order. sha256: of the file's bytes."""

    documents: tuple[Document, ...]
    file: str
    sha256: str


def locate(folder: Path, task: Task, split: str) -> Path | None:
    """The file of a split: `<name>_<split>*.jsonl`, or `<name>.jsonl` for the scored split; None if there
    is none.
    """
    found = sorted({path for stem in task.files for path in folder.glob(f"{stem}_{split}*.jsonl")})
    if not found and split == task.split:
        found = [folder / f"{stem}.jsonl" for stem in task.files if (folder / f"{stem}.jsonl").is_file()]
    if len(found) > 1:
        raise InputError(
            f"{len(found)} files in {folder} answer for {task.name} ({split}): "
            f"{', '.join(path.name for path in found)}; keep one"
        )
    return found[0] if found else None


def read(folder: str | Path, task: Task, split: str | None = None, limit: int | None = None) -> TaskData:
    """The documents of a task's split. Raises InputError naming the file or the line at fault."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"data={str(folder)!r} is not a folder; give the folder that holds the tasks' .jsonl files"
        )
    split = split or task.split
    path = locate(folder, task, split)
    if path is None:
        wanted = " or ".join(f"{stem}_{split}*.jsonl" for stem in task.files)
        present = ", ".join(sorted(one.name for one in folder.glob("*.jsonl"))) or "no .jsonl file"
        raise InputError(f"{task.name} needs {wanted} in {folder}, which holds {present}")
    raw = path.read_bytes()
    documents = []
    try:
        lines = raw.decode("utf-8-sig").split("\n")  # a byte order mark is no part of the first record
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); convert it first") from error
    for number, line in enumerate(lines, 1):
        if limit is not None and len(documents) >= limit:
            break
        if not line.strip():
            continue
        try:
            documents.append(_document(task, line))
        except InputError as error:
            raise InputError(f"{path.name}, line {number}: {error}") from error
    if not documents:
        raise InputError(f"{path} holds no record")
    return TaskData(tuple(documents), path.name, hashlib.sha256(raw).hexdigest())


def _document(task: Task, line: str) -> Document:
    """The document of one line, or what is wrong with it."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise InputError(f"a record is a JSON object, this is a {type(record).__name__}")
    try:
        document = task.document(record)
    except KeyError as error:
        have = ", ".join(sorted(record))
        raise InputError(f"{task.name} needs the key {error}, the record has {have}") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{task.name} cannot use this record ({error})") from error
    texts = (*document.contexts, *document.answers)
    if not all(isinstance(text, str) and _is_text(text) for text in texts):
        raise InputError(f"{task.name} needs texts, and one of the record is none")
    count = max(len(document.contexts), len(document.answers))
    if not 0 <= document.gold < count:
        raise InputError(
            f"{task.name} needs the right answer as one of 0 to {count - 1}, the record says {document.gold} "
            "(published test splits hide it: use the validation split)"
        )
    return document


def _is_text(text: str) -> bool:
    """Half a surrogate pair, which JSON can spell, is no character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
