"""Writes a run's summary, run.json without paths of the machine, to docs/runs.

python scripts/summarize_run.py RUN docs/runs/NAME.json ["the command line, where the run kept none"]
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

NUMBERS = re.compile(r"\[[\d\s,.eE+-]+\]")  # a list of numbers goes on one line
KEPT = (
    "version",
    "command",
    "invocation",
    "request",
    "conventions",
    "environment",
    "results",
    "findings",
    "undefined",
)
TELLING, PLACES = ("--resume", "--json", "--quiet"), ("--out", "--save")


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """The parts of run.json that a reader needs, with names in place of paths."""
    kept = {name: document[name] for name in KEPT if name in document}
    for name in ("request", "results"):
        kept[name] = _named(kept.get(name, {}))
    if kept.get("invocation"):
        kept["invocation"] = portable(kept["invocation"])
    return kept


def _named(value: Any) -> Any:
    """The same values with names in place of absolute paths."""
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_named(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "./", "../")) else value


def portable(words: list[str]) -> list[str]:
    """A command line without what is of this machine or of the telling: paths become names."""
    kept, skip = [], False
    for word in words:
        if skip or word in TELLING:
            skip = False
        elif word in PLACES:
            skip = True
        else:
            name, equals, path = word.rpartition("=")
            kept.append(f"{name}{equals}{Path(path).name if path.startswith(('/', './', '../')) else path}")
    return kept


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    document = json.loads((folder / "run.json").read_text())
    if len(sys.argv) > 3:
        document["invocation"] = shlex.split(sys.argv[3])
    text = json.dumps(summary(document), indent=1, ensure_ascii=False)
    target.write_text(NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
