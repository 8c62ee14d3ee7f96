"""The run of `perpend compare`: two checkpoints of one architecture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from perpend import distributed
from perpend.commands._pairs import Pairs, cost_finding, loss_record, surgery_findings
from perpend.commands._tasks import Tasks
from perpend.errors import InputError


class Compare(Pairs):
    """Two checkpoints."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if distributed.world() > 1:
            raise InputError("perpend compare runs in one process: start it without torchrun")
        super().__init__("compare", {**options, "model": options["base"], "revision": None})

    @cached_property
    def other(self) -> Any:
        from perpend.compression.error import check_comparable
        from perpend.models.limits import check_positions
        from perpend.models.load import load
        from perpend.models.placement import as_placed

        model, tokenizer = load(
            self.options["other"],
            dtype=self.options["dtype"],
            **as_placed(self.job.model),
            trust_remote_code=self.options["trust_remote_code"],
        )
        check_comparable(self.job.model, model)
        check_positions(model, self.options["length"])
        if tokenizer is not None:
            from perpend import texts

            sample = self.job.sequences.text.text[:20000]
            if texts.encode(tokenizer, sample) != texts.encode(self.job.tokenizer, sample):
                raise InputError(
                    f"the tokenizers of {self.options['base']} and {self.options['other']} cut the text "
                    "differently, so their updates belong to different tokens and cannot be compared"
                )
        return model

    def run(self) -> None:
        from perpend.models.weights import weights_hash

        name, other = str(self.options["other"]), self.other
        if self.job.planned(self.tokens, passes=7):
            return
        with self.job.run(other={"name": name, "weights_sha256": weights_hash(other)}) as run:
            self._fill(run, name, other)
        self.job.answer(run, ("Compared models", self.shown(self.outcomes)), *self.shown_scores)

    def _fill(self, run: Any, name: str, other: Any) -> None:
        from perpend.studies.compression import measure_pair, sentence

        base = self.base_nll(run)
        setting = self.setting(None)
        outcome = run.step("pair", lambda: measure_pair(self.job.model, other, setting, base))
        apart = run.step("divergence", lambda: self._divergence(other))
        self.outcomes = {name: outcome}
        results: dict[str, Any] = {
            "base": {"name": self.options["base"], "loss": loss_record(base)},
            "other": {"name": name, "loss": outcome["loss"], "change": outcome["change"]},
            "summary": outcome["summary"],
            **apart,
        }
        for kind, records in self.cut(run, name, lambda: other).items():
            results[kind] = {name: records}
        tasks = Tasks(self.job, run)
        if tasks:
            tasks.score("base")
            tasks.score(name, lambda: other)
            results |= tasks.results
        tables = self.tables(run, self.outcomes, results)
        findings = [
            cost_finding(name, outcome),
            f"KL(base, other) is {apart['kl']:.4f} nats a token; the top token is the same at "
            f"{100 * apart['agreement']:.1f} % of tokens",
            *(sentence(self.outcomes, tables["relations"], mode, "block") for mode in setting.modes),
            *surgery_findings(results),
        ]
        self.shown_scores = tasks.tables()
        conventions = self.conventions() | (tasks.conventions if tasks else {})
        run.finish(results, conventions, [*findings, *tasks.findings])

    def _divergence(self, other: Any) -> dict[str, float]:
        from perpend.evaluation.losses import divergence

        _, far = divergence(self.job.model, other, self.windows, batch=self.options["batch"])
        scored = far.scored
        return {
            "kl": float(far.kl[scored].double().mean()),
            "agreement": float(far.agreement[scored].double().mean()),
        }
