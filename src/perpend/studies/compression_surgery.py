"""What each part of a compression error costs, and where compression should spend its bytes.

`surgery` runs the base model with one part of the error at all sites; `plan` turns a sensitivity map (one
part of one layer at a time) into settings per layer and part, and checks the plan against the uniform
setting at no more bytes, on text that the map has not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perpend.errors import InputError, unknown_name
from perpend.studies.compression import Setting

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

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
    sensitivity: pd.DataFrame | None = None,
) -> dict[str, Any]:
    """A plan for one setting of a regime, and its check at equal bytes.

    option, values: the setting and what it may be; the regime's own value is the uniform reference and is
    always among them. component: whose injected loss and whose energy rank the sites, "both" (e) or
    "perpendicular" (e⊥). map_tokens: sequences for map and errors, not those of setting.windows.
    sensitivity: a map made before, of the reference. Returns the plan, both losses and both sizes.
    """
    from perpend.compression import allocate, compress, measure
    from perpend.compression import sensitivity as make_map
    from perpend.compression.blockwise import compressible
    from perpend.compression.method import with_settings
    from perpend.compression.plan import predicted_costs
    from perpend.evaluation.perplexity import paired, perplexity, token_nll

    if option not in regime.method.defaults:
        raise unknown_name(f"setting of {regime.method.name}", option, regime.method.defaults)
    if component not in ("both", "perpendicular"):
        raise InputError(f"a plan ranks sites by 'both' or 'perpendicular', not {component!r}")
    reference = regime.settings[option]
    options = sorted({*values, reference})
    if len(options) < 2:
        raise InputError(f"a plan needs more than one value of {option}")
    metric = "total_squared" if component == "both" else "perpendicular_squared"
    common = {"batch": setting.batch, "keep": setting.keep, "progress": setting.progress}
    errors: dict[Any, dict] = {}
    sizes: dict[Any, dict] = {}
    uniform = None
    for value in options:
        candidate = with_settings(regime, **{option: value})
        other = copy.deepcopy(base)
        compress(other, setting.calibration, candidate, **common)
        table = measure(base, other, map_tokens, modes=("local",), batch=setting.batch).table
        errors[value] = {
            (int(r.layer), r.part): getattr(r, metric) for r in table.itertuples() if r.part != "block"
        }
        sizes[value] = dict.fromkeys(errors[value], 0.0)
        for layer, matrices in compressible(base, keep=setting.keep).items():
            for matrix in matrices:
                sizes[value][layer, matrix.part] += candidate.method.bytes(matrix, candidate.settings)
        if value == reference:
            uniform = other
            if sensitivity is None:
                sensitivity = make_map(
                    base, other, map_tokens, components=[(component, "own")], batch=setting.batch,
                    progress=setting.progress,
                )  # fmt: skip
        else:
            del other
    chosen_map = sensitivity[(sensitivity["component"] == component) & (sensitivity["match"] == "own")]
    changes = {(int(r.layer), r.part): float(r.change) for r in chosen_map.itertuples()}
    budget = sum(sizes[reference].values())
    allocation = allocate(predicted_costs(changes, errors, sizes, reference), budget)
    planned = copy.deepcopy(base)
    compress(
        planned,
        setting.calibration,
        regime,
        plan={s: {option: v} for s, v in allocation.choice.items()},
        **common,
    )
    plain = token_nll(uniform, setting.windows, batch=setting.batch)
    better = token_nll(planned, setting.windows, batch=setting.batch)
    gap = paired(plain, better)
    return {
        "regime": regime.name,
        "option": option,
        "component": component,
        "uniform": {"value": reference, "bytes": budget, **_loss(perplexity("uniform", plain))},
        "plan": {"bytes": allocation.bytes, **_loss(perplexity("plan", better))},
        "difference": {"loss": gap.difference, "low": gap.low, "high": gap.high},
        "predicted": {"uniform": sum(max(c, 0) for c in changes.values()), "plan": allocation.loss},
        "choice": [{"layer": s[0], "part": s[1], option: v} for s, v in sorted(allocation.choice.items())],
    }


def _loss(result: Any) -> dict[str, float]:
    return {"loss": result.loss, "perplexity": result.perplexity}
