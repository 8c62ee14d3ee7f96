"""The run of `perpend prune`: signatures, a prediction, sets, losses, scores, a saved model, figures."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pandas as pd

from perpend.errors import InputError
from perpend.job import Job
from perpend.report import charts
from perpend.report.figure import Figure
from perpend.studies import prune_study
from perpend.studies.prune_sets import CRITERIA, PruneSet, prune_sets
from perpend.studies.pruning import SetLosses, evaluate_sets
from perpend.studies.regime import CAVEAT, regime

SPARSITIES = (0.1, 0.2, 0.3)
FOR_SIGNATURES = 0.6  # of the text; the rest is held out where no other text is named


class Prune:
    """One invocation."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.job = Job("prune", options)
        self.sparsities = options["sparsities"] or SPARSITIES
        self.criteria = options["criteria"] or CRITERIA
        middle = min(self.sparsities, key=lambda s: abs(s - 0.2))
        self.weight_sparsity = middle

    @cached_property
    def texts(self) -> tuple[Any, Any]:
        """Text for signatures and text for losses, never overlapping."""
        from perpend.texts import read_text

        whole = read_text(self.options["text"])
        if self.options["held_out"]:
            return whole, read_text(self.options["held_out"])
        cut = int(FOR_SIGNATURES * len(whole.text))
        return read_text([whole.text[:cut]]), read_text([whole.text[cut:]])

    @cached_property
    def held_out(self) -> Any:
        from perpend.evaluation.windows import as_windows
        from perpend.texts import sequences

        context = self.options["context"]
        cut = sequences(
            self.texts[1], self.job.tokenizer, length=context, bos=self.options["bos"], model=self.job.model
        )
        count = max(1, self.options["token_count"] // context)
        if count > len(cut.tokens):
            raise InputError(
                f"the held-out text holds {len(cut.tokens)} windows of {context} tokens and {count} were "
                "asked for: lower --tokens or name a longer --held-out"
            )
        return as_windows(cut.take(count, 0), bos=cut.bos, split="held-out")

    def run(self) -> None:
        from perpend.surveys.attention import survey_attention
        from perpend.texts import sequences

        job, options = self.job, self.options
        job.__dict__["sequences"] = sequences(
            self.texts[0], job.tokenizer, length=options["length"], bos=options["bos"], model=job.model
        )
        tokens = {seed: job.tokens(seed) for seed in options["seeds"]}
        passes = len(self.criteria) * len(self.sparsities) * len(tokens)
        if job.planned(
            self.held_out.tokens, passes=passes, remarks=["an upper bound: sets share their layers"]
        ):
            return
        with job.run(held_out_sha256=self.texts[1].sha256) as run:
            surveys = {
                seed: survey_attention(
                    job.model,
                    chosen,
                    window=options["window"],
                    sink=options["sink"],
                    batch=options["batch"],
                    rows=False,
                    store=lambda name, compute, seed=seed: run.step(f"seed-{seed}-{name}", compute),
                    progress=job.progress,
                )
                for seed, chosen in tokens.items()
            }
            first = next(iter(surveys.values()))
            # Written before any evaluation: what the rule says of this model.
            verdict = regime(first.signature_sink)
            prediction = run.step("prediction", lambda: {"regime": verdict.verdict, "cv": verdict.cv})
            sink = list(first.support.columns.sink)
            by_seed = {
                seed: prune_sets(survey.signatures, sink, self.sparsities, self.criteria)
                for seed, survey in surveys.items()
            }
            weighted, rivals = self._weighted(first.signatures, sink)
            everything = [s.heads for sets in by_seed.values() for s in sets]
            everything += [s.heads for s in (*weighted.values(), *rivals.values())]
            losses = evaluate_sets(
                job.model,
                self.held_out,
                everything,
                batch=options["batch"],
                store=run.step,
                progress=job.progress,
            )
            records = prune_study.cells(losses, by_seed)
            scored = prune_study.score(str(prediction["regime"]), records, losses.base_perplexity)
            wins = prune_study.random_wins(records)
            weight = prune_study.fit_weight(losses, weighted, rivals) if weighted else None
            saved = self._save(losses, records, by_seed)
            run.table("cells", pd.DataFrame(records))
            run.table("stability", pd.DataFrame(prune_study.stability_records(by_seed)))
            if weight:
                run.table("weights", pd.DataFrame(weight["curve"]))
            run.finish(
                results={
                    "base": {
                        "perplexity": losses.base_perplexity,
                        "tokens": losses.tokens,
                        "context": options["context"],
                    },
                    "prediction": {"regime": str(prediction["regime"]), "cv": float(prediction["cv"])},
                    "score": scored,
                    "cells": records,
                    "random_beats": wins,
                    "weighted": weight,
                    "sets": _set_records(by_seed, job.model),
                    "cost": losses.cost,
                    "saved": saved,
                },
                conventions={
                    "sink": first.support.rule,
                    "support": first.support.words,
                    "perplexity": "exp of the mean loss over all tokens but the first of each window",
                    "sd": "population, over seeds",
                    "regime_rule": CAVEAT,
                },
                findings=[*prune_study.findings(records, losses, scored, wins, weight), *_said(saved)],
            )
        shown = pd.DataFrame(records)[
            ["criterion", "sparsity", "perplexity", "sd", "over_base", "kl", "top1_agreement", "shortfall"]
        ]
        numbers = ["perplexity", "sd", "over_base", "kl", "top1_agreement"]
        shown[numbers] = shown[numbers].astype(float).round(3)
        job.answer(run, (f"Pruned models; unpruned perplexity {losses.base_perplexity:.3f}", shown))

    def _weighted(self, signatures: Any, sink: list[int]) -> tuple[dict[str, PruneSet], dict[str, PruneSet]]:
        """Sets of the weighted family at one sparsity, keep-one form, and what it has to beat."""
        if not self.options["weights"]:
            return {}, {}
        names = [f"{weight:g}" for weight in prune_study.LAMBDAS]
        wanted = [f"weighted_l1:{name}" for name in names] + ["js", "js_l1"]
        found = prune_sets(signatures, sink, [self.weight_sparsity], wanted)
        sets = dict(zip(names, found))
        rivals = {"λ=0": sets["0"], "λ=∞": sets["inf"], "js": found[-2], "js_l1": found[-1]}
        return sets, rivals

    def _save(
        self, losses: SetLosses, records: list[dict[str, Any]], by_seed: dict[int, list[PruneSet]]
    ) -> dict[str, Any] | None:
        if not self.options["save_to"]:
            return None
        from perpend.models.prune import save_pruned

        wanted = [r for r in records if not r["criterion"].startswith("random")]
        best = min(wanted, key=lambda r: (-r["sparsity"], r["perplexity"]))
        first = next(iter(by_seed.values()))
        chosen = next(s for s in first if (s.criterion, s.sparsity) == (best["criterion"], best["sparsity"]))
        report = save_pruned(
            self.job.model, self.job.tokenizer, chosen.heads, self.options["save_to"], self.held_out
        )
        return {
            "folder": self.options["save_to"],
            "criterion": chosen.criterion,
            "sparsity": chosen.sparsity,
            "perplexity": losses.perplexity(chosen.heads),
            **report,
        }


def _set_records(by_seed: dict[int, list[PruneSet]], model: Any) -> list[dict[str, Any]]:
    from perpend.models.ablate import unused_kv_heads
    from perpend.models.attention import attention_sites

    sites = attention_sites(model)
    records = []
    for seed, sets in by_seed.items():
        for chosen in sets:
            layers: dict[int, list[int]] = {}
            for layer, head in chosen.heads:
                layers.setdefault(layer, []).append(head)
            records.append(
                {
                    "seed": seed,
                    "criterion": chosen.criterion,
                    "sparsity": chosen.sparsity,
                    "heads": [list(head) for head in chosen.heads],
                    "unused_kv_heads": [list(head) for head in unused_kv_heads(sites, layers)],
                }
            )
    return records


def _said(saved: dict[str, Any] | None) -> list[str]:
    if saved is None:
        return []
    return [
        f"Saved to {saved['folder']}: {saved['heads_removed']} heads of {saved['criterion']} at "
        f"{saved['sparsity']:.0%} {saved['how']}; perplexity after loading "
        f"{saved['perplexity_after_loading']:.3f}."
    ]


def figures(run: Any) -> list[Figure]:
    """Perplexity by sparsity, the map of criteria, the curve over the weight, stability of sets."""
    cells = run.tables["cells"]
    lines = cells.assign(sparsity=cells["sparsity"].astype(float))
    found = [
        Figure(
            "Perplexity after pruning",
            "Which notion of redundancy removes heads that the model does not miss?",
            charts.profile(
                lines,
                "over_base",
                x="sparsity",
                series="criterion",
                label="perplexity over the unpruned model's",
                reference={"unpruned": 1.0},
                log_y=True,
            ),
            cells,
            "Mean over seeds, logarithmic. Criteria ending in _l1 keep one head of each redundant pair in a "
            "layer; content is d_A⊥, aitchison the full distance, js_drop Jensen-Shannon without the sink.",
        ),
        Figure(
            "Regime map",
            "Where is each criterion safe?",
            charts.heat(
                lines, "over_base", x="sparsity", y="criterion", label="perplexity over base", form=".2f"
            ),
            cells,
            "One cell a criterion and sparsity: perplexity as a multiple of the unpruned model's.",
        ),
    ]
    if "weights" in run.tables:
        weights = run.tables["weights"].assign(weight=lambda t: t["weight"].astype(str))
        found.append(
            Figure(
                "The weighted family",
                "How much should the sink balance count beside the content?",
                charts.profile(weights, "loss", x="weight", label="loss (nats per token)", x_label="λ"),
                weights,
                "Keep-one pruning by d_λ² = d_A⊥² + λ(Δb)²: 0 is content alone, inf the sink balance alone.",
            )
        )
    if len(run.tables.get("stability", [])):
        stable = run.tables["stability"]
        stable = stable.assign(cell=[f"{c} {s:.0%}" for c, s in zip(stable["criterion"], stable["sparsity"])])
        found.append(
            Figure(
                "Stability of the sets",
                "Do other sequences of the same text choose the same heads?",
                charts.bars(stable, "jaccard", by="cell", label="mean Jaccard over pairs of seeds"),
                stable,
                "1 means that every seed prunes the same heads.",
            )
        )
    return found
