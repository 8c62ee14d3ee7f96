"""What each part of a compression error costs, and where compression should spend its bytes.

`surgery` runs the base model with one part of the error at all sites; `plan` turns a sensitivity map (one
part of one layer at a time) into settings per layer and part, and checks the plan against the uniform
setting at no more bytes, on text that the map has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perpend.errors import InputError, unknown_name
from perpend.studies.compression import Setting

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from perpend.compression.blockwise import Compression
    from perpend.compression.method import Regime

# (component, norm it is given): the parts as they are, all at ‖e‖, and e⊥ shrunk to ‖e∥‖
VARIANTS = (
    ("both", "own"),
    ("perpendicular", "own"),
    ("parallel", "own"),
    ("perpendicular", "error"),
    ("parallel", "error"),
    ("random", "error"),
    ("perpendicular", "parallel"),
    ("random", "parallel"),
)


def surgery(
    base: nn.Module,
    other: nn.Module,
    windows: Any,
    *,
    variants: Sequence[tuple[str, str]] = VARIANTS,
    batch: int = 4,
    seed: int = 0,
) -> pd.DataFrame:
    """Change of the base model's loss with one part of the error at every attn and mlp site.

    Columns component, norm, loss, change, low, high (nats a token; 95 % interval over sequences, paired).
    `both` at its own norm is the compressed model itself.
    """
    import math

    import pandas as pd

    from perpend.compression import injection
    from perpend.evaluation.perplexity import paired, perplexity, token_nll

    plain = token_nll(base, windows, batch=batch)
    rows = [{"component": "none", "norm": "own", "loss": perplexity("loss", plain).loss, "change": 0.0}]
    for which, match in variants:
        with injection(base, other, which, match=match, seed=seed):
            nll = token_nll(base, windows, batch=batch)
        gap = paired(plain, nll)
        rows.append(
            {
                "component": which,
                "norm": match,
                "loss": perplexity("loss", nll).loss,
                "change": gap.difference,
                "low": gap.low if math.isfinite(gap.low) else None,
                "high": gap.high if math.isfinite(gap.high) else None,
            }
        )
    return pd.DataFrame(rows)


def plan(
    base: nn.Module,
    regime: Regime,
    setting: Setting,
    *,
    option: str,
    values: Sequence[Any],
    map_tokens: Tensor,
    component: str = "both",
    caution: float = 1.0,
) -> dict[str, Any]:
    """A plan for one setting of a regime, and its check at equal bytes.

    option, values: the setting and what it may be; the regime's own value is the uniform reference and is
    always among them. component: whether the sites are ranked by the whole error of a move ("both") or by
    the part across the update alone ("perpendicular"). map_tokens: sequences for the maps, not those of
    setting.windows. caution: standard errors added to the cost of a move, so that noise is not taken for
    gain. Returns the plan, both losses and both sizes.
    """
    from perpend.compression import allocate, compress, sensitivity
    from perpend.compression.blockwise import compressible
    from perpend.compression.method import with_settings
    from perpend.compression.plan import site_costs
    from perpend.evaluation.perplexity import paired, perplexity, token_nll
    from perpend.training.export import copied

    if option not in regime.method.defaults:
        raise unknown_name(f"setting of {regime.method.name}", option, regime.method.defaults)
    if component not in ("both", "perpendicular"):
        raise InputError(f"a plan ranks sites by 'both' or 'perpendicular', not {component!r}")
    reference = regime.settings[option]
    others = [value for value in sorted(set(values)) if value != reference]
    if not others:
        raise InputError(f"a plan needs a value of {option} besides {reference}")
    common = {"batch": setting.batch, "keep": setting.keep, "progress": setting.progress}

    def compressed(chosen: Regime, **more: Any) -> tuple[nn.Module, Compression]:
        model = copied(base)
        return model, compress(model, setting.calibration, chosen, **common, **more)

    uniform, made = compressed(regime)
    matrices = compressible(base, keep=setting.keep)
    sites = [(layer, part) for layer, own in matrices.items() for part in dict.fromkeys(m.part for m in own)]
    changes = {reference: dict.fromkeys(sites, 0.0)}
    sizes = {}
    for value in [reference, *others]:
        candidate = with_settings(regime, **{option: value})
        moved, made = (uniform, made) if value == reference else compressed(candidate)
        sizes[value] = {
            site: sum(
                candidate.method.bytes(m, candidate.settings)
                + made.facts[m.name].get("extra_bytes", 0)  # what it multiplies with at run time
                for m in matrices[site[0]]
                if m.part == site[1]
            )
            for site in sites
        }
        if value == reference:
            continue
        table = sensitivity(
            uniform,
            moved,
            map_tokens,
            components=[(component, "own")],
            batch=setting.batch,
            progress=setting.progress,
        )
        changes[value] = {
            (int(r.layer), r.part): float(r.change) + caution * float(r.se or 0.0) for r in table.itertuples()
        }
        del moved
    budget = sum(sizes[reference].values())
    allocation = allocate(site_costs(changes, sizes), budget)
    planned, made = compressed(
        regime, plan={site: {option: value} for site, value in allocation.choice.items()}
    )
    plain = token_nll(uniform, setting.windows, batch=setting.batch)
    better = token_nll(planned, setting.windows, batch=setting.batch)
    gap = paired(plain, better)
    return {
        "regime": regime.name,
        "option": option,
        "component": component,
        "uniform": {"value": reference, "bytes": budget, **_loss(perplexity("uniform", plain))},
        "plan": {"bytes": made.bytes, **_loss(perplexity("plan", better))},
        "difference": {"loss": gap.difference, "low": gap.low, "high": gap.high},
        "predicted": allocation.loss,
        "caution": caution,
        "choice": [{"layer": s[0], "part": s[1], option: v} for s, v in sorted(allocation.choice.items())],
    }


def _loss(result: Any) -> dict[str, float]:
    return {"loss": result.loss, "perplexity": result.perplexity}
