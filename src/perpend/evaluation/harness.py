"""lm-evaluation-harness on a model in memory, for the standard names that need its data sets from a hub.

The harness' own index of all tasks takes about half a minute to build; here only the folders of the named
tasks are indexed, found by a text search of its task files.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from perpend.errors import InputError, unknown_name
from perpend.evaluation.result import TaskScores
from perpend.evaluation.scoring import Encoder

_NAME = re.compile(
    r"^(?:task|group|tag):[ \t]*([\w.+-]+)[ \t]*$|^tag:[ \t]*\n((?:[ \t]*-[ \t]*[\w.+-]+[ \t]*\n)+)", re.M
)
_DATA = re.compile(r"^dataset_path:[ \t]*[\"']?([\w./-]+)", re.M)
_NO_HUB = ("json", "csv", "text", "parquet", "arrow")  # data sets made of files that the task names itself
LOCAL = "pass data=FOLDER with local files for the tasks that have them"
HEADLINES = ("acc_norm", "acc", "exact_match_strict", "exact_match", "f1", "em", "mcc", "word_perplexity")
SHORT = {"truthfulqa": ("truthfulqa_mc1", "truthfulqa_mc2")}


def available() -> bool:
    """Whether lm-evaluation-harness is installed (`pip install "perpend[eval]"`)."""
    return importlib.util.find_spec("lm_eval") is not None


def task_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval.tasks")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def index() -> dict[str, frozenset[Path]]:
    """Name of a task, group or tag -> the folders whose files define it."""
    found: dict[str, set[Path]] = {}
    for path in task_folder().rglob("*.yaml"):
        for single, several in _NAME.findall(path.read_text(encoding="utf-8", errors="replace")):
            for name in [single] if single else re.findall(r"[\w.+-]{2,}", several):
                found.setdefault(name, set()).add(path.parent)
    return {name: frozenset(folders) for name, folders in found.items()}


def wanted(tasks: Sequence[str]) -> list[str]:
    """The harness' own names of tasks; InputError for one it does not know."""
    names = _spelt_out(tasks)
    for name in names:
        if name not in index():
            from perpend.evaluation.ruler import names as ruler_names

            raise unknown_name("task", name, _near(name, [*index(), *ruler_names()]))
    return names


def at_hand(tasks: Sequence[str]) -> None:
    """InputError for tasks of the harness whose data set is neither on this machine nor within reach."""
    from perpend.models._source import hub_reachable

    lacking = [name for name in wanted(tasks) if not _kept(name)]
    if lacking and not hub_reachable():
        raise InputError(
            f"the data of {', '.join(lacking)} are on the model hub, which cannot be reached from here; "
            + LOCAL
        )


def _kept(name: str) -> bool:
    """Whether a data set that the task's files name is in a cache of this machine, or is no hub's."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    files = [path for folder in index()[name] for path in folder.glob("*.yaml")]
    named = {
        one for path in files for one in _DATA.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
    return any(
        one in _NO_HUB
        or (cache / one.replace("/", "___")).is_dir()
        or (Path(constants.HF_HUB_CACHE) / f"datasets--{one.replace('/', '--')}").is_dir()
        for one in named
    )


def _spelt_out(tasks: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for one in tasks for name in SHORT.get(one, (one,))))


def harness_scores(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    fewshot: int | None = None,
    batch: int = 8,
    context: int | None = None,
    bos: str = "auto",
    include: Iterable[str | Path] = (),
) -> list[TaskScores]:
    """Scores of tasks by the harness itself, its samples as our items.

    include: folders with task files of your own. Raises InputError for an unknown name, a missing extra, or
    data that cannot be reached.
    """
    if not available():
        raise InputError('this task needs lm-evaluation-harness: pip install "perpend[eval]"')
    own = [Path(one) for one in include]
    folders = set(own)
    if own:
        names = _spelt_out(tasks)
    else:
        names = wanted(tasks)
        folders |= {folder for name in names for folder in index()[name]}
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=sorted(folders), include_defaults=False)
    add_bos = {"auto": None, "always": True, "never": False}[bos]
    lm = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=context, add_bos_token=add_bos,
        backend="causal",
    )  # fmt: skip
    try:
        output = simple_evaluate(
            lm,
            tasks=names,
            num_fewshot=fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
        )
    except (ConnectionError, OSError) as error:
        raise InputError(
            f"the data of {', '.join(names)} could not be reached ({type(error).__name__}: {error}); "
            f"with a hub out of reach {LOCAL}"
        ) from error
    opened = Encoder(tokenizer, bos).opens_with_bos()
    return [_scores(name, output, {"context": context, "bos": opened}) for name in output["samples"]]


def _near(name: str, known: list[str]) -> list[str]:
    """Of thousands of names, those worth showing."""
    import difflib

    close = difflib.get_close_matches(name, known, n=6, cutoff=0.5)
    return close or sorted(one for one in known if one.startswith(name[:3]))[:6] or sorted(known)[:6]


def _scores(name: str, output: dict[str, Any], stated: dict[str, Any]) -> TaskScores:
    samples, config = output["samples"][name], output["configs"][name]
    rules = list(dict.fromkeys(one["filter"] for one in samples))
    items: dict[str, list[Any]] = {}
    aggregates: dict[str, float] = {}
    for rule in rules:
        rows = sorted((one for one in samples if one["filter"] == rule), key=lambda one: one["doc_id"])
        items.setdefault("item", [one["doc_id"] for one in rows])
        items.setdefault("gold_ll", [_gold(one) for one in rows])
        for metric in rows[0]["metrics"]:
            label = metric if len(rules) == 1 else f"{metric}_{rule.split('-')[0]}"
            values = [one[metric] for one in rows]
            if metric != "perplexity" and all(isinstance(value, (int, float)) for value in values):
                items[label] = [float(value) for value in values]
            elif (
                metric != "perplexity"
            ):  # pairs that only make sense together: a correlation, a corpus perplexity
                aggregates[label] = float(output["results"][name][f"{metric},{rule}"])
    metrics = [key for key in items if key not in ("item", "gold_ll")]
    if any("perplexity" in one["metrics"] for one in samples):
        metrics.append("perplexity")
    known = [*metrics, *aggregates]
    headline = next((one for one in HEADLINES if one in known), known[0])
    sizes = [len(one["resps"]) for one in samples if config.get("output_type") == "multiple_choice"]
    settings = {
        "version": str(output["versions"].get(name)),
        "fewshot": output["n-shot"].get(name),
        **stated,
        "split": config.get("test_split") or config.get("validation_split"),
        "source": f"lm-eval {version('lm_eval')}: {config.get('dataset_path')}",
        "sha256": output.get("task_hashes", {}).get(name),
    }
    chance = sum(1 / size for size in sizes) / len(sizes) if sizes else 0.0
    return TaskScores(name, headline, tuple(metrics), items, chance, settings, aggregates)


def _gold(sample: dict[str, Any]) -> float:
    """Log-likelihood of the gold answer where the harness took one."""
    responses = sample["filtered_resps"]
    try:
        index = int(sample["target"]) if len(responses) > 1 else 0
        return float(responses[index][0])
    except (TypeError, ValueError, IndexError):
        return math.nan  # generated text, or several right answers
