"""Verbs on a tiny model, with options that reach what they share, and the numbers of their runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tiny

TEXT = "The stream carries what every layer adds to it; some of it along, most across. " * 120
VERBS = {
    "attention": ["--window", "8", "--length", "24", "--sequences", "70", "--seed", "0"],
    "updates": ["--length", "24", "--sequences", "70", "--seed", "0", "--generate", "0", "--evaluate",
                "--drop", "1,2", "--eval-sequences", "4"],
    "prune": ["--window", "8", "--length", "24", "--sequences", "40", "--seed", "0", "--context", "24",
              "--tokens", "200", "--sparsity", "0.2"],
    "edit": ["--length", "24", "--sequences", "6", "--audit", "--gradient", "--head-sensitivity",
             "--site", "value.exclude_self", "--site", "residual.mlp", "--parallel", "0,2"],
    "compress": ["--length", "24", "--sequences", "6", "--method", "rtn:group=4", "--method", "wanda:2:4",
                 "--method", "magnitude", "--surgery", "2", "--calibration-sequences", "4",
                 "--calibration-length", "24"],
}  # fmt: skip
SHORT = {  # the least that has steps for two processes
    "attention": ["--window", "8", "--length", "24", "--sequences", "70", "--seed", "0", "--triples", "50"],
    "compress": ["--length", "24", "--sequences", "2", "--method", "rtn:group=4", "--method", "magnitude",
                 "--calibration-sequences", "2", "--calibration-length", "24"],
}  # fmt: skip


def laid_out(folder: Path) -> Path:
    """The same folder, with a tiny language model in `model` and a text for it in `text.txt`."""
    tiny.save_llama(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


def numbers(value: object, where: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of a run's results, by its path; measured time is no result."""
    if isinstance(value, dict):
        for key, item in value.items():
            if "seconds" not in key and key not in ("cost", "ratio"):
                yield from numbers(item, f"{where}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, f"{where}/{index}")
    else:
        yield where, value
