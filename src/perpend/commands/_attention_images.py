"""`perpend attention --images`: the survey of an image model, its tokens' roles found and not assumed."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perpend.commands._reading_options import asked
from perpend.errors import InputError
from perpend.job import Job
from perpend.report import charts
from perpend.report.figure import Figure

INTERVALS = 200


def survey_images(options: dict[str, Any]) -> None:
    """One run: `window` None is all keys; `sink` a role or several by comma, `auto`, or positions."""
    from perpend import images
    from perpend.commands.attention import _shown, block_size, calibrated
    from perpend.models.roles import find_roles
    from perpend.studies.attention import attention_study
    from perpend.surveys.attention import survey_attention
    from perpend.surveys.outliers import find_outliers, survey_outliers

    job = Job("attention", options)
    pixels = {seed: job.tokens(seed) for seed in options["seeds"]}
    first = pixels[options["seeds"][0]]
    roles = find_roles(job.model, first)
    sink = sink_of(options["sink"], roles)
    if job.planned(first, passes=3, remarks=[roles.words]):
        return
    batch = options["batch"]
    with job.run(roles=roles.describe()) as run:
        surveys: dict[int, Any] = {}
        for seed, chosen in pixels.items():
            everything = len(chosen) == len(job.images)
            if surveys and everything:  # two seeds that read every image read the same
                surveys[seed] = next(iter(surveys.values()))
                continue
            surveys[seed] = survey_attention(
                job.model,
                chosen,
                window=options["window"],
                sink=sink,
                batch=batch,
                block=block_size(len(chosen), batch),
                store=lambda name, compute, seed=seed: run.step(f"seed-{seed}-{name}", compute),
                progress=job.progress,
                **(asked(options, seed) if not surveys else {}),
            )
        survey = surveys[options["seeds"][0]]
        study = attention_study(surveys, triples=options["triples"], replicates=options["bootstrap"])
        results = dict(study.results)
        found = find_outliers(job.model, first, roles, batch=batch, progress=job.progress)
        outliers = None
        if found.count:
            outliers = survey_outliers(
                job.model,
                first,
                found.positions,
                batch=batch,
                block=block_size(len(first), batch),
                store=run.step,
                progress=job.progress,
            )
        shares = by_role(survey, roles)
        results["roles"] = {**roles.describe(), "mass": _role_means(shares)}
        results["outliers"] = _outlier_results(found, outliers)
        results["accuracy"] = images.accuracy(job.model, job.images, batch=batch)
        results["calibration"], calibration = calibrated(job.model_name, results)
        tables = {**study.tables, **calibration, "roles": shares, "norms": found.table()}
        if outliers is not None:
            tables["outliers"] = outliers.per_layer()
        for name, table in tables.items():
            run.table(name, table)
        for name, array in study.arrays.items():
            run.array(name, array)
        run.finish(
            results=results,
            conventions={
                **study.conventions,
                "roles": "positions whose first queries change with a learned token's values",
                "outliers": f"patches above {found.factor:g} × the median norm after the last block; rows "
                "with each image's own as the sink, so no signatures",
            },
            findings=[*study.findings, *_findings(results, roles, found)],
            undefined={**study.undefined, **_undefined(results)},
        )
    job.answer(run, *_shown(study), ("Share of a row on each role, mean over layers", _role_table(shares)))


def sink_of(rule: str, roles: Any) -> Any:
    """Positions for a rule of roles; `first` means the class token; `auto` and positions stay as they are."""
    if rule == "outliers":
        raise InputError(
            "outlier tokens lie elsewhere in every image, so they make no signatures; their row statistics "
            "are reported in any case: choose the class token or registers for the rest"
        )
    if rule == "auto" or rule.replace(",", "").replace(" ", "").isdigit():
        return rule
    if rule == "first":
        if 0 in roles.patches:
            raise InputError(
                f"the first token of this model is a patch, and no sink ({roles.words}); choose --sink auto, "
                "a role, or positions"
            )
        rule = "cls" if 0 in roles.roles.get("cls", ()) else next(iter(roles.roles))
    positions = roles.positions(rule)
    return "cls" if rule == "cls" and positions == (0,) else list(positions)


def by_role(survey: Any, roles: Any) -> pd.DataFrame:
    """Mean share of a row on each role, one row a layer and role: `share` of the mass, `keys`, `uniform`."""
    support = survey.support.window
    places = {**roles.roles, "patches": roles.patches}
    rows = []
    for index, site in enumerate(survey.sites):
        mean = survey.arithmetic[index, : site.heads].mean(0)
        for role, keys in places.items():
            inside = [key for key in keys if key < support]
            if inside:
                rows.append(
                    {
                        "layer": site.index,
                        "role": role,
                        "share": float(mean[inside].sum()),
                        "keys": len(inside),
                        "uniform": len(inside) / support,
                    }
                )
    return pd.DataFrame(rows, columns=["layer", "role", "share", "keys", "uniform"])


def _role_means(shares: pd.DataFrame) -> dict[str, float]:
    return {role: float(group["share"].mean()) for role, group in shares.groupby("role", sort=False)}


def _role_table(shares: pd.DataFrame) -> pd.DataFrame:
    return shares.groupby("role", sort=False)[["share", "uniform"]].mean().round(3).reset_index()


def _outlier_results(found: Any, survey: Any) -> dict[str, Any]:
    import numpy as np

    record: dict[str, Any] = {
        "factor": found.factor,
        "tokens": found.count,
        "images_with": sum(bool(places) for places in found.positions),
        "images": len(found.positions),
        "largest_over_median": float(found.top[-1] / found.median[-1]),
        "row_mass": None,
    }
    if survey is not None:
        table = survey.per_layer()
        record |= {"row_mass": float(table["sink_mass"].mean()), "content": float(table["content"].mean())}
        if len(survey.rows) > 1:
            drawn = [float(np.nanmean(means["sink_mass"])) for means in survey.resampled(INTERVALS)]
            low, high = np.nanquantile(drawn, [0.025, 0.975])
            record |= {"low": float(low), "high": float(high)}
    return record


def _findings(results: dict[str, Any], roles: Any, found: Any) -> list[str]:
    outliers, mass = results["outliers"], results["roles"]["mass"]
    lines = [
        f"Tokens of an image, {roles.words}. Mean share of a row: "
        + ", ".join(f"{role} {value:.1%}" for role, value in mass.items())
        + "."
    ]
    if outliers["tokens"]:
        ends = f" (95 % {outliers['low']:.1%} to {outliers['high']:.1%})" if "low" in outliers else ""
        lines.append(
            f"{outliers['tokens']} patch tokens in {outliers['images_with']} of {outliers['images']} images "
            f"have norms above {found.factor:g} times the median; rows give them {outliers['row_mass']:.1%}"
            f"{ends}."
        )
    else:
        lines.append(
            f"No patch token's norm exceeds {found.factor:g} times the median after the last block (the "
            f"largest is {outliers['largest_over_median']:.2f} times): no outlier tokens in these images."
        )
    scored = results["accuracy"]
    if scored["accuracy"] is not None:
        lines.append(
            f"Top-1 accuracy {scored['accuracy']:.1%} (95 % {scored['low']:.1%} to {scored['high']:.1%}) on "
            f"{scored['images']} labelled images."
        )
    return lines


def _undefined(results: dict[str, Any]) -> dict[str, str]:
    found = {}
    if results["outliers"]["row_mass"] is None:
        found["outliers.row_mass"] = "no image has an outlier token"
    if results["accuracy"]["accuracy"] is None:
        found["accuracy"] = results["accuracy"]["why"]
    return found


def figures(run: Any) -> list[Figure]:
    """What an image model's run has beyond a text model's: shares by role, norms, outliers as the sink."""
    shares, norms = run.tables["roles"], run.tables["norms"]
    found = [
        Figure(
            "Attention by role of the key",
            "Where do rows go: to the class token, to registers, or to patches?",
            charts.profile(shares, "share", series="role", label="share of a row", zero=True),
            shares,
            "Mean over heads, queries and images. Roles are found by changing the learned tokens, not "
            "assumed; `uniform` in the table is what even attention would give.",
        ),
        Figure(
            "Norms of patch tokens",
            "Are there high-norm outlier tokens, and from which block on?",
            charts.profile(
                norms,
                {"median_norm": "median", "largest_norm": "largest"},
                x="block",
                label="norm after the block",
                log_y=True,
            ),
            norms,
            f"Outliers are patches above {run.results['outliers']['factor']:g} times the median after the "
            "last block. Where the lines part by an order of magnitude, some patches serve as registers.",
        ),
    ]
    if "outliers" in run.tables:
        table = run.tables["outliers"]
        found.append(
            Figure(
                "Outlier tokens as the sink",
                "How much of a row do each image's own outlier tokens take?",
                charts.profile(table, "sink_mass", label="share of a row", zero=True),
                table,
                "Rows of images that have outliers, on all keys; positions differ from image to image, so "
                "there are no signatures.",
            )
        )
    return found
