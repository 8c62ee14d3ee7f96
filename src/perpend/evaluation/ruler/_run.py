"""Make a task's samples for a tokenizer and a length, and score a model on them."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from perpend.errors import InputError
from perpend.evaluation.generation import continuations
from perpend.evaluation.result import TaskScores
from perpend.evaluation.ruler import _sources as source_files
from perpend.evaluation.ruler import task as find
from perpend.evaluation.ruler._kinds import RulerTask, Sample, Sources
from perpend.evaluation.scoring import Encoder, loglikelihoods
from perpend.progress import Progress, silent

VERSION = "perpend 1, after RULER (2024)"
_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Generated:
    """Samples of one task and length. sha256: of the samples; size: haystack units of the first one."""

    task: str
    length: int
    samples: tuple[Sample, ...]
    tokens: tuple[int, ...]
    size: int
    sha256: str
    files: dict[str, str]


def generate(
    name: str,
    encoder: Encoder,
    length: int,
    *,
    count: int = 500,
    seed: int = 0,
    files: Mapping[str, str | Path] | None = None,
) -> Generated:
    """`count` samples whose prompt and answer budget together take at most `length` tokens of this tokenizer.

    Sample i depends on (seed, task, length, i) only, so fewer samples are the beginning of more. The size
    of the haystack is the largest that fits for sample 0; a later sample that is too long gets a smaller
    one.
    """
    task = find(name)
    sources, hashes = source_files.load(task.needs, files or {}, length)
    room = length - task.steps

    def make(size: int, index: int) -> tuple[Sample, int]:
        sample = task.build(random.Random(f"{seed}/{name}/{length}/{index}"), size, index, sources)
        return sample, len(encoder(sample.prompt))

    size = _largest(task, make, room, length, sources)
    samples, tokens = [], []
    for index in range(count):
        own = size
        sample, used = make(own, index)
        while used > room and own > task.smallest:
            # by what it is too long, in units of the mean unit; at least one
            own = max(task.smallest, own - max(1, int((used - room) * own / used)))
            sample, used = make(own, index)
        if used > room:
            raise InputError(f"{name}: sample {index} takes {used} tokens at its smallest, {room} are free")
        samples.append(sample)
        tokens.append(used)
    listed = [[one.prompt, list(one.outputs)] for one in samples]
    digest = hashlib.sha256(json.dumps(listed, ensure_ascii=False).encode()).hexdigest()
    return Generated(name, length, tuple(samples), tuple(tokens), size, digest, hashes)


def check(
    name: str,
    encoder: Encoder,
    length: int,
    *,
    context: int,
    seed: int = 0,
    files: Mapping[str, str | Path] | None = None,
) -> None:
    """InputError, before anything runs, for a task and length that `score` would refuse: beyond the context,
    too short for its smallest prompt, or without the texts it needs.
    """
    if length > context:
        raise InputError(
            f"{name} at {length} tokens is longer than the model's context of {context}; "
            "choose lengths up to that"
        )
    task = find(name)
    sources, _ = source_files.load(task.needs, files or {}, length)
    sample = task.build(random.Random(f"{seed}/{name}/{length}/0"), task.smallest, 0, sources)
    _check_room(task, len(encoder(sample.prompt)), length)


def _check_room(task: RulerTask, least: int, length: int) -> None:
    if least > length - task.steps:
        raise InputError(
            f"{task.name} does not fit {length} tokens: the prompt alone takes {least} and {task.steps} are "
            "kept for the answer; choose a longer length"
        )


def _largest(task: RulerTask, make: Any, room: int, length: int, sources: Sources) -> int:
    """The most haystack units that fit, by doubling and halving (the original steps by 5 to 500 units)."""
    _check_room(task, make(task.smallest, 0)[1], length)
    most = task.most(sources) if task.most else room
    low = high = task.smallest
    while high < most and make(high, 0)[1] <= room:
        low, high = high, min(most, 2 * high)
    if make(high, 0)[1] <= room:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if make(middle, 0)[1] <= room:
            low = middle
        else:
            high = middle
    return low


def match(text: str, outputs: Sequence[str], how: str) -> float:
    """Share of the outputs that the text contains, case aside ("all"), or 1 if it contains any ("part")."""
    text = _UNPRINTABLE.sub("\n", text.strip()).strip().lower()
    found = [one.lower() in text for one in outputs]
    return float(any(found)) if how == "part" else sum(found) / len(found)


def score(
    model: nn.Module,
    encoder: Encoder,
    name: str,
    length: int,
    *,
    count: int,
    seed: int = 0,
    files: Mapping[str, str | Path] | None = None,
    context: int,
    batch: int = 1,
    progress: Progress = silent,
) -> TaskScores:
    """String-match scores of greedy answers, and the log-likelihood of one right answer per sample.

    Writing stops as soon as every output has appeared, and does not begin where the right answer is already
    what greedy decoding would write: neither changes a score.
    """
    check(name, encoder, length, context=context, seed=seed, files=files)
    task = find(name)
    data = generate(name, encoder, length, count=count, seed=seed, files=files)
    gold = loglikelihoods(
        model,
        encoder,
        [(one.prompt, one.gold) for one in data.samples],
        batch=batch,
        context=context,
        progress=progress,
    )
    open_ = [index for index, (_, greedy) in enumerate(gold) if not greedy]
    written = continuations(
        model,
        encoder,
        [data.samples[index].prompt for index in open_],
        steps=task.steps,
        enough=[_complete(data.samples[index], task.match) for index in open_],
        batch=batch,
        context=context,
        progress=progress,
    )
    texts = {index: data.samples[index].gold for index in range(len(data.samples))}
    texts.update(zip(open_, written))
    items = {
        "item": list(range(len(data.samples))),
        "gold_ll": [ll for ll, _ in gold],
        "prediction": [texts[index] for index in range(len(data.samples))],
        "string_match": [match(texts[i], one.outputs, task.match) for i, one in enumerate(data.samples)],
    }
    settings = {
        "version": VERSION,
        "fewshot": 1 if name in ("vt", "cwe") else 0,
        "context": context,
        "length": length,
        "tokens": [min(data.tokens), max(data.tokens)],
        "bos": encoder.opens_with_bos(),
        "source": "generated",
        "seed": seed,
        "sha256": data.sha256,
        "files": data.files,
    }
    return TaskScores(name, "string_match", ("string_match",), items, 0.0, settings)


def _complete(sample: Sample, how: str) -> Any:
    return lambda text: match(text, sample.outputs, how) == 1.0
