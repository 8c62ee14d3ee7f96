"""What `perpend compress` and `perpend compare` share: a base model, texts, and models set against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perpend import distributed
from perpend.errors import InputError
from perpend.job import Job

if TYPE_CHECKING:
    import pandas as pd

    from perpend.studies.compression import Setting


class Pairs:
    """The common part: a base model, texts, and the tables and results of any number of other models."""

    def __init__(self, command: str, options: Mapping[str, Any]) -> None:
        self.job = Job(command, options)
        self.options = self.job.options
        if len(self.options["seeds"]) != 1:
            raise InputError("one --seed: it chooses the evaluated sequences and surgery's random directions")
        self.seed = self.options["seeds"][0]
        self.modes = tuple(dict.fromkeys(self.options["modes"])) or ("local", "propagated")
        # findings, figures and relations are about the split along the update, whatever else is asked for
        self.along = tuple(dict.fromkeys(("update", *self.options["along"])))

    @cached_property
    def tokens(self) -> Any:
        return self.job.tokens(self.seed)

    @cached_property
    def windows(self) -> Any:
        from perpend.evaluation.windows import as_windows

        cut = self.job.sequences
        return as_windows(self.tokens, bos=cut.bos, split=cut.text.name)

    def setting(self, calibration: Any) -> Setting:
        from perpend.studies.compression import Setting

        return Setting(
            calibration=calibration,
            tokens=self.tokens[: self.options["error_sequences"]],
            windows=self.windows,
            modes=self.modes,
            along=self.along,
            batch=self.options["batch"],
            keep=self.options.get("keep", ()),
            layer_sequences=min(self.options["layer_changes"], len(self.tokens)),
            progress=self.job.progress,
        )

    def base_nll(self, run: Any) -> Any:
        """The base model's losses, a step of the run."""
        from perpend.evaluation.losses import TokenNLL, token_nll

        def compute() -> dict[str, Any]:
            nll = token_nll(self.job.model, self.windows, batch=self.options["batch"])
            return {"values": nll.values, "scored": nll.scored}

        kept = distributed.main_first(lambda: run.step("base loss", compute))
        nll = TokenNLL(kept["values"], kept["scored"], self.windows)
        if nll.nonfinite:
            raise InputError(
                f"the loss of {self.job.model_name} is not finite at {nll.nonfinite} of "
                f"{int(nll.scored.sum())} tokens, so nothing can be set against it: its numbers overflow in "
                f"{str(self.job.model.dtype).removeprefix('torch.')}; try a wider --dtype, or another model"
            )
        return nll

    def cut(self, run: Any, name: str, other: Callable[[], Any]) -> dict[str, Any]:
        """Surgery and sensitivity map of one model, where asked for: steps of the run, as records."""
        from perpend.compression import sensitivity
        from perpend.studies.compression_surgery import surgery

        batch = self.options["batch"]
        found: dict[str, Any] = {}
        if self.options["surgery_sequences"]:
            some = self.windows.take(min(self.options["surgery_sequences"], len(self.tokens)))
            table = run.step(
                f"surgery {name}",
                lambda: surgery(self.job.model, other(), some, batch=batch, seed=self.seed),
            )
            found["surgery"] = table.to_dict("records")
        if self.options["map_sequences"]:
            rows = self.tokens[: self.options["map_sequences"]]
            table = run.step(
                f"map {name}",
                lambda: sensitivity(
                    self.job.model, other(), rows, batch=batch, seed=self.seed, progress=self.job.progress
                ),
            )
            found["sensitivity"] = table.to_dict("records")
        return found

    def tables(self, run: Any, outcomes: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the tables that figures and readers need; returns those shown on the terminal."""
        import pandas as pd

        from perpend.studies.compression import layer_table, regime_table, relations

        run.table("layers", layer_table(outcomes))
        frames = [
            regime_table(outcomes, mode, part).assign(mode=mode, part=part)
            for mode in self.modes
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

        table = regime_table(outcomes, self.modes[0], "block")
        return table[
            ["regime", "perplexity", "change", "perpendicular", "parallel", "total", "kappa", "angle"]
        ]

    def conventions(self) -> dict[str, Any]:
        held = len(self.tokens)
        used = {f"{name}_sequences": self.options[f"{name}_sequences"] for name in ("surgery", "map")}
        used["layer_changes_sequences"] = self.options["layer_changes"]
        return {
            "error_sequences": min(self.options["error_sequences"] or held, held),
            **{name: min(count, held) for name, count in used.items() if count},
            "error": "e = update of the other model - base update, relative to the norm of the base update",
            "local": "attn and block on the base block input, mlp on the base mid-stream",
            "propagated": "each model on its own stream",
            "kappa": "<e, u> / (|u| |base update|), signed; u is the direction of `along`",
            "rotation": "cosine of u and u + e",
            "change": "difference of mean losses, other minus base, nats a token; 95 % over sequences",
            "perplexity": f"context {self.tokens.shape[1]}, disjoint windows, every token but the first",
            "masks": "ties: the lower index goes first",
        }


def loss_record(nll: Any) -> dict[str, Any]:
    from perpend.evaluation.perplexity import perplexity

    return perplexity("loss", nll).results


def cost_finding(name: str, outcome: Mapping[str, Any]) -> str:
    change, loss = outcome["change"], outcome["loss"]
    interval = "" if change["low"] is None else f" [{change['low']:+.3f}, {change['high']:+.3f}]"
    block = next(s for s in outcome["summary"] if s["part"] == "block")
    if loss["loss"] is None:
        start = (
            f"{name}: its loss is not finite at {loss['nonfinite_tokens']} of {loss['tokens']} tokens, so it "
            "has no perplexity"
        )
    else:
        size = "too large to write" if loss["perplexity"] is None else f"{loss['perplexity']:.2f}"
        start = f"{name}: perplexity {size} ({change['difference']:+.3f} nats{interval})"
    if block["perpendicular"] is None:
        return f"{start}; its block error is undefined in {block['mode']} mode"
    return (
        f"{start}; block error across {block['perpendicular']:.3f}, along {block['parallel']:.3f} with κ "
        f"{block['kappa']:+.3f} ({block['mode']}, means over layers)"
    )


def surgery_findings(results: Mapping[str, Any]) -> list[str]:
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
