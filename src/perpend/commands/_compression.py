"""What `perpend compress` and `perpend compare` do: measure one or several models against a base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perpend import distributed
from perpend.errors import InputError
from perpend.job import Job

if TYPE_CHECKING:
    import pandas as pd

    from perpend.compression.method import Regime
    from perpend.studies.compression import Setting

PARTS = ("attn", "mlp", "block")


class _Pairs:
    """The common part: a base model, texts, and the tables and results of any number of other models."""

    def __init__(self, command: str, options: Mapping[str, Any]) -> None:
        if distributed.world() > 1:
            raise InputError(f"perpend {command} runs in one process: start it without torchrun")
        self.job = Job(command, options)
        self.options = self.job.options
        if len(self.options["seeds"]) != 1:
            raise InputError("one --seed: it chooses the evaluated sequences and surgery's random directions")
        self.seed = self.options["seeds"][0]

    @cached_property
    def tokens(self) -> Any:
        return self.job.tokens(self.seed)

    @cached_property
    def windows(self) -> Any:
        from perpend.evaluation.windows import as_windows

        cut = self.job.sequences
        return as_windows(self.tokens, bos=cut.bos, split=cut.text.name)

    def setting(self, calibration: Any, score: Callable[[Any], dict[str, float]] | None = None) -> Setting:
        from perpend.studies.compression import Setting

        return Setting(
            calibration=calibration,
            tokens=self.tokens[: self.options["error_sequences"]],
            windows=self.windows,
            modes=self.options["modes"] or ("local", "propagated"),
            along=self.options["along"] or ("update",),
            batch=self.options["batch"],
            keep=self.options.get("keep", ()),
            layer_sequences=min(self.options["layer_changes"], len(self.tokens)),
            progress=self.job.progress,
            score=score,
        )

    def base_nll(self, run: Any) -> Any:
        """The base model's losses, a step of the run."""
        from perpend.evaluation.losses import TokenNLL, token_nll

        def compute() -> dict[str, Any]:
            nll = token_nll(self.job.model, self.windows, batch=self.options["batch"])
            return {"values": nll.values, "scored": nll.scored}

        kept = run.step("base loss", compute)
        return TokenNLL(kept["values"], kept["scored"], self.windows)

    def cut(self, run: Any, name: str, other: Callable[[], Any], results: dict[str, Any]) -> None:
        """Surgery and sensitivity map of one model, where asked for: steps, tables and findings' numbers."""
        from perpend.compression import sensitivity
        from perpend.studies.compression_surgery import surgery

        batch = self.options["batch"]
        if self.options["surgery_sequences"]:
            some = self.windows.take(min(self.options["surgery_sequences"], len(self.tokens)))
            table = run.step(
                f"surgery {name}",
                lambda: surgery(self.job.model, other(), some, batch=batch, seed=self.seed),
            )
            results.setdefault("surgery", {})[name] = table.to_dict("records")
        if self.options["map_sequences"]:
            rows = self.tokens[: self.options["map_sequences"]]
            table = run.step(
                f"map {name}",
                lambda: sensitivity(
                    self.job.model, other(), rows, batch=batch, seed=self.seed, progress=self.job.progress
                ),
            )
            results.setdefault("sensitivity", {})[name] = table.to_dict("records")

    def tables(self, run: Any, outcomes: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the tables that figures and readers need; returns those shown on the terminal."""
        import pandas as pd

        from perpend.studies.compression import layer_table, regime_table, relations

        run.table("layers", layer_table(outcomes))
        modes = self.options["modes"] or ("local", "propagated")
        frames = [
            regime_table(outcomes, mode, part).assign(mode=mode, part=part)
            for mode in modes
            for part in self.parts
        ]
        regimes = pd.concat(frames, ignore_index=True)
        run.table("regimes", regimes)
        related = relations(outcomes)
        run.table("relations", related)
        for kind in ("surgery", "sensitivity"):
            if kind in results:
                rows = [pd.DataFrame(v).assign(regime=k) for k, v in results[kind].items()]
                run.table(kind, pd.concat(rows, ignore_index=True))
        layers = [o["layers"].assign(regime=n) for n, o in outcomes.items() if "layers" in o]
        if layers:
            run.table("layer_changes", pd.concat(layers, ignore_index=True))
        return {"regimes": regimes, "relations": related}

    @property
    def parts(self) -> Sequence[str]:
        from perpend.models.stream import parts_of

        return parts_of(self.job.model)

    def shown(self, outcomes: Mapping[str, Any]) -> pd.DataFrame:
        """One line per model for the terminal: perplexity, and the error of whole blocks."""
        from perpend.studies.compression import regime_table

        mode = (self.options["modes"] or ("local",))[0]
        table = regime_table(outcomes, mode, "block")
        return table[
            ["regime", "perplexity", "change", "perpendicular", "parallel", "total", "kappa", "angle"]
        ]

    def conventions(self) -> dict[str, Any]:
        return {
            "error_sequences": self.options["error_sequences"] or len(self.tokens),
            "error": "e = update of the other model - base update, relative to the norm of the base update",
            "local": "attn and block on the base block input, mlp on the base mid-stream",
            "propagated": "each model on its own stream",
            "kappa": "<e, u> / (|u| |base update|), signed; u is the direction of `along`",
            "rotation": "cosine of u and u + e",
            "change": "difference of mean losses, other minus base, nats a token; 95 % over sequences",
            "perplexity": f"context {self.tokens.shape[1]}, disjoint windows, every token but the first",
            "masks": "ties: the lower index goes first",
        }


class Compress(_Pairs):
    """One base model under several methods."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__("compress", options)
        from perpend.commands.compress import DEFAULT
        from perpend.compression.method import regime

        self.regimes: list[Regime] = [regime(text) for text in self.options["methods"] or DEFAULT]
        names = [r.name for r in self.regimes]
        if len(set(names)) < len(names):
            raise InputError(f"a method is named twice: {', '.join(names)}")
        if self.options["save_to"] and len(names) != 1:
            raise InputError("--save writes one model: give exactly one --method")
        self.allocated = _allocation(self.options["allocate"])
        self._made: dict[str, Any] = {}

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
        )

    def run(self) -> None:
        from perpend.compression import check

        modes = self.options["modes"] or ("local", "propagated")
        each = 1 + 1 + 3 * ("local" in modes) + ("propagated" in modes)
        remarks = [f"each of {len(self.regimes)} methods also passes the calibration text two to four times"]
        for regime in self.regimes:  # a width that does not fit is refused before anything is computed
            check(self.job.model, regime, keep=self.options["keep"])
        if self.job.planned(self.tokens, passes=1 + each * len(self.regimes), remarks=remarks):
            return
        with self.job.run(calibration_text=self.calibration.record) as run:
            self._fill(run)
        self.job.answer(run, ("Compressed models", self.shown(self.outcomes)))

    def _fill(self, run: Any) -> None:
        from perpend.studies.compression import ordering, run_regime, sentence

        model = self.job.model
        base = self.base_nll(run)
        setting = self.setting(self.calibration.tokens, self._score() if self.options["tasks"] else None)
        results: dict[str, Any] = {"base": {"loss": _loss(base)}, "regimes": {}}
        if setting.score is not None:
            results["base"]["scores"] = run.step("base scores", lambda: setting.score(model))
        self.outcomes: dict[str, Any] = {}
        for regime in self.regimes:
            name = regime.name

            def compute(regime: Regime = regime) -> dict[str, Any]:
                outcome, self._made[regime.name] = run_regime(model, regime, setting, base)
                return outcome

            outcome = run.step(f"regime {name}", compute)
            if setting.score is not None:
                outcome["scores"] = {
                    task: value - results["base"]["scores"][task] for task, value in outcome["scores"].items()
                }
            self.outcomes[name] = outcome
            results["regimes"][name] = {
                key: outcome[key]
                for key in ("compression", "loss", "change", "summary", "scores")
                if key in outcome
            }
            self.cut(run, name, lambda regime=regime: self.made(regime), results)
            if self.options["save_to"]:
                from perpend.compression.save import save

                record = {"perpend": outcome["compression"], "model": self.job.model_name}
                results["saved"] = run.step(
                    "saved",
                    lambda regime=regime, record=record: save(
                        self.made(regime), self.job.tokenizer, self.options["save_to"], record
                    ),
                )
            self._made.clear()  # one compressed copy at a time
        tables = self.tables(run, self.outcomes, results)
        run.table("matrices", _facts(self.outcomes))
        order = sorted(self.outcomes, key=lambda n: self.outcomes[n]["change"]["difference"])
        findings = [_cost(name, self.outcomes[name]) for name in order]
        results["relations"] = tables["relations"].to_dict("records")
        # a repair trades one part of the error for the other, so only plain methods are asked for one order
        plain = [name for name in order if not self.outcomes[name]["compression"]["repair"]]
        if len(plain) > 1:
            results["ordering"] = [
                ordering(run.tables["layers"], plain, mode, part)
                for mode in setting.modes
                for part in self.parts
            ]
            findings += [_ordered(o) for o in results["ordering"] if o["part"] in ("mlp", "block")]
        findings += [sentence(self.outcomes, tables["relations"], mode, "block") for mode in setting.modes]
        findings += _surgery_findings(results)
        if self.allocated:
            results["plan"] = self._plans(run, setting)
            findings += [_planned(plan) for plan in results["plan"]]
        findings += [
            f"{name}: {warning}"
            for name, o in self.outcomes.items()
            for warning in o["compression"]["warnings"]
        ]
        run.finish(results, self.conventions(), findings)

    def made(self, regime: Regime) -> Any:
        """The compressed copy of a regime; made again where a resumed run has only its measurements."""
        import copy

        from perpend.compression import compress

        if regime.name not in self._made:
            other = copy.deepcopy(self.job.model)
            compress(
                other, self.calibration.tokens, regime, batch=self.options["batch"], keep=self.options["keep"]
            )
            self._made[regime.name] = other
        return self._made[regime.name]

    def _plans(self, run: Any, setting: Setting) -> list[dict[str, Any]]:
        """A plan from the whole error and one from e⊥ for the first method that has the setting."""
        from perpend.studies.compression_surgery import plan

        option, values = self.allocated
        regime = next((r for r in self.regimes if option in r.method.defaults), None)
        if regime is None:
            raise InputError(f"--allocate: none of the methods has a setting {option!r}")
        kind = type(regime.method.defaults[option])
        rows = self.calibration.tokens[: max(4, self.options["map_sequences"])]
        return [
            run.step(
                f"plan {component}",
                lambda component=component: plan(
                    self.job.model,
                    regime,
                    setting,
                    option=option,
                    values=[kind(v) for v in values],
                    map_tokens=rows,
                    component=component,
                ),
            )
            for component in ("both", "perpendicular")
        ]

    def _score(self) -> Callable[[Any], dict[str, float]]:
        from perpend.evaluation import evaluate

        def score(model: Any) -> dict[str, float]:
            evaluation = evaluate(
                model,
                self.job.tokenizer,
                self.options["tasks"],
                data=self.options["tasks_data"],
                limit=self.options["tasks_limit"],
                batch=self.options["batch"],
                progress=self.job.progress,
            )
            return {
                row["task"]: row["value"] for t in evaluation.tasks for row in t.rows() if row["headline"]
            }

        return score


class Compare(_Pairs):
    """Two checkpoints."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__("compare", {**options, "model": options["base"], "revision": None})

    @cached_property
    def other(self) -> Any:
        from perpend.compression.error import check_comparable
        from perpend.models.load import load

        model, tokenizer = load(
            self.options["other"],
            dtype=self.options["dtype"],
            device=self.options["device"] or self.job.model.device,
            trust_remote_code=self.options["trust_remote_code"],
        )
        check_comparable(self.job.model, model)
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
        self.job.answer(run, ("Compared models", self.shown(self.outcomes)))

    def _fill(self, run: Any, name: str, other: Any) -> None:
        from perpend.studies.compression import measure_pair, sentence

        base = self.base_nll(run)
        setting = self.setting(None)
        outcome = run.step("pair", lambda: measure_pair(self.job.model, other, setting, base))
        apart = run.step("divergence", lambda: self._divergence(other))
        self.outcomes = {name: outcome}
        results: dict[str, Any] = {
            "base": {"name": self.options["base"], "loss": _loss(base)},
            "other": {"name": name, "loss": outcome["loss"], "change": outcome["change"]},
            "summary": outcome["summary"],
            **apart,
        }
        self.cut(run, name, lambda: other, results)
        tables = self.tables(run, self.outcomes, results)
        findings = [
            _cost(name, outcome),
            f"KL(base, other) is {apart['kl']:.4f} nats a token; the top token is the same at "
            f"{100 * apart['agreement']:.1f} % of tokens",
            *(sentence(self.outcomes, tables["relations"], mode, "block") for mode in setting.modes),
            *_surgery_findings(results),
        ]
        run.finish(results, self.conventions(), findings)

    def _divergence(self, other: Any) -> dict[str, float]:
        from perpend.evaluation.losses import divergence

        _, far = divergence(self.job.model, other, self.windows, batch=self.options["batch"])
        scored = far.scored
        return {
            "kl": float(far.kl[scored].double().mean()),
            "agreement": float(far.agreement[scored].double().mean()),
        }


def _allocation(text: str | None) -> tuple[str, list[str]] | None:
    if not text:
        return None
    option, equals, values = text.partition("=")
    chosen = [v for v in values.split(",") if v]
    if not equals or not chosen:
        raise InputError(
            f"--allocate is SETTING=V1,V2,... (as sparsity=0.4,0.5,0.6 or bits=3,4,5), not {text!r}"
        )
    return option, chosen


def _loss(nll: Any) -> dict[str, Any]:
    from perpend.evaluation.perplexity import perplexity

    return perplexity("loss", nll).results


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


def _cost(name: str, outcome: Mapping[str, Any]) -> str:
    change, loss = outcome["change"], outcome["loss"]
    interval = "" if change["low"] is None else f" [{change['low']:+.3f}, {change['high']:+.3f}]"
    block = next(s for s in outcome["summary"] if s["part"] == "block")
    return (
        f"{name}: perplexity {loss['perplexity']:.2f} ({change['difference']:+.3f} nats{interval}); "
        f"block error across {block['perpendicular']:.3f}, along {block['parallel']:.3f} with κ "
        f"{block['kappa']:+.3f} ({block['mode']}, means over layers)"
    )


def _ordered(o: Mapping[str, Any]) -> str:
    def told(measure: str) -> str:
        share = 100 * o[measure]["layers"]
        return f"{'holds' if o[measure]['mean'] else 'fails'} in the mean, at {share:.0f} % of layers"

    return (
        f"{o['part']}, {o['mode']}: the order by loss ({' < '.join(o['order'])}) "
        f"{told('perpendicular')} in e⊥; in e∥ it {told('parallel')}"
    )


def _surgery_findings(results: Mapping[str, Any]) -> list[str]:
    out = []
    for name, rows in results.get("surgery", {}).items():
        change = {(r["component"], r["norm"]): r["change"] for r in rows}
        out.append(
            f"surgery on {name}: the whole error costs {change['both', 'own']:+.3f} nats, e⊥ alone "
            f"{change['perpendicular', 'own']:+.3f}, e∥ alone {change['parallel', 'own']:+.3f}; at the norm "
            f"of e, e⊥ {change['perpendicular', 'error']:+.3f}, e∥ {change['parallel', 'error']:+.3f}, a "
            f"random direction {change['random', 'error']:+.3f}; at the norm of e∥, e⊥ "
            f"{change['perpendicular', 'parallel']:+.3f}, a random direction "
            f"{change['random', 'parallel']:+.3f}"
        )
    return out


def _planned(plan: Mapping[str, Any]) -> str:
    d = plan["difference"]
    which = "e" if plan["component"] == "both" else "e⊥"
    return (
        f"a plan of {plan['option']} by {which} for {plan['regime']}, at {plan['plan']['bytes']:,.0f} of "
        f"{plan['uniform']['bytes']:,.0f} bytes: perplexity {plan['plan']['perplexity']:.2f} against "
        f"{plan['uniform']['perplexity']:.2f} uniform ({d['loss']:+.3f} nats "
        f"[{d['low']:+.3f}, {d['high']:+.3f}])"
    )
