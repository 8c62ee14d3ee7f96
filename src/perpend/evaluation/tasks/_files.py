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
    for number, line in enumerate(raw.decode("utf-8").split("\n"), 1):
        if limit is not None and len(documents) >= limit:
            break
        if not line.strip():
            continue
        try:
            documents.append(task.document(json.loads(line)))
        except json.JSONDecodeError as error:
            raise InputError(f"{path.name}, line {number}: not JSON ({error})") from error
        except KeyError as error:
            have = ", ".join(sorted(json.loads(line)))
            raise InputError(
                f"{path.name}, line {number}: {task.name} needs the key {error}, the record has {have}"
            ) from error
    if not documents:
        raise InputError(f"{path} holds no record")
    return TaskData(tuple(documents), path.name, hashlib.sha256(raw).hexdigest())
