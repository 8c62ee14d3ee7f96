"""What an audit of choices reads: log rows of heads from a model, a survey or a run, by BOS and window.

    facts, read = read_source(model, tokens, "signatures", (32, 64), ("aitchison",), batch=8)
    rows, heads = read["as given"][64]("aitchison", None)     # (heads, keys), [(layer, head), …]

A reader takes the kind of mean and the seed of a resample of the text (None: the text as it is).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import logsumexp

from perpend.batching import starts
from perpend.errors import InputError

SAMPLE = 8  # single rows a sequence

Reader = Callable[[str, "int | None"], tuple[np.ndarray, tuple[tuple[int, int], ...]]]


def read_source(
    source: Any,
    tokens: Any,
    of: str,
    windows: Sequence[int] | None,
    means: Sequence[str],
    batch: int,
) -> tuple[dict[str, Any], dict[str, dict[int, Reader]]]:
    """BOS → window → a function of (mean, draw) to log rows and their heads; and what must be said of it."""
    from torch import nn

    from perpend.surveys.attention_result import AttentionSurvey

    if isinstance(source, nn.Module):
        return of_model(source, tokens, of, windows, means, batch)
    if of == "rows":
        raise InputError("single rows come from a model: give audit a model and tokens, or of='signatures'")
    if tokens is not None:
        raise InputError("tokens go with a model; a run or a survey has read its own")
    named = dict(source) if isinstance(source, Mapping) else {"as surveyed": source}
    read: dict[str, dict[int, Reader]] = {}
    resamples = True
    for bos, each in named.items():
        if isinstance(each, AttentionSurvey):
            width, reader = each.support.window, _survey_reader(each, means)
            resamples &= len(each.blocks) > 1
        else:
            width, reader = _run_reader(each, means)
            resamples = False
        chosen = list(windows) if windows else [width]
        if any(window > width for window in chosen):
            raise InputError(f"the source holds {width} keys, so no window of {max(chosen)}")
        if any(window < width for window in chosen) and "arithmetic" in means:
            raise InputError(
                "an arithmetic mean cannot be narrowed to fewer keys after the fact; give the model, or "
                "means=('aitchison',)"
            )
        read[str(bos)] = {window: _narrowed(reader, window) for window in chosen}
    return {"resamples": resamples, "words": "signatures of a survey"}, _same_heads(read)


def of_model(
    model: Any, tokens: Any, of: str, windows: Sequence[int] | None, means: Sequence[str], batch: int
) -> tuple[dict[str, Any], dict[str, dict[int, Reader]]]:
    from perpend.surveys.attention import survey_attention

    if tokens is None:
        raise InputError("a model needs tokens: ids [n, T], or a mapping from a BOS policy to ids")
    named = dict(tokens) if isinstance(tokens, Mapping) else {"as given": tokens}
    chosen = list(windows) if windows else [64]
    read: dict[str, dict[int, Reader]] = {}
    count = 0
    for bos, ids in named.items():
        read[str(bos)] = {}
        for window in chosen:
            if of == "rows":
                rows, heads = _single_rows(model, ids, window, batch)
                read[str(bos)][window] = _fixed(rows, heads)
                continue
            block = max(batch, -(-len(ids) // 32))
            survey = survey_attention(
                model, ids, window=window, batch=batch, block=block, rows="arithmetic" in means, sample=0
            )
            count = len(survey.blocks)
            read[str(bos)][window] = _survey_reader(survey, means)
    words = (
        f"{'single rows' if of == 'rows' else 'signatures'} of {len(next(iter(named.values())))} sequences"
    )
    return {"resamples": of == "signatures" and count > 1, "words": words}, _same_heads(read)


def _fixed(rows: np.ndarray, heads: tuple[tuple[int, int], ...]) -> Reader:
    return lambda mean, draw: (rows, heads)


def _survey_reader(survey: Any, means: Sequence[str]) -> Reader:
    if survey.support.virtual or survey.support.ragged:
        raise InputError("the audit of choices needs keys at fixed positions, and no learned sink logit")
    heads = [(i, j) for i, site in enumerate(survey.sites) for j in range(site.heads)]
    heads = [(i, j) for i, j in heads if np.isfinite(survey.signatures[i, j]).all()]
    at = tuple(np.asarray(heads).T)
    names = tuple((survey.sites[i].index, j) for i, j in heads)

    def read(mean: str, draw: int | None) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
        if mean == "aitchison":
            found = survey.signatures if draw is None else next(survey.replicates(1, draw))
            return found[at], names
        total, rows = survey.stacked("arithmetic"), survey.stacked("rows")
        weights = np.ones(len(rows)) if draw is None else next(survey.resampled(1, draw))
        sums = np.tensordot(weights, total, 1)[at]
        with np.errstate(divide="ignore"):
            return np.log(sums / sums.sum(-1, keepdims=True)), names

    return read


def _run_reader(source: Any, means: Sequence[str]) -> tuple[int, Reader]:
    from perpend.runs import Run

    run = Run.open(source) if isinstance(source, (str, Path)) else source
    if getattr(run, "command", None) != "attention":
        raise InputError(
            "audit reads a model with tokens, a survey, or the folder of a finished `perpend attention`"
        )
    signatures, arithmetic = run.arrays["signatures"], run.arrays.get("arithmetic")
    if "arithmetic" in means and arithmetic is None:
        raise InputError("this run kept no arithmetic means; give means=('aitchison',)")
    defined = np.isfinite(signatures).all(-1)
    names = tuple((int(i), int(j)) for i, j in np.argwhere(defined))

    def read(mean: str, draw: int | None) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
        if mean == "aitchison":
            return signatures[defined], names
        with np.errstate(divide="ignore"):
            return np.log(arithmetic[defined]), names

    return signatures.shape[-1], read


def _narrowed(reader: Reader, window: int) -> Reader:
    def read(mean: str, draw: int | None) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
        rows, heads = reader(mean, draw)
        rows = rows[..., :window]
        return rows - logsumexp(rows, axis=-1, keepdims=True), heads

    return read


def _same_heads(read: dict[str, dict[int, Reader]]) -> dict[str, dict[int, Reader]]:
    """Readers that give the heads which all of them have, in one order."""
    # Every source has Aitchison means, and which heads there are does not depend on the mean.
    held = [reader("aitchison", None)[1] for by_window in read.values() for reader in by_window.values()]
    common = [head for head in held[0] if all(head in other for other in held[1:])]
    if len(common) < 2:
        raise InputError(f"{len(common)} heads have rows in every window and BOS; it takes two")

    def cut(reader: Reader) -> Reader:
        def chosen(mean: str, draw: int | None) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
            rows, heads = reader(mean, draw)
            place = {head: index for index, head in enumerate(heads)}
            return rows[[place[head] for head in common]], tuple(common)

        return chosen

    return {bos: {w: cut(r) for w, r in by_window.items()} for bos, by_window in read.items()}


def _single_rows(
    model: Any, ids: Any, window: int, batch: int
) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Log rows (heads, rows, window) of evenly spaced queries that see the whole window."""
    import torch

    from perpend.models.attention import attach, attention_sites, row_logits, valid_rows, visible
    from perpend.surveys.batches import runner, sequences

    sites = attention_sites(model)
    data = sequences(ids)
    if not window < data.length:
        raise InputError(f"sequences of {data.length} tokens have no query after a window of {window}")
    queries = torch.as_tensor(
        sorted({int(q) for q in np.linspace(window, data.length - 1, SAMPLE)}), dtype=torch.long
    )
    keys = slice(0, window)
    kept: dict[int, list[np.ndarray]] = {site.index: [] for site in sites}

    def collect(call: Any, output: Any) -> None:
        rows = row_logits(call, queries, keys)
        seen = visible(call, queries, keys)
        whole = valid_rows(call)[:, queries]
        if seen is not None:
            whole = whole & seen.all(-1).all(1)
        if bool(whole.all()):  # a layer that hides a part of the window has no row to compare
            logs = torch.log_softmax(rows.double(), -1)
            kept[call.layer].append(logs.transpose(0, 1).flatten(1, 2).cpu().numpy())

    run = runner(model, set(data.inputs), sites)
    first = starts(data.count, batch)
    with torch.no_grad(), attach(model, collect, sites=sites):
        for start in first:
            run(data.batch(start, min(data.count, start + batch))[0])
    whole = [site for site in sites if len(kept[site.index]) == len(first)]
    if not whole:
        raise InputError(f"no layer sees all of keys 0 to {window - 1}; use a smaller window")
    rows = np.concatenate([np.concatenate(kept[site.index], 1) for site in whole])
    return rows, tuple((site.index, head) for site in whole for head in range(site.heads))
