"""The run of `perpend prune`: signatures, a prediction, sets, losses, scores, masks and a saved model."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from perpend.commands._prune_inputs import Inputs
from perpend.commands._tasks import Tasks
from perpend.errors import InputError
from perpend.job import Job
from perpend.models.attention import attention_sites
from perpend.studies import prune_study
from perpend.studies.prune_agreement import SetAgreement, evaluate_agreement
from perpend.studies.prune_sets import CRITERIA, PruneSet, check_criteria, prune_sets
from perpend.studies.pruning import SetLosses, evaluate_sets
from perpend.studies.regime import CAVEAT, regime

SPARSITIES = (0.1, 0.2, 0.3)


class Prune:
    """One invocation."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.job = Job("prune", options)
        self.inputs = Inputs(self.job)
        self.sparsities = options["sparsities"] or SPARSITIES
        self.criteria = options["criteria"] or (() if options["heads_files"] else CRITERIA)
        self.weight_sparsity = min(self.sparsities, key=lambda s: abs(s - 0.2))

    @cached_property
    def given(self) -> list[PruneSet]:
        """The sets of --heads, under the names of their files."""
        from perpend.models.ablate import ablate, read_heads

        sites, found = attention_sites(self.job.model), []
        for path in self.options["heads_files"]:
            heads = read_heads(path)
            if not heads:
                raise InputError(f"{path} names no head: there is nothing to remove")
            with ablate(self.job.model, heads):  # says which layer or head is not there
                share = len(heads) / sum(site.heads for site in sites)
            found.append(PruneSet(Path(path).stem, round(share, 4), heads, fixed=True))
        return found

    def check(self) -> None:
        """Everything that can be wrong with the request, before anything is computed."""
        from perpend.models.smaller import check_free

        check_criteria(self.criteria)
        if self.options["save_to"]:
            check_free(self.options["save_to"])
        if self.options["tasks"] and not self.inputs.language:
            raise InputError("--tasks needs a language model: image models and encoders answer none")
        total = sum(site.heads for site in attention_sites(self.job.model))
        for sparsity in self.sparsities if self.criteria else ():
            if not 1 <= round(sparsity * total) < total:
                raise InputError(
                    f"--sparsity {sparsity:g} of {total} heads removes {round(sparsity * total)}: at least "
                    f"one must go and one stay, so between {1 / total:.2g} and {1 - 1 / total:.2g}"
                )

    def run(self) -> None:
        from perpend.texts import sequences

        job, options = self.job, self.options
        self.check()
        given = self.given
        if job.images is None:
            if job.reads_images:
                raise InputError(f"{job.model_name} is an image model: give it a folder, --images DIR")
            cut = {"length": options["length"], "bos": options["bos"]}
            job.__dict__["sequences"] = sequences(self.inputs.texts[0], job.tokenizer, model=job.model, **cut)
        seeds = options["seeds"] if self.inputs.seeds_differ else options["seeds"][:1]
        read = {seed: self.inputs.read(seed) for seed in seeds} if self.criteria else {}
        judged = self.inputs.judged
        passes = 1 + len(given) + len(self.criteria) * len(self.sparsities) * max(1, len(read))
        inputs = getattr(judged, "tokens", judged)
        if job.options["plan"]:
            passes += self._more_passes(read, inputs)
        remarks = [
            "each set counted as a whole pass; layers that sets share are run once, which makes it less"
        ]
        if job.planned(inputs, passes=passes, remarks=remarks):
            return
        held = {} if job.images is not None else {"held_out_sha256": self.inputs.texts[1].sha256}
        with job.run(**held) as run:
            surveys = {seed: self._survey(run, seed, chosen) for seed, chosen in read.items()}
            first = next(iter(surveys.values()), None)
            # Written before any evaluation: what the rule says of this model. It speaks of language models.
            prediction = None
            if first is not None and self.inputs.language:
                columns = first.support.columns
                verdict = regime(first.signature_sink, len(columns.sink) / columns.parts)
                prediction = run.step(
                    "prediction",
                    lambda: {"regime": verdict.verdict, "cv": verdict.cv, "applies": int(verdict.applies)},
                )
            sink = list(first.support.columns.sink) if first is not None else []
            by_seed = {
                seed: prune_sets(survey.signatures, sink, self.sparsities, self.criteria) + given
                for seed, survey in surveys.items()
            } or {options["seeds"][0]: given}
            weighted, rivals = self._weighted(first, sink)
            everything = [s.heads for sets in by_seed.values() for s in sets]
            everything += [s.heads for s in (*weighted.values(), *rivals.values())]
            evaluate: Any = evaluate_sets
            if not self.inputs.language:
                evaluate = partial(evaluate_agreement, labels=self.inputs.labels)
            losses = evaluate(
                job.model,
                judged,
                everything,
                batch=options["batch"],
                store=run.step,
                progress=job.progress,
            )
            records, results, findings = self._judge(losses, by_seed, prediction, weighted, rivals)
            sets = self._sets(run, by_seed)
            tasks = self._score(run, losses, records, by_seed)
            scores = tasks.tables()
            saved = self._save(losses, records, by_seed)
            run.table("cells", pd.DataFrame(records))
            run.table("sets", pd.DataFrame(sets))
            run.table("removed", pd.DataFrame(_removed(by_seed, attention_sites(job.model))))
            stable = prune_study.stability_records(by_seed)
            if stable:
                run.table("stability", pd.DataFrame(stable))
            if results.get("weighted"):
                run.table("weights", pd.DataFrame(results["weighted"]["curve"]))
            run.finish(
                results={
                    **results,
                    **(tasks.results if tasks else {}),
                    "sets": sets,
                    "stability": stable,
                    "evaluations": len({(s["criterion"], s["sparsity"], s["seed"]) for s in sets}),
                    "distinct_sets": len(losses.sets),
                    "cost": losses.cost,
                    "zero_anyway": [list(head) for head in losses.zero_anyway],
                    "saved": saved,
                },
                conventions={
                    **({"sink": first.support.rule, "support": first.support.words} if first else {}),
                    "judged_on": self.inputs.split,
                    "perplexity": "exp of the mean loss over all tokens but the first of each window"
                    if self.inputs.language
                    else "none: agreement with the unpruned model",
                    "sd": "population, over seeds",
                    "interval": "95 %, sequences or images resampled, of the first seed's set",
                    "regime_rule": CAVEAT if self.inputs.language else "speaks of language models only",
                    **(tasks.conventions if tasks else {}),
                },
                findings=[
                    *findings,
                    *self.inputs.remarks,
                    *_unread(sets, attention_sites(job.model)),
                    *tasks.findings,
                    *_said(saved),
                ],
            )
        job.answer(run, *self._shown(losses, records), *scores)

    def _survey(self, run: Any, seed: int, chosen: Any) -> Any:
        from perpend.surveys.attention import survey_attention

        return survey_attention(
            self.job.model,
            chosen,
            window=self.options["window"],
            sink=self.options["sink"],
            batch=self.options["batch"],
            rows=False,
            store=lambda name, compute: run.step(f"seed-{seed}-{name}", compute),
            progress=self.job.progress,
        )

    def _judge(
        self, losses: Any, by_seed: dict[int, list[PruneSet]], prediction: Any, weighted: Any, rivals: Any
    ) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
        """Records of the cells, results and findings."""
        if isinstance(losses, SetAgreement):
            records = prune_study.agreement_cells(losses, by_seed)
            wins = prune_study.random_wins(records, losses.measure, higher=True)
            unit = "images" if self.job.images is not None else "sequences"
            base = {unit: losses.count}
            if losses.right is not None:
                base["accuracy"] = float(losses.right.mean())
            results = {"base": base, "cells": records, "random_beats": wins}
            return records, results, prune_study.agreement_findings(records, losses, wins, unit)
        records = prune_study.cells(losses, by_seed)
        wins = prune_study.random_wins(records)
        scored = weight = None
        if prediction is not None:
            scored = prune_study.score(str(prediction["regime"]), records, losses.base_perplexity)
            scored["applies"] = bool(prediction.get("applies", True))
        if weighted:
            weight = prune_study.fit_weight(losses, weighted, rivals)
        results = {
            "base": {
                "perplexity": losses.base_perplexity,
                "tokens": losses.tokens,
                "context": self.options["context"],
                "split": self.inputs.split,
            },
            "prediction": prediction
            and {
                "regime": str(prediction["regime"]),
                "cv": float(prediction["cv"]),
                "applies": bool(prediction.get("applies", True)),
            },
            "score": scored,
            "cells": records,
            "random_beats": wins,
            "weighted": weight,
        }
        return records, results, prune_study.findings(records, losses, scored, wins, weight)

    def _more_passes(self, read: dict[int, Any], judged: Any) -> float:
        """Passes besides those of the sets, in units of all that the sets are judged by: the signatures of
        each seed, and the weighted family with the four sets that it has to beat, two of which are its own.
        """
        surveys = sum(chosen.numel() for chosen in read.values()) / judged.numel()
        weighted = bool(read) and self.options["weights"] and self.inputs.language
        return surveys + (len(prune_study.LAMBDAS) + 2 if weighted else 0)

    def _weighted(self, survey: Any, sink: list[int]) -> tuple[dict[str, PruneSet], dict[str, PruneSet]]:
        """Sets of the weighted family at one sparsity, keep-one form, and what it has to beat."""
        if not self.options["weights"] or survey is None or not self.inputs.language:
            return {}, {}
        names = [f"{weight:g}" for weight in prune_study.LAMBDAS]
        wanted = [f"weighted_l1:{name}" for name in names] + ["js", "js_l1"]
        found = prune_sets(survey.signatures, sink, [self.weight_sparsity], wanted)
        sets = dict(zip(names, found))
        rivals = {"λ=0": sets["0"], "λ=∞": sets["inf"], "js": found[-2], "js_l1": found[-1]}
        return sets, rivals

    def _sets(self, run: Any, by_seed: dict[int, list[PruneSet]]) -> list[dict[str, Any]]:
        """One record a set, its heads in a file of its own under masks/."""
        from perpend.models.ablate import unused_kv_heads

        sites, model = attention_sites(self.job.model), run.request["model"]
        records = []
        for seed, sets in by_seed.items():
            for chosen in sets:
                if chosen.fixed and seed != next(iter(by_seed)):
                    continue
                about = {
                    "criterion": chosen.criterion,
                    "sparsity": chosen.sparsity,
                    "seed": None if chosen.fixed else seed,
                }
                name = f"masks/{chosen.criterion.replace(':', '-')}-{100 * chosen.sparsity:g}"
                name += "" if chosen.fixed else f"-seed{seed}"
                unused = unused_kv_heads(sites, _by_layer(chosen))
                document = {
                    **about,
                    "model": {key: model[key] for key in ("name", "class", "weights_sha256")},
                    "heads": [list(head) for head in chosen.heads],
                    "unused_kv_heads": [list(head) for head in unused],
                }
                run.json(name, document)
                records.append(
                    {
                        **about,
                        "heads": len(chosen.heads),
                        "unused_kv_heads": " ".join(f"{layer}.{head}" for layer, head in unused),
                        "file": f"{name}.json",
                    }
                )
        return records

    def _score(self, run: Any, losses: Any, records: Any, by_seed: dict[int, list[PruneSet]]) -> Tasks:
        """Task scores of the unpruned model, and of the best set of each sparsity."""
        from perpend.models.ablate import ablate

        tasks = Tasks(self.job, run)
        conditions: dict[str, Any] = {"unpruned": nullcontext}
        if tasks:
            for sparsity in sorted({r["sparsity"] for r in records}):
                chosen = _best(losses, records, by_seed, sparsity)
                name = f"{chosen.criterion} {sparsity:.0%}"
                conditions[name] = partial(ablate, self.job.model, chosen.heads)
            tasks.each(conditions)
        return tasks

    def _save(
        self, losses: Any, records: list[dict[str, Any]], by_seed: dict[int, list[PruneSet]]
    ) -> dict[str, Any] | None:
        """Write the model without the best set's heads: that of the highest sparsity, random draws apart."""
        if not self.options["save_to"]:
            return None
        from perpend.models.prune import save_pruned

        measure = "perplexity" if isinstance(losses, SetLosses) else losses.measure
        chosen = _best(losses, records, by_seed, max(r["sparsity"] for r in records))
        report = save_pruned(
            self.job.model, self.job.tokenizer, chosen.heads, self.options["save_to"], self.inputs.judged
        )
        reported = (
            losses.perplexity(chosen.heads)
            if isinstance(losses, SetLosses)
            else float(losses.of(chosen.heads, measure).mean())
        )
        return {
            "folder": self.options["save_to"],
            "criterion": chosen.criterion,
            "sparsity": chosen.sparsity,
            measure: reported,
            **report,
        }

    def _shown(self, losses: Any, records: list[dict[str, Any]]) -> list[Any]:
        """The table for the terminal."""
        shown = pd.DataFrame(records)
        if isinstance(losses, SetLosses):
            numbers = ["perplexity", "sd", "over_base", "kl", "top1_agreement"]
            title = f"Pruned models; unpruned perplexity {losses.base_perplexity:.3f}"
        else:
            numbers = [losses.measure, "sd", "low", "high", *list(losses.values)[1:]]
            title = f"Pruned models against the unpruned one, {losses.count} inputs"
        shown = shown[["criterion", "sparsity", *numbers, "shortfall"]].copy()
        shown[numbers] = shown[numbers].astype(float).round(3)
        return [(title, shown)]


def _best(
    losses: Any, records: list[dict[str, Any]], by_seed: dict[int, list[PruneSet]], sparsity: float
) -> PruneSet:
    """The set that costs least at a sparsity, random draws apart, as the first seed has it."""
    measure, sign = ("perplexity", 1) if isinstance(losses, SetLosses) else (losses.measure, -1)
    there = [r for r in records if r["sparsity"] == sparsity]
    wanted = [r for r in there if not r["criterion"].startswith("random")] or there
    best = min(wanted, key=lambda r: sign * r[measure])
    first = next(iter(by_seed.values()))
    return next(s for s in first if (s.criterion, s.sparsity) == (best["criterion"], sparsity))


def _by_layer(chosen: PruneSet) -> dict[int, list[int]]:
    layers: dict[int, list[int]] = {}
    for layer, head in chosen.heads:
        layers.setdefault(layer, []).append(head)
    return layers


def _removed(by_seed: dict[int, list[PruneSet]], sites: Any) -> list[dict[str, Any]]:
    """The share of each layer's heads that a criterion removes, the mean over seeds."""
    rows = []
    for position, chosen in enumerate(next(iter(by_seed.values()))):
        for site in sites:
            gone = [len(_by_layer(sets[position]).get(site.index, ())) for sets in by_seed.values()]
            share = sum(gone) / len(gone) / site.heads
            rows.append(
                {
                    "criterion": chosen.criterion,
                    "sparsity": chosen.sparsity,
                    "layer": site.index,
                    "removed": share,
                }
            )
    return rows


def _unread(sets: list[dict[str, Any]], sites: Any) -> list[str]:
    """Which KV heads no query head reads any more, where queries are grouped."""
    if all(site.kv_heads == site.heads for site in sites):
        return []
    most = max(sets, key=lambda s: len(s["unused_kv_heads"].split()))
    count, total = len(most["unused_kv_heads"].split()), sum(site.kv_heads for site in sites)
    if not count:
        return [f"Queries are grouped, and every one of the {total} KV heads is still read in every set."]
    return [
        f"Queries are grouped: {most['criterion']} at {most['sparsity']:.0%} leaves {count} of {total} KV "
        "heads unread, the most of all sets; the table of sets and the masks name them."
    ]


def _said(saved: dict[str, Any] | None) -> list[str]:
    if saved is None:
        return []
    if "perplexity_after_loading" in saved:
        seen = (
            f"perplexity after loading {saved['perplexity_after_loading']:.3f}, "
            f"{saved['perplexity']:.3f} before saving"
        )
    else:
        seen = f"its output after loading is off by {saved['error_after_loading']:.1e} of its norm"
    return [
        f"Saved to {saved['folder']}: {saved['heads_removed']} heads of {saved['criterion']} at "
        f"{saved['sparsity']:.0%} {saved['how']}; {seen}."
    ]
