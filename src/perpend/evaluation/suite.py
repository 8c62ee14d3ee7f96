"""Run tasks on a model that is in memory: local JSON-lines files, generated long-context tasks, or the
harness.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from perpend.errors import InputError, unknown_name
from perpend.evaluation import tasks as local
from perpend.evaluation.result import Evaluation, TaskScores
from perpend.evaluation.scoring import Encoder, context_length, loglikelihoods
from perpend.evaluation.tasks._files import TaskData, locate, read
from perpend.evaluation.tasks._kinds import Document, Task
from perpend.models.head import evaluating
from perpend.progress import Progress, silent

SHOT_SEED = 1234  # the harness' own seed for few-shot examples

COMMONSENSE = ("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
GROUPS = {"commonsense": COMMONSENSE, "lambada": ("lambada_openai",)}


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str] = "commonsense",
    *,
    data: str | Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    batch: int = 8,
    context: int | None = None,
    bos: str = "auto",
    lengths: Sequence[int] = (4096,),
    files: dict[str, str | Path] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Evaluation:
    """Scores of a language model, whatever has been done to it, on named tasks.

    tasks: names, or the groups `commonsense` (seven tasks), `lambada` and `ruler` (thirteen); as a list or
    separated by commas. data: a folder of JSON-lines files (see docs/evaluate.md); a task that has a file
    there is read from it. Any other standard name (GLUE, MMLU, CoQA, DROP, TruthfulQA ...) goes to
    lm-evaluation-harness, which needs `pip install "perpend[eval]"` and a hub. limit: the first so many
    items. fewshot: None is the task's default. context: longest input in tokens, None what the model
    states. lengths, files, seed: of the RULER tasks, in tokens; `files` names essays, squad and hotpotqa.

    Raises InputError for an unknown task (with near names), a missing file, a model without logits.
    """
    for name, value, least in (("limit", limit, 1), ("fewshot", fewshot, 0), ("context", context, 1)):
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    if not lengths or min(lengths) < 1:
        raise InputError(f"lengths are token counts of at least 1, one or more, got {lengths!r}")
    encoder = Encoder(tokenizer, bos)
    longest = context or context_length(model, tokenizer)
    own, synthetic, other = _sorted(expand(tasks), data)
    _check_lengths(synthetic, encoder, longest, lengths, files, seed)
    with evaluating(model):
        scores = [
            _local(
                model, encoder, local.task(name), Path(str(data)), limit, fewshot, batch, longest, progress
            )
            for name in own
        ]
        if synthetic:
            from perpend.evaluation.ruler._run import score

            for length in lengths:
                for name in synthetic:
                    scores.append(
                        score(
                            model, encoder, name, length, count=limit or 500, seed=seed, files=files or {},
                            context=longest, progress=progress,
                        )
                    )  # fmt: skip
        if other:
            from perpend.evaluation.harness import harness_scores

            scores += harness_scores(
                model, tokenizer, other, limit=limit, fewshot=fewshot, batch=batch, context=longest, bos=bos
            )
    order = {name: position for position, name in enumerate(expand(tasks))}
    scores.sort(key=lambda one: order.get(one.task, len(order)))
    return Evaluation(
        tuple(scores),
        {"limit": limit, "context": longest, "bos": encoder.opens_with_bos(), "batch": batch, "seed": seed},
    )


def expand(tasks: str | Sequence[str]) -> list[str]:
    """Names in the order given, groups replaced by their members, each once."""
    from perpend.evaluation.ruler import names as ruler_names

    groups = {**GROUPS, "ruler": tuple(ruler_names())}
    listed = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    listed = [name.strip() for name in listed if name.strip()]
    if not listed:
        raise InputError(f"no task named; for example tasks='lambada,piqa' (groups: {', '.join(groups)})")
    return list(dict.fromkeys(name for one in listed for name in groups.get(one, (one,))))


def check(tasks: str | Sequence[str], data: str | Path | None = None, *, fewshot: int | None = None) -> None:
    """InputError for tasks that `evaluate` would refuse: unknown names, files that are not in `data`, data
    sets of a hub that cannot be reached. Nothing is loaded.
    """
    own, _, other = _sorted(expand(tasks), data)
    for name in own:
        task = local.task(name)
        if task.fewshot if fewshot is None else fewshot:
            _check_pool(Path(str(data)), task)
    if other:
        from perpend.evaluation.harness import at_hand

        at_hand(other)


def check_lengths(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    data: str | Path | None = None,
    lengths: Sequence[int] = (4096,),
    files: dict[str, str | Path] | None = None,
    bos: str = "auto",
    seed: int = 0,
    **more: Any,
) -> None:
    """InputError for a long-context task that `evaluate` could not score: a length that does not fit the
    model or the task, a text that is missing. Nothing is run; what else `evaluate` takes is not looked at.
    """
    _, synthetic, _ = _sorted(expand(tasks), data)
    if synthetic:
        longest = more.get("context") or context_length(model, tokenizer)
        _check_lengths(synthetic, Encoder(tokenizer, bos), longest, lengths, files, seed)


def _check_lengths(
    names: Sequence[str],
    encoder: Encoder,
    context: int,
    lengths: Sequence[int],
    files: dict[str, str | Path] | None,
    seed: int,
) -> None:
    from perpend.evaluation.ruler._run import check as check_one

    for length in lengths if names else ():
        for name in names:
            check_one(name, encoder, length, context=context, seed=seed, files=files)


def _sorted(names: list[str], data: str | Path | None) -> tuple[list[str], list[str], list[str]]:
    """Which tasks local files answer, which are generated, which only the harness knows."""
    from perpend.evaluation.ruler import names as ruler_names

    if data is not None and not Path(data).is_dir():
        raise InputError(f"data={str(data)!r} is not a folder; give the folder with the tasks' .jsonl files")
    own, synthetic, other = [], [], []
    for name in names:
        if name in ruler_names():
            synthetic.append(name)
        elif (
            name in local.names()
            and data is not None
            and locate(Path(data), local.task(name), local.task(name).split)
        ):
            own.append(name)
        else:
            other.append(name)
    from perpend.evaluation import harness

    if other and not harness.available():
        known = [*local.names(), *ruler_names(), *GROUPS, "ruler"]
        for name in other:
            if name not in known:
                raise InputError(
                    f"{unknown_name('task', name, known)}; the harness' other names (GLUE, MMLU ...) need "
                    'pip install "perpend[eval]"'
                )
        where = "no folder was given" if data is None else f"there is no file for it in {data}"
        raise InputError(
            f"{other[0]} is read from a local file, and {where}: pass data=FOLDER holding "
            f"{local.task(other[0]).files[0]}_{local.task(other[0]).split}.jsonl, or install the harness "
            '(pip install "perpend[eval]") and have a hub within reach'
        )
    return own, synthetic, other


def _local(
    model: nn.Module,
    encoder: Encoder,
    task: Task,
    folder: Path,
    limit: int | None,
    fewshot: int | None,
    batch: int,
    context: int,
    progress: Progress,
) -> TaskScores:
    shots = task.fewshot if fewshot is None else fewshot
    data = read(folder, task, limit=limit)
    pool = _pool(folder, task, data) if shots else None
    prompts = contexts(task, data.documents, pool, shots)
    settings = {
        "version": task.version,
        "fewshot": shots,
        "context": context,
        "bos": encoder.opens_with_bos(),
        "split": task.split,
        "source": data.file,
        "sha256": data.sha256,
        "shots_from": pool.file if pool else None,
        "note": task.note or None,
    }
    scorer = _generated if task.kind == "generate" else _scored
    items, chance = scorer(model, encoder, task, data.documents, prompts, batch, context, progress)
    return TaskScores(task.name, task.metric, task.metrics, items, chance, settings)


def _pool(folder: Path, task: Task, data: TaskData) -> TaskData:
    """Where worked examples come from: the training split, or all of the scored one where the task has no
    other.
    """
    if task.shots == task.split:
        return read(folder, task)
    _check_pool(folder, task)
    return read(folder, task, task.shots)


def _check_pool(folder: Path, task: Task) -> None:
    if task.shots != task.split and locate(folder, task, task.shots) is None:
        raise InputError(
            f"worked examples of {task.name} come from its {task.shots} split: put "
            f"{task.files[0]}_{task.shots}.jsonl into {folder}, or pass fewshot=0"
        )


def contexts(task: Task, documents: Sequence[Document], pool: TaskData | None, shots: int) -> list[str]:
    """The worked examples before each document, drawn document by document as the harness draws them.

    Where a task has no test split the harness draws one more than it needs and leaves the document itself
    out, even though the examples come from elsewhere; where it has one it does not, even if they come from
    there.
    """
    if not shots or pool is None:
        return [""] * len(documents)
    spare = int(task.split != "test")
    if len(pool.documents) < shots + spare:
        raise InputError(f"{shots} worked examples asked for, {pool.file} holds {len(pool.documents)}")
    rng = random.Random(SHOT_SEED)
    texts = []
    for document in documents:
        drawn = rng.sample(pool.documents, shots + spare)
        if spare:
            drawn = [one for one in drawn if one != document][:shots]
        if len(drawn) < shots:  # the document stands in the pool more than once, and was drawn more than once
            drawn = rng.sample([one for one in pool.documents if one != document], shots)
        texts.append("".join(map(task.shot, drawn)))
    return texts


def _scored(
    model: nn.Module,
    encoder: Encoder,
    task: Task,
    documents: Sequence[Document],
    prompts: list[str],
    batch: int,
    context: int,
    progress: Progress,
) -> tuple[dict[str, list[Any]], float]:
    asked = [task.requests(document, shots) for document, shots in zip(documents, prompts)]
    flat = [one for several in asked for one in several]
    answers = iter(loglikelihoods(model, encoder, flat, batch=batch, context=context, progress=progress))
    names = [name for name in task.metrics if name != "perplexity"]
    items: dict[str, list[Any]] = {
        name: [] for name in ("item", "gold_ll", "gold_margin", "prediction", *names)
    }
    for index, (document, several) in enumerate(zip(documents, asked)):
        got = [next(answers) for _ in several]
        lls = np.array([ll for ll, _ in got])
        items["item"].append(index)
        gold = document.gold if task.kind == "choice" else 0
        items["gold_ll"].append(float(lls[gold]))
        if task.kind == "target":
            items["gold_margin"].append(None)
            items["prediction"].append(None)
            items["acc"].append(float(got[0][1]))
            continue
        best_other = max((ll for i, ll in enumerate(lls) if i != gold), default=float("nan"))
        items["gold_margin"].append(float(lls[gold] - best_other))
        items["prediction"].append(int(lls.argmax()))
        sizes = {
            "acc": np.ones(len(lls)),
            "acc_norm": np.array([len(one) for one in document.answers], dtype=float),
            "acc_bytes": np.array([len(one.encode()) for one in document.answers], dtype=float),
        }
        for name in names:
            items[name].append(float((lls / sizes[name]).argmax() == gold))
    if task.kind == "target":
        return items, 0.0
    return items, float(np.mean([1 / len(several) for several in asked]))


def _generated(
    model: nn.Module,
    encoder: Encoder,
    task: Task,
    documents: Sequence[Document],
    prompts: list[str],
    batch: int,
    context: int,
    progress: Progress,
) -> tuple[dict[str, list[Any]], float]:
    from perpend.evaluation.generation import continuations

    rule = task.generation
    assert rule is not None
    texts = continuations(
        model,
        encoder,
        [task.requests(document, shots)[0][0] for document, shots in zip(documents, prompts)],
        steps=rule.steps,
        until=rule.until,
        batch=batch,
        context=context,
        progress=progress,
    )
    gold = loglikelihoods(
        model,
        encoder,
        [
            (shots + one.contexts[0], task.delimiter + one.answers[0])
            for one, shots in zip(documents, prompts)
        ],
        batch=batch,
        context=context,
        progress=progress,
    )
    items: dict[str, list[Any]] = {name: [] for name in ("item", "gold_ll", "prediction", *task.metrics)}
    for index, (document, text, (ll, _)) in enumerate(zip(documents, texts, gold)):
        items["item"].append(index)
        items["gold_ll"].append(ll)
        items["prediction"].append(text)
        for name, value in rule.score(text, document).items():
            items[name].append(value)
    return items, 0.0
