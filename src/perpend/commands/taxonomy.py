"""`perpend taxonomy`: do the clusters of heads survive dropping the sink?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perpend.options import Near, bootstrap_option, loading_options, run_options, seed_options, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure

DEFAULT = "minilm"  # an encoder with [CLS] and [SEP] that needs no model hub
NAMES = ("table-5", "clark")
OF_MODELS = ("text", "sequences", "bootstrap", "seeds", "revision", "dtype")  # nothing to a finished survey


@verb(
    "perpend taxonomy",
    "perpend taxonomy bert-base --protocol clark --text wikitext103",
    "perpend taxonomy runs/attention-gpt2-1",
)
@click.argument("subject", required=False, default=None, metavar="[MODEL]")
@click.option(
    "--protocol",
    type=Near(NAMES),
    default="table-5",
    show_default=True,
    help="table-5: the first 64 keys. clark: all 128 keys of [CLS] … [SEP], sink set {CLS, SEP}.",
)
@click.option(
    "--summed",
    is_flag=True,
    help="Also Clark et al.'s own distances, of encoders: smoothed rows, JS summed over tokens.",
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@loading_options
@click.option("--text", help="A file, folder, .jsonl or named data set.  [default: built-in English]")
@click.option("--sequences", type=click.IntRange(1), help="How many.  [default: the protocol's, or all]")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Sequences a pass.")
@bootstrap_option(100)
@seed_options((0,))
@run_options
def command(**options: Any) -> None:
    """Cluster the heads of MODEL with and without the sink, and compare the clusters.

    MODEL is a model (default: the BERT all-MiniLM-L6-v2, which needs no model hub), or the folder of a
    finished `perpend attention`, whose signatures are then taken as they are. Asked: the adjusted Rand index
    between the conventions for five dissimilarities; and, in an encoder, whether the heads that attend to
    [SEP] or [CLS] are found again as a cluster once the sink is gone.
    """
    from perpend.errors import InputError

    subject = options.pop("subject") or DEFAULT
    if len(options["seeds"]) != 1:
        raise InputError("a taxonomy takes one --seed; run it again for another")
    if (Path(subject) / "run.json").is_file():
        return _of_run(subject, options)
    return _of_model(subject, options)


def _of_model(subject: str, options: dict[str, Any]) -> None:
    from perpend.errors import InputError
    from perpend.job import Job
    from perpend.models.attention import attention_sites
    from perpend.studies import predictions
    from perpend.studies.attention import no_interval
    from perpend.studies.summed_js import summed_jensen_shannon
    from perpend.studies.taxonomy_study import protocol_named, taxonomy_study
    from perpend.surveys.attention import survey_attention

    protocol = protocol_named(options["protocol"])
    model = Job("taxonomy", {**options, "model": subject})
    encoder = is_encoder(model.tokenizer)
    if not encoder and (protocol.name == "clark" or options["summed"]):
        raise InputError(
            f"{subject} does not open a text with [CLS] and close it with [SEP]: the clark protocol and "
            "--summed are for encoders that do; leave them out for a causal model"
        )
    length = protocol.length if encoder else 192
    job = Job("taxonomy", {**options, "model": subject, "length": length, "bos": "auto"})
    job.__dict__["_loaded"] = model._loaded
    held = len(job.sequences.tokens)
    if options["sequences"] is None:
        job.options["sequences"] = min(held, protocol.sequences)
    heads, least = sum(site.heads for site in attention_sites(job.model)), min(protocol.clusters)
    if heads < least:
        raise InputError(
            f"{subject} has {heads} attention heads, too few for the {least} clusters of a taxonomy"
        )
    tokens = job.tokens(options["seeds"][0])
    if job.planned(tokens, passes=2 if options["summed"] else 1):
        return
    roles = {"cls": [0], "sep": [length - 1]} if encoder else {}
    inside = length if protocol.window is None else protocol.window
    roles = {name: keys for name, keys in roles.items() if keys[0] < inside}
    sink = [roles[name][0] for name in protocol.sink] if encoder else [0]
    with job.run(sink=sink, window=protocol.window if encoder else 64) as run:
        written = predictions.write(run.step, predictions.TAXONOMY)
        survey = survey_attention(
            job.model,
            tokens,
            window=protocol.window if encoder else None,
            queries=protocol.queries if encoder else None,
            sink=sink,
            batch=options["batch"],
            block=block_size(len(tokens), options["batch"]),
            rows=False,
            store=run.step,
            progress=job.progress,
        )
        many, seed = options["bootstrap"] if len(survey.blocks) > 1 else 0, options["seeds"][0]
        summed, again = None, ()
        if options["summed"]:
            found = summed_jensen_shannon(
                job.model,
                tokens,
                sink,
                batch=options["batch"],
                block=block_size(len(tokens), options["batch"]),
                store=run.step,
                progress=job.progress,
            )
            summed, again = (found.keep, found.drop), found.replicates(many, seed)
        study = taxonomy_study(
            survey.signatures,
            sink,
            protocol,
            roles=roles,
            summed=summed,
            replicates=survey.replicates(many, seed),
            summed_replicates=again,
        )
        conventions = {
            "protocol": protocol.words if encoder else f"{protocol.words}; causal: rows of the main protocol",
            "sink": survey.support.rule,
            "support": survey.support.words,
            "notes": list(survey.notes),
            "opening": list(job.sequences.opening),
            "closing": list(job.sequences.closing),
        }
        lacking = no_interval(survey, options["bootstrap"])
        undefined = {str(k): v for k, v in survey.undefined.items()}
        _finish(run, study, written, conventions, undefined | ({"intervals": lacking} if lacking else {}))
    job.answer(run, *_shown(study))


def _of_run(folder: str, options: dict[str, Any]) -> None:
    from perpend import output
    from perpend.errors import InputError
    from perpend.job import Job
    from perpend.runs import Run
    from perpend.studies import predictions
    from perpend.studies.taxonomy_study import protocol_named, taxonomy_study

    source = Run.open(folder)
    asks = click.get_current_context().get_parameter_source
    idle = [name for name in OF_MODELS if asks(name) is click.core.ParameterSource.COMMANDLINE]
    if idle:
        raise InputError(
            f"{folder} is a finished survey, whose signatures are taken as they are: "
            f"{', '.join(f'--{name}' for name in idle)} would change nothing; leave that out, or give "
            "the model"
        )
    if source.command != "attention" or options["protocol"] == "clark" or options["summed"]:
        raise InputError(
            f"{folder} is a run of `perpend {source.command}`; the signatures of a `perpend attention` can "
            "be clustered by --protocol table-5. For clark and --summed give the model"
        )
    document, sink = source.document, source.results["sink"]["columns"]
    signatures = source.arrays["signatures"]
    if options["plan"]:
        heads = int(signatures.shape[0] * signatures.shape[1])
        cost = {"forward_passes": 0, "tokens": 0, "heads": heads}
        return output.answer({"plan": cost, "command": "taxonomy"}, f"no forward pass; {heads} heads")
    telling = ("out", "resume", "json", "quiet")
    job = Job("taxonomy", {name: options[name] for name in telling})
    asked = {
        "model": document.get("model"),
        "data": document.get("data"),
        "seeds": document.get("seeds"),
        "run": str(source.folder),
        "protocol": options["protocol"],
        "signatures_sha256": document.get("files", {}).get("arrays.safetensors"),
    }
    with job.run(**asked) as run:
        written = predictions.write(run.step, predictions.TAXONOMY)
        study = taxonomy_study(signatures, sink, protocol_named(options["protocol"]))
        kept = {k: v for k, v in document["conventions"].items() if k in ("sink", "support", "notes")}
        _finish(run, study, written, {**kept, "signatures": "of the surveyed run's first seed"}, {})
    return job.answer(run, *_shown(study))


def _finish(run: Any, study: Any, written: Any, conventions: dict[str, Any], undefined: Any) -> None:
    from perpend.studies import predictions
    from perpend.studies.taxonomy_study import CLASSICAL

    between = study.results["between_conventions"]
    aris = {name: record["mean"] for name, record in between.items()}
    ends = {name: (record["low"], record["high"]) for name, record in between.items() if "low" in record}
    scored = predictions.told(written, [predictions.clusters_differ(aris, CLASSICAL, ends)])
    for name, table in study.tables.items():
        run.table(name, table)
    for name, array in study.arrays.items():
        run.array(name, array)
    run.finish(
        results={**study.results, "predictions": scored},
        conventions={
            **conventions,
            "taxonomy": "agglomerative, average linkage, mean over K unless said otherwise",
            "block": "heads with more than half of the signature on the role's keys; Jaccard index with the "
            "best-matching cluster",
            "interval": "95 % of resampled texts, by blocks of sequences",
        },
        findings=[*study.findings, *predictions.sentences(scored)],
        undefined={**study.undefined, **undefined},
    )


def is_encoder(tokenizer: Any) -> bool:
    """Whether the tokenizer opens a text with one CLS and closes it with one SEP, as BERT's does."""
    if tokenizer is None or not hasattr(tokenizer, "convert_ids_to_tokens"):
        return False
    ids = list(tokenizer("a")["input_ids"])
    first, last = getattr(tokenizer, "cls_token_id", None), getattr(tokenizer, "sep_token_id", None)
    return first is not None and last is not None and ids[:1] == [first] and ids[-1:] == [last]


def block_size(sequences: int, batch: int) -> int:
    """Sequences a block: whole batches, about 32 blocks of at most 32 sequences where there are enough."""
    from perpend.commands.attention import block_size as shared

    return shared(sequences, batch)


def _shown(study: Any) -> Sequence[Any]:
    cells = study.tables["taxonomy"]
    wide = cells[cells["linkage"] == "average"].pivot(index="metric", columns="clusters", values="ari")
    wide = wide.reindex(list(dict.fromkeys(cells["metric"]))).round(3).reset_index()
    wide.columns = ["metric", *(f"K = {k}" for k in wide.columns[1:])]
    shown = [("Adjusted Rand index, sink kept against dropped", wide)]
    blocks = study.tables["blocks"]
    for role in dict.fromkeys(blocks["role"]) if len(blocks) else ():
        own = blocks[blocks["role"] == role]
        table = own.pivot(index=["metric", "policy"], columns="clusters", values="jaccard").round(3)
        table = table.reset_index()
        table.columns = ["metric", "sink", *(f"K = {k}" for k in table.columns[2:])]
        shown.append((f"Jaccard index of the {role.upper()} block with its best cluster", table))
    return shown


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend taxonomy`."""
    from perpend.commands._taxonomy_figures import figures as made

    return made(run)
