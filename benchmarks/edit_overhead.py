"""What an edit costs per forward pass, as a ratio to the unedited model: prefill and cached decoding.

    python benchmarks/edit_overhead.py                              # the default model, one thread
    python benchmarks/edit_overhead.py --model gpt2 --length 1024 --json overhead.json

In every round the unedited model (twice: the second is an A/A control, whose ratio says how much of a
difference is noise), the edited one and plain hooks take turns. Time is the thread's own, spent inside the
attention function (where value edits live), over the whole unedited forward pass; residual edits live between
modules, so theirs is the ratio of whole passes. Goals at this size on a CPU: prefill at most 1.025, decoding
at most 1.06.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import perpend
from perpend.models.attention import AttentionSite, attention_sites
from perpend.models.attention.sites import implementation, routing
from perpend.models.edit import SITES

GOALS = {"prefill": 1.025, "decode": 1.06}


class Clock:
    """Thread time spent inside the attention function since the last `take`."""

    def __init__(self) -> None:
        self.inside = 0.0

    def take(self) -> float:
        spent, self.inside = self.inside, 0.0
        return spent

    @contextmanager
    def timing(self, model: nn.Module) -> Iterator[None]:
        """The attention function as it is now, edits included, with the clock around it."""
        module = model.get_submodule(attention_sites(model)[0].name)
        interface, own = routing(type(module)).interface, implementation(module)
        before = interface[own]
        overridden = own in interface._local_mapping

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return before(*args, **kwargs)
            finally:
                self.inside += time.thread_time() - began

        interface[own] = timed
        try:
            yield
        finally:
            if overridden:
                interface[own] = before
            else:
                del interface[own]


@contextmanager
def plain_hooks(model: nn.Module, site: str) -> Iterator[None]:
    """`value.full` or `residual.attn` at s∥ = 0 as one would write it by hand, with nothing of perpend's.

    value.full: v from v_proj, o at o_proj's input, v normalised and repeated over query heads. residual.attn:
    the block's input kept by a pre-hook, attention's output changed by a hook. `value.exclude_self` has no
    such form: no module shows A_tt, short of running eager attention for its T × T rows.
    """
    kept: dict[nn.Module, Tensor] = {}
    handles = []

    def without(y: Tensor, z: Tensor) -> Tensor:
        unit = torch.nn.functional.normalize(z.float(), dim=-1)
        return (y.float() - (y.float() * unit).sum(-1, keepdim=True) * unit).to(y.dtype)

    def value_full(attention: nn.Module, found: AttentionSite) -> None:
        def keep(layer: nn.Module, args: Any, output: Tensor) -> None:
            kept[attention] = output

        def change(layer: nn.Module, args: Any) -> Any:
            o = args[0].unflatten(-1, (found.heads, -1))
            v = kept[attention].unflatten(-1, (found.kv_heads, -1))
            return (without(o, v.repeat_interleave(found.heads // found.kv_heads, dim=-2)).flatten(-2),)

        handles.append(attention.v_proj.register_forward_hook(keep))
        handles.append(attention.o_proj.register_forward_pre_hook(change))

    def residual_attn(block: nn.Module, attention: nn.Module) -> None:
        def keep(layer: nn.Module, args: Any) -> None:
            kept[attention] = args[0]

        def change(layer: nn.Module, args: Any, output: Any) -> Any:
            return (without(output[0], kept[attention]), *output[1:])

        handles.append(block.register_forward_pre_hook(keep))
        handles.append(attention.register_forward_hook(change))

    for found in attention_sites(model):
        attention = model.get_submodule(found.name)
        if site == "value.full":
            value_full(attention, found)
        else:
            residual_attn(model.get_submodule(found.name.rpartition(".")[0]), attention)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def conditions(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Name -> a context in which the model runs."""
    found: dict[str, Callable[[], Any]] = {"unedited": nullcontext, "unedited again (A/A)": nullcontext}
    for site in SITES:
        found[site] = lambda site=site: perpend.edit(model, site, 0.0)
    module = model.get_submodule(attention_sites(model)[0].name)
    if hasattr(module, "v_proj") and hasattr(module, "o_proj"):
        for site in ("value.full", "residual.attn"):
            found[f"{site}, plain hooks"] = lambda site=site: plain_hooks(model, site)
    return found


def check(model: nn.Module, tokens: Tensor) -> None:
    """The plain hooks make the same edit, or there is nothing to compare."""
    ways = conditions(model)
    for name in ways:
        if name.endswith("plain hooks"):
            with ways[name]():
                by_hand = model(tokens)[0]
            with ways[name.partition(",")[0]]():
                ours = model(tokens)[0]
            gap = float((by_hand - ours).abs().max() / ours.abs().max())
            if gap > 1e-3:
                raise SystemExit(f"{name}: the logits differ by {gap:.1e} of the largest")


def prefill(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    return lambda: model(tokens, use_cache=True, logits_to_keep=1)


def decode(model: nn.Module, tokens: Tensor, steps: int) -> Callable[[], None]:
    """`steps` tokens one by one after a prefill that is not timed; the cache is cut back each time."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = getattr(model(tokens, use_cache=True, logits_to_keep=1), name)

    def run() -> None:
        for _ in range(steps):
            model(tokens[:, -1:], use_cache=True, **{name: cache})
        cache.crop(-steps)

    return run


def measure(model: nn.Module, run: Callable[[], None], rounds: int, passes: int) -> list[dict[str, Any]]:
    """Medians and quartiles over rounds of each condition against the unedited pass of its own round."""
    clock, ways = Clock(), conditions(model)
    whole = {name: [] for name in ways}
    inside = {name: [] for name in ways}
    for number in range(rounds + 1):
        order = list(ways) if number % 2 else list(ways)[::-1]
        for name in order:
            with ExitStack() as stack:
                stack.enter_context(ways[name]())
                stack.enter_context(clock.timing(model))
                clock.take()
                began = time.thread_time()
                run()
                if number:  # the first round warms up
                    whole[name].append((time.thread_time() - began) / passes)
                    inside[name].append(clock.take() / passes)
    base, attention = np.array(whole["unedited"]), np.array(inside["unedited"])
    layers, rows = len(attention_sites(model)), []
    for name in ways:
        passed = np.array(whole[name]) / base
        extra = np.array(inside[name]) - attention
        within = name.startswith(("value.", "unedited")) and "hooks" not in name
        ratio = 1 + extra / base if within else passed
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
        rows.append(
            {
                "condition": name,
                "ratio": float(middle),
                "quartiles": [float(low), float(high)],
                "of": "attention function" if within else "whole pass",
                "whole_pass_ratio": float(np.median(passed)),
                "microseconds_a_layer": float(np.median(ratio - 1) * np.median(base) / layers * 1e6),
                "milliseconds": float(np.median(whole[name])) * 1000,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stage", choices=tuple(GOALS), action="append", help="default: both")
    parser.add_argument("--json", help="write the result to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = perpend.load(arguments.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        10, model.config.vocab_size, (arguments.batch, arguments.length), generator=generator
    )
    result: dict[str, Any] = {
        "model": arguments.model or "default",
        **vars(arguments),
        "torch": torch.__version__,
    }
    with torch.inference_mode():
        check(model, tokens[:, :32])
        stages = {
            "prefill": (prefill(model, tokens), 1),
            "decode": (decode(model, tokens, arguments.steps), arguments.steps),
        }
        for stage in arguments.stage or stages:
            run, passes = stages[stage]
            result[stage] = measure(model, run, arguments.rounds, passes)
            print(f"{stage}: {arguments.batch} × {arguments.length if stage == 'prefill' else 1} tokens")
            for row in result[stage]:
                low, high = row["quartiles"]
                value = row["condition"] in ("value.full", "value.exclude_self")
                mark = "" if not value else " ok" if row["ratio"] <= GOALS[stage] else " above the goal"
                print(
                    f"  {row['condition']:28s} {row['ratio']:.4f} ({low:.4f} to {high:.4f}, {row['of']}) "
                    f"{row['microseconds_a_layer']:7.1f} µs a layer{mark}"
                )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
