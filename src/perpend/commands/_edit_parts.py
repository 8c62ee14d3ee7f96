"""The studies of one run of `perpend edit`: which run, what they cost, and what is shown of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from perpend.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from perpend.commands._tasks import Tasks
    from perpend.evaluation.windows import Windows
    from perpend.job import Job
    from perpend.studies.edit_sweep import Cell, EditStudy


def gradient_sites(model: Any, options: dict[str, Any]) -> list[str]:
    """The sites asked for, else all that the model has."""
    from perpend.models.edit import SITES, VALUE_SITES
    from perpend.models.stream import parts_of

    own = [s for s in SITES if s in VALUE_SITES or s.split(".")[1] in parts_of(model)]
    return [site for site in options["sites"] or own if site in own]


def head_site(options: dict[str, Any]) -> str:
    """The first value site asked for, exclude-self where no site is; InputError for residual sites alone."""
    asked = [site for site in options["sites"] if site.startswith("value.")]
    if options["sites"] and not asked:
        raise InputError(
            f"{options['sites'][0]} has no heads: --head-sensitivity needs --site value.full or "
            "value.exclude_self, or no --site"
        )
    return asked[0] if asked else "value.exclude_self"


def passes(model: Any, options: dict[str, Any], chosen: Sequence[str], cells: int) -> float:
    """Forward passes of all tokens, roughly: what a run costs before it starts."""
    from perpend.models.attention import attention_sites

    sites = attention_sites(model)
    half = (len(sites) + 1) / (2 * len(sites))
    total = cells + 1.0 if cells else 0.0
    if "audit" in chosen:
        total += 2
    if "gradient" in chosen:
        total += 3 + len(gradient_sites(model, options)) * (5 + half * len(sites))
    if "head_sensitivity" in chosen:
        total += half * sum(1 + site.heads for site in sites)
    return total


def judged(model: Any) -> Callable[[Tensor], Any]:
    """The work on one batch of an edited model, for a plan: the pass, and its KL divergence."""
    from perpend.models.placement import input_device

    def forward(tokens: Tensor) -> None:
        logits = getattr(model(tokens.to(input_device(model))), "logits", None)
        if logits is not None:
            logs = logits.float().log_softmax(-1)
            (logs.exp() * (logs - logits)).sum(-1)

    return forward


def studies(
    job: Job, run: Any, tokens: Tensor, cells: Sequence[Cell], chosen: Sequence[str]
) -> dict[str, EditStudy]:
    """Every study asked for, by name, in the order in which it is told."""
    options, found = job.options, {}
    shared = {"batch": options["batch"], "store": run.step, "progress": job.progress}
    parallel = options["parallel"][0] if options["parallel"] else 0.0
    reference = (options["references"] or ("head",))[0]
    if cells:
        from perpend.studies.edit_sweep import edit_study

        windows = with_words(job, tokens)
        found["sweep"] = edit_study(job.model, windows, cells, basin=options["basin"], **shared)
    if "audit" in chosen:
        from perpend.studies.diagonal import diagonal_study

        found["diagonal"] = diagonal_study(job.model, tokens, parallel=parallel, **shared)
    if "gradient" in chosen:
        from perpend.studies.edit_gradient import gradient_study

        sites = gradient_sites(job.model, options)
        scales = {"reference": reference, "parallel": parallel}
        found["gradient"] = gradient_study(job.model, tokens, sites=sites, **scales, **shared)
    if "head_sensitivity" in chosen:
        from perpend.studies.head_sensitivity import head_sensitivity

        found["heads"] = head_sensitivity(
            job.model, tokens, site=head_site(options), reference=reference, parallel=parallel, **shared
        )
    return found


def score(tasks: Tasks, job: Job, cells: Sequence[Cell]) -> None:
    """Scores the model as it is and under every edit of the sweep, controls apart."""
    edited = {c.name: (lambda c=c: c.applied(job.model)) for c in cells if c.control is None}
    tasks.each({"unedited": nullcontext, **edited})


def with_words(job: Job, tokens: Tensor) -> Windows:
    """The sequences with the whitespace words that each one's scored tokens spell."""
    from dataclasses import replace

    import torch

    from perpend.evaluation.windows import as_windows

    sequences = job.sequences
    spelt = [job.tokenizer.decode(row, skip_special_tokens=True) for row in tokens[:, 1:].tolist()]
    words = torch.tensor([len(text.split()) for text in spelt])
    return replace(as_windows(tokens, bos=sequences.bos, split=sequences.text.name), words=words)


def shown(found: dict[str, EditStudy]) -> list[Any]:
    """The tables of the answer on the terminal."""
    parts: list[Any] = []
    for name, study in found.items():
        tables = study.tables
        if name == "sweep":
            parts.append(("Edits: loss in nats per token, change paired with the unedited", _cells(tables)))
            if "basins" in tables:
                parts.append(("Tolerance basins: how far from 1 a scale may go", tables["basins"].round(3)))
        elif name == "diagonal":
            columns = ["form", "mean", "q05", "median", "q95", "min", "max", "after_below_0", "after_above_1"]
            whole = tables["diagonal"][tables["diagonal"]["layer"].isna()]
            parts.append(("Change of A_tt that realises the edit, all layers", whole[columns].round(4)))
            if "audit" in tables:
                whole = tables["audit"][tables["audit"]["layer"].isna()].drop(columns="layer")
                parts.append(("Output after W_O, all layers (fractions)", whole.round(4)))
        elif name == "gradient":
            parts.append(("Slope of the loss at s = 1, nats per unit", tables["slope_check"].round(4)))
        elif name == "heads":
            parts.append(("Heads alone and together, by layer (nats)", tables["layers"].round(4)))
    return parts


def _cells(tables: dict[str, Any]) -> Any:
    table = tables["cells"]
    kept = ["site", "reference", "parallel", "perpendicular", "control"]
    kept += [name for name in ("layers", "heads") if table[name].notna().any()]
    numbers = ["loss", "perplexity", "word_perplexity"]
    numbers += ["change", "change_low", "change_high", "kl", "top1_agreement"]
    copy = table[[*kept, *numbers]].copy()
    copy[numbers] = copy[numbers].astype(float).round(4)
    copy[kept] = copy[kept].astype(object).where(copy[kept].notna(), "")
    return copy
