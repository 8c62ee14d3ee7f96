"""`perpend audit`: what a finished attention survey's conclusions rest on, from its saved signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.options import bootstrap_option, run_options, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure


@verb("perpend audit runs/attention-smollm2-135m-instruct-1", "perpend audit my-run --out my-audit --json")
@click.argument("run", metavar="RUN")
@bootstrap_option(100, "A run needs sums per block of sequences.")
@run_options
def command(**options: Any) -> None:
    """What the conclusions of a finished attention survey rest on: metric, mean, temperature, sink set.

    RUN is the folder of a finished `perpend attention`. No model is loaded and nothing is captured again.
    Asked: how much of the content distance lies on tiny entries; whether rival metrics, arithmetic means,
    another temperature, another sink set or dropping the sink change verdicts, nearest neighbours, prune sets
    and clusters of heads; and which triple of heads reverses under every classical metric at once.
    """
    from perpend import output
    from perpend.errors import InputError
    from perpend.job import Job
    from perpend.runs import Run

    source = Run.open(options.pop("run"))
    if source.command != "attention":
        raise InputError(
            f"{source.folder} is a run of `perpend {source.command}`; give a folder of `perpend attention`"
        )
    sink = source.results["sink"]["columns"]
    document = source.document
    if options["plan"]:
        heads = int(source.arrays["signatures"].shape[0] * source.arrays["signatures"].shape[1])
        cost = {"forward_passes": 0, "tokens": 0, "heads": heads, "resamples": options["bootstrap"]}
        output.answer(
            {"plan": cost, "command": "audit"},
            f"no forward pass and no time forecast; {heads} heads, all triples, "
            f"each rate again in {options['bootstrap']} resamples, which take most of the time",
        )
        return
    from perpend.studies.audit_intervals import BlockSums
    from perpend.studies.audits import audit_signatures

    job = Job("audit", options)
    asked = {
        "model": document.get("model"),
        "data": document.get("data"),
        "seeds": document.get("seeds"),
        "run": str(source.folder),
        "signatures_sha256": document.get("files", {}).get("arrays.safetensors"),
    }
    with job.run(**asked) as run:
        study = audit_signatures(
            source.arrays["signatures"],
            sink,
            source.arrays.get("arithmetic"),
            BlockSums.of(source.arrays),
            options["bootstrap"],
            progress=job.progress,
        )
        for name, table in study.tables.items():
            run.table(name, table)
        for name, array in study.arrays.items():
            run.array(name, array)
        run.finish(
            results=study.results,
            conventions={
                **{k: v for k, v in document["conventions"].items() if k in ("sink", "support", "notes")},
                "signatures": "of the surveyed run's first seed; rates exact, over all triples",
                "intervals": "95 %, basic bootstrap over blocks of sequences, on 20,000 sampled triples",
                "taxonomy": "agglomerative; average linkage and the mean over K unless said otherwise",
                "tail": "entries of whole signatures, the sink included",
            },
            findings=[*study.findings, *_of_one_seed(document.get("seeds"))],
            undefined=study.undefined,
        )
    job.answer(run, ("Temperature: verdicts and prune set against τ = 1", study.tables["temperature"]))


def _of_one_seed(seeds: Any) -> list[str]:
    """What tells these numbers from those of the surveyed run, where that has several seeds."""
    if not isinstance(seeds, list) or len(seeds) < 2:
        return []
    return [
        f"All of this is of seed {seeds[0]}, whose signatures the run keeps; the run's own rates are means "
        f"over its {len(seeds)} seeds and differ by as much as seeds do."
    ]


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend audit`."""
    from perpend.commands._audit_figures import figures as made

    return made(run)
