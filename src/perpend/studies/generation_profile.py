"""How much of an update is along the stream, token by token, while a model writes? (Figure 1 of the paper.)

    profile = generation_profile(model, prompts, steps=64)
    profile.table          # step, layer, part, prompt, ratio, alpha

The ratio ‖Δ∥‖/‖Δ⊥‖ of the directional-decomposition paper, §3, at each step of a real greedy generation with
the model's own cache: step 0 is the prompt's last token, step s the s-th token written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.placement import input_device
from perpend.models.stream import Contribution, blocks, contributions
from perpend.surveys._update_sums import RELATIVE_ZERO, three_numbers
from perpend.surveys.updates import random_direction

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class GenerationProfile:
    """`ratio` and `alpha` [steps, layers, parts, prompts], NaN where Δ⊥ or z is zero.

    `tokens` [prompts, steps] are those written; `cached`: every pass after the first read one token alone.
    """

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    ratio: np.ndarray
    alpha: np.ndarray
    tokens: np.ndarray
    width: int
    cached: bool

    @property
    def table(self) -> pd.DataFrame:
        """One row a step, layer, part and prompt."""
        import pandas as pd

        steps, prompts = self.ratio.shape[0], self.ratio.shape[-1]
        grid = pd.MultiIndex.from_product(
            [range(steps), self.layers, self.parts, range(prompts)], names=["step", "layer", "part", "prompt"]
        ).to_frame(index=False)
        grid["ratio"], grid["alpha"] = self.ratio.reshape(-1), self.alpha.reshape(-1)
        return grid

    @property
    def results(self) -> dict[str, Any]:
        """Mean ratio over steps and prompts, first and last quarter of the steps, per layer and part."""
        quarter = max(1, len(self.ratio) // 4)
        mean = {
            "ratio": self.ratio,
            "first_quarter": self.ratio[:quarter],
            "last_quarter": self.ratio[-quarter:],
        }
        return {
            "cached": self.cached,
            "null": random_direction(self.width),
            "per_layer": [
                {
                    "layer": layer,
                    **{
                        part: {key: _mean(value[:, i, j]) for key, value in mean.items()}
                        for j, part in enumerate(self.parts)
                    },
                }
                for i, layer in enumerate(self.layers)
            ],
        }


def sampled_layers(count: int, wanted: int = 3) -> list[int]:
    """Layers spread over the depth, each in the middle of its share: 5, 15, 25 of 30."""
    wanted = min(wanted, count)
    return [int((i + 0.5) * count / wanted) for i in range(wanted)]


def generation_profile(
    model: nn.Module,
    prompts: Tensor,
    *,
    steps: int = 64,
    layers: Sequence[int] | None = None,
    parts: Sequence[str] | None = None,
) -> GenerationProfile:
    """Watch the updates while `model` continues `prompts` [n, T] by `steps` tokens, greedily.

    layers   block indices; None: three, spread over the depth
    parts    of "attn", "mlp", "block"; None: all that the family has

    The end-of-text token does not stop it. Raises InputError for a model that cannot generate.
    """
    if not hasattr(model, "generate") or not getattr(model, "can_generate", lambda: True)():
        raise InputError(
            f"{type(model).__name__} does not generate text: this study needs a causal language model"
        )
    if prompts.ndim != 2 or steps < 1:
        raise InputError(f"prompts [n, T] and at least one step, not {tuple(prompts.shape)} and {steps}")
    chosen = sampled_layers(len(blocks(model))) if layers is None else layers
    seen: dict[tuple[int, str], list[Tensor]] = {}
    lengths: set[int] = set()
    width = [0]

    def visit(c: Contribution) -> None:
        done = seen.setdefault((c.layer, c.part), [])
        if done:
            lengths.add(c.update.shape[1])
        width[0] = c.update.shape[-1]
        done.append(three_numbers(c.update[:, -1], c.reference[:, -1]).cpu())

    prompts = prompts.to(input_device(model))
    with contributions(model, visit, parts=parts, layers=chosen) as watched, torch.no_grad():
        output = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            use_cache=True,
            max_new_tokens=steps,
            min_new_tokens=steps,
            pad_token_id=0,
        )
    found = tuple(block.index for block in watched)
    kinds = tuple(dict.fromkeys(part for _, part in seen))
    numbers = torch.stack(
        [torch.stack([torch.stack(seen[layer, part], 1) for part in kinds], 2) for layer in found], 2
    ).double()  # [3, steps, layers, parts, prompts]
    z, dot, across = numbers.numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        alpha = np.where(z > 0, dot / z**2, np.nan)
        along = np.abs(alpha) * z
        ratio = np.where(across > RELATIVE_ZERO * np.hypot(along, across), along / across, np.nan)
    return GenerationProfile(
        layers=found,
        parts=kinds,
        ratio=ratio,
        alpha=alpha,
        tokens=output[:, prompts.shape[1] :].cpu().numpy(),
        width=width[0],
        cached=lengths <= {1},
    )


def _mean(values: np.ndarray) -> float | None:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if len(kept) else None
