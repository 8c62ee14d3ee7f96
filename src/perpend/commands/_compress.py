"""The run of `perpend compress`: one base model under several methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perpend import distributed
from perpend.commands._pairs import Pairs, cost_finding, loss_record, surgery_findings
from perpend.commands._tasks import Tasks, headline
from perpend.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from perpend.compression.method import Regime
    from perpend.studies.compression import Setting


COMPONENTS = ("both", "perpendicular")  # what a plan keeps small: e, or e⊥ alone


class Compress(Pairs):
    """One base model under several methods."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__("compress", options)
        from perpend.commands.compress import DEFAULT
        from perpend.compression.method import regime

        self.regimes: list[Regime] = [regime(text) for text in self.options["methods"] or DEFAULT]
        names = [r.name for r in self.regimes]
        for i, one in enumerate(self.regimes):
            if any(one.described == other.described for other in self.regimes[:i]):
                raise InputError(f"a method is named twice: {', '.join(names)}")
        if self.options["save_to"] is not None:
            self._check_save(len(names))
        self.allocated = _allocation(self.options["allocate"], self.regimes)
        self._made: dict[str, Any] = {}

    def _check_save(self, methods: int) -> None:
        from pathlib import Path

        from perpend.models.smaller import check_free

        folder, out = Path(self.options["save_to"]), self.options["out"]
        if methods != 1:
            raise InputError("--save writes one model: give exactly one --method")
        if out is not None and folder.resolve() == Path(out).resolve():
            raise InputError(f"--save and --out are both {folder}; give the model a folder of its own")
        if not self.options["resume"]:  # a resumed run may have saved it already
            check_free(self.options["save_to"])

    @cached_property
    def calibration(self) -> Any:
        from perpend.compression.calibration import calibration

        return calibration(
            self.options["calibration"],
            self.job.tokenizer,
            sequences=self.options["calibration_sequences"],
            length=self.options["calibration_length"],
            bos=self.options["bos"],
            avoid=self.job.sequences,
            used=len(self.tokens),
            seed=self.seed,
            model=self.job.model,
        )

    def run(self) -> None:
        from perpend.compression import check

        each = 1 + 1 + 3 * ("local" in self.modes) + ("propagated" in self.modes)
        remarks = [f"each of {len(self.regimes)} methods also passes the calibration text two to four times"]
        for regime in self.regimes:  # a width that does not fit is refused before anything is computed
            check(self.job.model, regime, keep=self.options["keep"])
        for candidate in self._candidates():
            check(self.job.model, candidate, keep=self.options["keep"])
        if self.job.planned(self.tokens, passes=1 + each * len(self.regimes), remarks=remarks):
            return
        with self.job.run(calibration_text=self.calibration.record) as run:
            self._fill(run)
        self.job.answer(run, ("Compressed models", self.shown(self.outcomes)), *self.shown_scores)

    def _fill(self, run: Any) -> None:
        from perpend.studies.compression import FIGURE_6, ordering, sentence

        base = self.base_nll(run)
        setting = self.setting(self.calibration.tokens)
        tasks = Tasks(self.job, run)
        results: dict[str, Any] = {"base": {"loss": loss_record(base)}, "regimes": {}}
        if tasks:
            scored = distributed.main_first(lambda: tasks.score("base"))
            tasks.evaluations["base"] = scored
            results["base"]["scores"] = headline(tasks.base)
        self.outcomes: dict[str, Any] = {}
        # each regime is wholly one process's
        for regime, found in zip(
            self.regimes,
            distributed.map_blocks(
                len(self.regimes), lambda i: self._regime(run, self.regimes[i], setting, base, tasks)
            ),
        ):
            name, outcome = regime.name, found["outcome"]
            if tasks:
                tasks.evaluations[name] = found["scores"]
                outcome["scores"] = tasks.changes(name)
            self.outcomes[name] = outcome
            results["regimes"][name] = {
                key: outcome[key]
                for key in ("compression", "loss", "change", "summary", "scores")
                if key in outcome
            }
            for kind, records in found["cut"].items():
                results.setdefault(kind, {})[name] = records
            if found["saved"] is not None:
                results["saved"] = found["saved"]
        tables = self.tables(run, self.outcomes, results)
        run.table("matrices", _facts(self.outcomes))
        order = sorted(self.outcomes, key=lambda n: _cost(self.outcomes[n]))
        findings = [cost_finding(name, self.outcomes[name]) for name in order]
        results["relations"] = tables["relations"].to_dict("records")
        # a repair trades one part of the error for the other, so only plain methods are asked for one order
        plain = [name for name in order if not self.outcomes[name]["compression"]["repair"]]
        if len(plain) > 1:
            orders = [plain, list(FIGURE_6)] if set(FIGURE_6) < set(plain) else [plain]
            results["ordering"] = [
                ordering(run.tables["layers"], listed, mode, part)
                for listed in orders
                for mode in setting.modes
                for part in self.parts
            ]
            findings += [_ordered(o) for o in results["ordering"] if o["part"] in ("mlp", "block")]
        findings += [sentence(self.outcomes, tables["relations"], mode, "block") for mode in setting.modes]
        findings += surgery_findings(results)
        if self.allocated:
            results["plan"] = self._plans(run, setting)
            findings += [_planned(plan) for plan in results["plan"]]
        findings += [
            f"{name}: {warning}"
            for name, o in self.outcomes.items()
            for warning in o["compression"]["warnings"]
        ]
        self.shown_scores = tasks.tables()
        results |= tasks.results if tasks else {}
        conventions = self.conventions() | (tasks.conventions if tasks else {})
        run.finish(results, conventions, [*findings, *tasks.findings])

    def _regime(self, run: Any, regime: Regime, setting: Setting, base: Any, tasks: Tasks) -> dict[str, Any]:
        """Everything that is measured of one regime; each part is a step of the run."""
        from perpend.studies.compression import run_regime

        def measured() -> dict[str, Any]:
            outcome, self._made[regime.name] = run_regime(self.job.model, regime, setting, base)
            return outcome

        outcome = run.step(f"regime {regime.name}", measured)
        found = {
            "outcome": outcome,
            "scores": tasks.score(regime.name, lambda: self.made(regime)) if tasks else None,
            "cut": self.cut(run, regime.name, lambda: self.made(regime)),
            "saved": self._saved(run, regime, outcome) if self.options["save_to"] else None,
        }
        self._made.clear()  # one compressed copy at a time
        return found

    def _saved(self, run: Any, regime: Regime, outcome: Mapping[str, Any]) -> Any:
        from perpend.compression.save import save

        record = {"perpend": outcome["compression"], "model": self.job.model_name}
        return run.step(
            "saved", lambda: save(self.made(regime), self.job.tokenizer, self.options["save_to"], record)
        )

    def made(self, regime: Regime) -> Any:
        """The compressed copy of a regime; made again where a resumed run has only its measurements."""
        from perpend.compression import compress
        from perpend.training.export import copied

        if regime.name not in self._made:
            other = copied(self.job.model)
            compress(
                other, self.calibration.tokens, regime, batch=self.options["batch"], keep=self.options["keep"]
            )
            self._made[regime.name] = other
        return self._made[regime.name]

    def _candidates(self) -> list[Regime]:
        """What --allocate chooses among."""
        from perpend.compression.method import with_settings

        if self.allocated is None:
            return []
        option, regime, values = self.allocated
        return [with_settings(regime, **{option: value}) for value in values]

    def _plans(self, run: Any, setting: Setting) -> list[dict[str, Any]]:
        """A plan from the whole error and one from e⊥ for the first method that has the setting."""
        from perpend.studies.compression_surgery import plan

        assert self.allocated is not None
        option, regime, values = self.allocated
        rows = self.calibration.tokens[: max(4, self.options["map_sequences"])]
        return distributed.map_blocks(
            2,
            lambda i: run.step(
                f"plan {COMPONENTS[i]}",
                lambda component=COMPONENTS[i]: plan(
                    self.job.model,
                    regime,
                    setting,
                    option=option,
                    values=values,
                    map_tokens=rows,
                    component=component,
                ),
            ),
        )


def _allocation(text: str | None, regimes: Sequence[Regime]) -> tuple[str, Regime, list[Any]] | None:
    """The setting, the first method that has it, and the values to choose among."""
    if not text:
        return None
    option, equals, values = text.partition("=")
    chosen = [v.strip() for v in values.split(",") if v.strip()]
    if not equals or not chosen:
        raise InputError(
            f"--allocate is SETTING=V1,V2,... (as sparsity=0.4,0.5,0.6 or bits=3,4,5), not {text!r}"
        )
    regime = next((r for r in regimes if option in r.method.defaults), None)
    if regime is None:
        known = sorted({name for r in regimes for name in r.method.defaults})
        raise InputError(
            f"--allocate: none of the methods has a setting {option!r}; they have {', '.join(known)}"
        )
    from perpend.compression.method import converted

    default, own = regime.method.defaults[option], regime.settings[option]
    read = dict.fromkeys(converted("--allocate", option, value, default) for value in chosen)
    if not set(read) - {own}:
        raise InputError(
            f"--allocate needs a value of {option} besides {own}, which {regime.name} has already"
        )
    return option, regime, list(read)


def _cost(outcome: Mapping[str, Any]) -> float:
    """The loss change; a model whose loss is not finite comes last."""
    difference = outcome["change"]["difference"]
    return difference if difference is not None and math.isfinite(difference) else math.inf


def _facts(outcomes: Mapping[str, Any]) -> pd.DataFrame:
    """What was done to each matrix: one row per regime and matrix, unused columns left out."""
    import pandas as pd

    rows = [
        {"regime": name, "matrix": matrix, **{k: v for k, v in facts.items() if not isinstance(v, dict)},
         **{f"{k}_{kk}": vv for k, v in facts.items() if isinstance(v, dict) for kk, vv in v.items()}}
        for name, outcome in outcomes.items()
        for matrix, facts in outcome["facts"].items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _ordered(o: Mapping[str, Any]) -> str:
    def told(measure: str) -> str:
        share = 100 * o[measure]["layers"]
        return f"{'holds' if o[measure]['mean'] else 'fails'} in the mean, at {share:.0f} % of layers"

    return (
        f"{o['part']}, {o['mode']}: the order {' < '.join(o['order'])} "
        f"{told('perpendicular')} in e⊥; in e∥ it {told('parallel')}"
    )


def _planned(plan: Mapping[str, Any]) -> str:
    d = plan["difference"]
    which = "e" if plan["component"] == "both" else "e⊥"
    return (
        f"a plan of {plan['option']} by {which} for {plan['regime']}, at {plan['plan']['bytes']:,.0f} of "
        f"{plan['uniform']['bytes']:,.0f} bytes: perplexity {plan['plan']['perplexity']:.2f} against "
        f"{plan['uniform']['perplexity']:.2f} uniform ({d['loss']:+.3f} nats "
        f"[{d['low']:+.3f}, {d['high']:+.3f}])"
    )
