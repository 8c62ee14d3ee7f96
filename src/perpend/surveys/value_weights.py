"""Attention rows weighted by the size of what each key contributes, before they are closed.

    A_tj  →  A_tj·‖v_j‖ / Σ_i A_ti·‖v_i‖              `value`: the size of the key's value
    A_tj  →  A_tj·‖W_O^h v_j‖ / Σ_i …                 `output`: of what head h would add to the stream for it

In logits the weight is an addend, log‖v_j‖, that is the same for all queries of a sequence; ‖W_O^h v‖ comes
from the Gram matrix of W_O^h. A factor that is common to all keys (a residual multiplier, a LayerScale of one
number) leaves no trace after closure.

Source: "Which Question Is Your Attention Metric Answering?", Section 7 (value-weighted rows as future work).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.models.attention import AttentionCall, AttentionSite, attach
from perpend.models.layout import Block, blocks

WEIGHTS = ("value", "output")


class LogWeights:
    """log‖v_j‖ or log‖W_O^h v_j‖ of the first keys of one sequence of a call.

    A head with a key whose value is zero gets NaN for all its keys: its weighted rows have no logarithm, and
    the head none of these statistics. `grams`: (W_O^h)ᵀ W_O^h by layer, [H, d_v, d_v], for `output`.
    """

    def __init__(self, grams: dict[int, Tensor] | None = None) -> None:
        self._grams = grams

    def __call__(self, call: AttentionCall, b: int, keys: int) -> Tensor:
        """Log weights [H, keys], float64."""
        value = call.value[b, :, :keys].double()
        if self._grams is None:
            square = value.square().sum(-1).repeat_interleave(call.groups, 0)
        else:
            gram = self._grams[call.layer].to(value.device)
            value = value.repeat_interleave(call.groups, 0)
            square = torch.einsum("hkd,hde,hke->hk", value, gram, value)
        whole = (square > 0).all(-1, keepdim=True)
        return torch.where(whole, square.clamp_min(torch.finfo(square.dtype).tiny).log() / 2, torch.nan)


def log_weights(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    kinds: Sequence[str],
    run: object,
    inputs: dict[str, Tensor],
    tower: str = "text",
) -> dict[str, LogWeights]:
    """One `LogWeights` a kind of WEIGHTS. `run(inputs)` is a pass of one sequence, made only for `output`.

    Raises InputError for an unknown kind, and for `output` where W_O is not known or does not read the
    aggregate itself (a gate or a norm between them).
    """
    for kind in kinds:
        if kind not in WEIGHTS:
            raise unknown_name("value weight", kind, WEIGHTS)
    found = {"value": LogWeights()} if "value" in kinds else {}
    if "output" in kinds:
        found["output"] = LogWeights(_grams(model, sites, run, inputs, tower))
    return {kind: found[kind] for kind in kinds}


def _grams(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    run: object,
    inputs: dict[str, Tensor],
    tower: str,
) -> dict[int, Tensor]:
    of_block = {block.index: block for block in blocks(model)} if tower == "text" else {}
    grams = {}
    for site in sites:
        weight = _projection(of_block.get(site.block), site)
        if weight is None:
            raise InputError(
                f"{site.name}: which module is W_O is not known, so rows cannot be weighted by ‖W_O v‖; ask "
                "for value weights alone"
            )
        wide = weight.double()
        grams[site.index] = torch.einsum("ohd,ohe->hde", wide, wide)
    _check_readers(model, sites, of_block, run, inputs)
    return grams


def _projection(block: Block | None, site: AttentionSite) -> Tensor | None:
    weight = None if block is None else block.projection(site.heads)
    return weight if weight is not None and weight.shape[-1] == site.value_dim else None


def _check_readers(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    of_block: dict[int, Block],
    run: object,
    inputs: dict[str, Tensor],
) -> None:
    """What W_O reads must be the aggregate itself, seen on one sequence."""
    made: dict[int, Tensor] = {}
    wrong: list[str] = []

    def hook(call: AttentionCall, output: Tensor) -> None:
        made[call.site.block] = output.flatten(2)

    def reads(site: AttentionSite) -> object:
        def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            aggregate = made.pop(site.block, None)
            if aggregate is None:
                return
            same = args[0].numel() == aggregate.numel()
            if not same or not torch.equal(args[0].reshape(aggregate.shape), aggregate.to(args[0].dtype)):
                wrong.append(site.name)

        return look

    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(attach(model, hook, sites=sites))
        for site in sites:
            module = of_block[site.block].out_proj
            stack.callback(module.register_forward_pre_hook(reads(site)).remove)  # type: ignore[union-attr]
        run(inputs)  # type: ignore[operator]
    if wrong:
        raise InputError(
            f"{wrong[0]}: W_O does not read the aggregate itself (a gate or a norm stands between), so ‖W_O "
            "v‖ of a key is not defined; ask for value weights alone"
        )
